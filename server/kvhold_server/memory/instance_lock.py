"""One live daemon per instance, and proof of death for everybody else's.

The lock file lies beside the segments, so that whoever can see the segments can see whether their daemon lives, also
from another PID namespace. `flock` dies with its holder, SIGKILL included; the pid in the file is for people. The
file's modification time is a heartbeat (`beat`), so that "how long has it been dead" has an answer after the death.
And it says which directory the instance is of, and in which mount namespace: where that directory is gone, nobody can
come back.

    4711
    mnt:[4026531841]
    /run/kvhold
"""

import fcntl
import os
from pathlib import Path

from kvhold_server.memory.errors import InstanceInUse

_MAX_TEXT_BYTES = 8192


class InstanceLock:
    """Held from construction to `close`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def acquire(cls, path: Path, instance_directory: Path | None = None) -> "InstanceLock":
        """Raises InstanceInUse with the owner's pid. No directory: that of the lock itself."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = _read_pid(fd)
                os.close(fd)
                raise InstanceInUse(str(path), pid) from None
            if _still_named(fd, path):
                break
            os.close(fd)  # a reclaimer unlinked it between our open and our lock; the next open makes a new one
        os.ftruncate(fd, 0)
        os.pwrite(
            fd, f"{os.getpid()}\n{_mount_namespace()}\n{(instance_directory or path.parent).resolve()}\n".encode(), 0
        )
        return cls(path, fd)

    @classmethod
    def try_acquire_dead(cls, path: Path) -> "InstanceLock | None":
        """Takes the lock of a daemon that is gone, leaving its pid and heartbeat; None if it lives or is unknown."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        if not _still_named(fd, path):
            os.close(fd)
            return None
        return cls(path, fd)

    def beat(self) -> None:
        """Marks us as alive now."""
        os.utime(self._fd)

    def last_beat_s(self) -> float:
        """Unix time of the last heartbeat."""
        return os.fstat(self._fd).st_mtime

    def cannot_come_back(self) -> bool:
        """Its directory is gone, as far as we can see: only from the namespace that it was in."""
        lines = os.pread(self._fd, _MAX_TEXT_BYTES, 0).decode(errors="replace").splitlines()
        return len(lines) == 3 and lines[1] == _mount_namespace() != "" and not Path(lines[2]).exists()

    def close(self, *, remove: bool = False) -> None:
        """Lets the next daemon in; `remove` when nothing is left to guard."""
        if self._fd < 0:
            return
        if remove and _still_named(self._fd, self.path):
            self.path.unlink()
        os.close(self._fd)
        self._fd = -1


def _still_named(fd: int, path: Path) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def _read_pid(fd: int) -> int:
    text = os.pread(fd, 32, 0).partition(b"\n")[0]
    return int(text) if text.isdigit() else 0


def _mount_namespace() -> str:
    """Empty where /proc does not say."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""
