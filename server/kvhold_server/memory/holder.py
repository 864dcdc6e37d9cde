"""A process that does nothing but keep descriptors, so that the daemon can be replaced without losing its memory.

    daemon A   reserve ─▶ put("llama/0", fds) ─────▶ ┌────────┐
    SIGKILL                                          │ holder │   the kernel keeps what somebody has open
    daemon B   list ─▶ get("llama/0") ◀───────────── └────────┘   adopted: the same bytes

It is small so that it has no reason to be restarted: standard library only, one request per connection, one
connection at a time, no threads. It runs beside the daemon (another container of the pod, another unit), not inside
of it:

    python -m kvhold_server.memory.holder /run/kvhold/holder.sock

Only its own user and root may talk to it. What it holds dies with it, and a daemon that notices gives everything again.
"""

import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvhold_server.memory.descriptor_limit import raise_descriptor_limit
from kvhold_server.memory.fd_frames import MAX_FDS, Frame, FrameError, receive_frame, send_frame

MAX_ENTRIES = 4096
REQUEST_TIMEOUT_S = 5.0
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One region's descriptors and what the daemon wants to know of it later."""

    about: dict[str, object]
    fds: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Holder:
    """The store. Knows no sockets.

    put a ▶ {a}    put b ▶ {a, b}    put a again ▶ the former descriptors are closed    drop a ▶ {b}
    """

    entries: dict[str, Entry] = field(default_factory=dict)

    def answer(self, request: Frame) -> tuple[dict[str, object], tuple[int, ...]]:
        """The reply and the descriptors that go with it, which stay ours. Takes the request's, or closes them."""
        verb = _VERBS.get(str(request.fields.get("verb")))
        try:
            if verb is None:
                raise FrameError(f"verb {request.fields.get('verb')!r}")
            return verb(self, request)
        except FrameError as error:
            request.close()
            return {"status": "error", "problem": str(error)}, ()

    def close(self) -> None:
        for entry in self.entries.values():
            _close_all(entry.fds)
        self.entries.clear()

    def _put(self, request: Frame) -> tuple[dict[str, object], tuple[int, ...]]:
        key = request.text("key")
        about = request.fields.get("about")
        if not isinstance(about, dict) or not request.fds:
            raise FrameError("put needs a description and descriptors")
        others = [entry for name, entry in self.entries.items() if name != key]
        if len(others) >= MAX_ENTRIES or sum(len(entry.fds) for entry in others) + len(request.fds) > MAX_FDS:
            raise FrameError(f"full: at most {MAX_ENTRIES} regions and {MAX_FDS} descriptors")
        former = self.entries.get(key)
        self.entries[key] = Entry(about=about, fds=request.fds)
        if former is not None:
            _close_all(former.fds)
        return {"status": "ok"}, ()

    def _list(self, request: Frame) -> tuple[dict[str, object], tuple[int, ...]]:
        return {"status": "ok", "entries": {key: entry.about for key, entry in self.entries.items()}}, ()

    def _get(self, request: Frame) -> tuple[dict[str, object], tuple[int, ...]]:
        entry = self.entries.get(request.text("key"))
        if entry is None:
            raise FrameError("no such region")
        return {"status": "ok"}, entry.fds

    def _drop(self, request: Frame) -> tuple[dict[str, object], tuple[int, ...]]:
        entry = self.entries.pop(request.text("key"), None)
        _close_all(entry.fds if entry is not None else ())
        return {"status": "ok"}, ()


_VERBS: dict[str, Callable[[Holder, Frame], tuple[dict[str, object], tuple[int, ...]]]] = {
    "put": Holder._put,
    "list": Holder._list,
    "get": Holder._get,
    "drop": Holder._drop,
}


def serve(listener: socket.socket, holder: Holder) -> None:
    """For ever: one connection after the other, none longer than REQUEST_TIMEOUT_S for each piece."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(REQUEST_TIMEOUT_S)
            try:
                raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                _, uid, _ = _CREDENTIALS.unpack(raw)
                if uid not in (0, os.geteuid()):
                    continue
                reply, fds = holder.answer(receive_frame(connection))
                send_frame(connection, reply, fds)
            except (OSError, FrameError):
                continue  # a peer that went away, or one that talks nonsense: the next one is served


def listen(path: Path) -> socket.socket:
    """Raises BlockingIOError if a holder lives there."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept open, and so held, until the process ends
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    old_umask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(old_umask)
    listener.listen(64)
    return listener


def main(arguments: list[str]) -> int:
    """Runs a holder. Status 2: wrong call; 1: another one is there."""
    if len(arguments) != 1:
        print("usage: python -m kvhold_server.memory.holder SOCKET", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    raise_descriptor_limit()
    try:
        listener = listen(path)
    except OSError as error:
        print(f"holder: {path}: {error.strerror or error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve(listener, Holder())
    finally:
        path.unlink(missing_ok=True)
    return 0


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
