"""A small file of ours, mapped shared: what is stored in it survives the death of this process at any instruction.

Every page is allocated before the file gets its name, so that a later store cannot fail, and the file is complete
before it can be found:

    create   .x.new (allocated, filled) ──rename──▶ x
    open     x must be a plain file of ours, mode 0600, of the expected size

Stores are not synced: they survive the process, not the machine. The memory that they describe does not either.
"""

import mmap
import os
from pathlib import Path
from stat import S_ISREG

from kvhold_server.memory.errors import RegionMismatch, SystemCallFailed
from kvhold_server.memory.host_limits import check_file_system


class MappedFile:
    """Owner of one mapping; `close` releases it, the file stays."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.bytes = mapping
        self.words = memoryview(mapping).cast("Q")  # an aligned store of eight bytes is never seen half done

    @classmethod
    def create(cls, path: Path, size_bytes: int, first_bytes: bytes) -> "MappedFile":
        """Replaces whatever had the name. Raises ShmTooSmall, SystemCallFailed; then nothing has changed."""
        check_file_system(path.parent, size_bytes)
        unfinished = path.with_name(f".{path.name}.new")
        unfinished.unlink(missing_ok=True)
        try:
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(fd, 0, size_bytes)
                os.pwrite(fd, first_bytes, 0)
                mapping = mmap.mmap(fd, size_bytes)
            finally:
                os.close(fd)
            os.rename(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise _failed("create", path, error) from error
        return cls(path, mapping)

    @classmethod
    def open(cls, path: Path, size_bytes: int | None = None) -> "MappedFile":
        """Raises FileNotFoundError, RegionMismatch, SystemCallFailed."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _failed("open", path, error) from error
        try:
            stat = os.fstat(fd)
            if not S_ISREG(stat.st_mode) or stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
                raise RegionMismatch(path.name, f"belongs to uid {stat.st_uid}, mode {stat.st_mode & 0o777:o}")
            if stat.st_size == 0 or stat.st_size % 8 or size_bytes not in (None, stat.st_size):
                raise RegionMismatch(path.name, f"has {stat.st_size} bytes, expected {size_bytes}")
            if stat.st_blocks * 512 < stat.st_size:
                raise RegionMismatch(path.name, "has holes: a store into it could fail")
            mapping = mmap.mmap(fd, stat.st_size)
        except OSError as error:
            raise _failed("mmap", path, error) from error
        finally:
            os.close(fd)
        return cls(path, mapping)

    def close(self) -> None:
        """Repeating is harmless."""
        self.words.release()
        self.bytes.close()


def _failed(call: str, path: Path, error: OSError) -> SystemCallFailed:
    return SystemCallFailed(call, str(path), error.errno or 0, type(error).__name__, os.strerror(error.errno or 0))
