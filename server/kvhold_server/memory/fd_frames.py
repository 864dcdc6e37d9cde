"""One JSON object and any number of descriptors over a blocking unix socket: how daemon and holder talk.

u32 length, JSON {"num_fds": n, …}, then n descriptors by SCM_RIGHTS, up to 64 with each byte "F"
"""

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_LENGTH = struct.Struct(">I")
_FD_MARK = b"F"
_MAX_FDS_PER_MESSAGE = 64
_INT_BYTES = array.array("i").itemsize
MAX_FRAME_BYTES = 1 << 24
MAX_FDS = 8192


class FrameError(Exception):
    """The other side does not speak this protocol, or went away in the middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What arrived. Whoever has it closes the descriptors."""

    fields: dict[str, object]
    fds: tuple[int, ...] = ()

    def text(self, key: str) -> str:
        """Raises FrameError."""
        value = self.fields.get(key)
        if not isinstance(value, str):
            raise FrameError(f"{key} is {value!r}")
        return value

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def send_frame(connection: socket.socket, fields: dict[str, object], fds: Sequence[int] = ()) -> None:
    """Raises OSError. The descriptors stay the caller's."""
    body = json.dumps({**fields, "num_fds": len(fds)}).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)
    for start in range(0, len(fds), _MAX_FDS_PER_MESSAGE):
        socket.send_fds(connection, [_FD_MARK], list(fds[start : start + _MAX_FDS_PER_MESSAGE]))


def receive_frame(connection: socket.socket) -> Frame:
    """Raises FrameError, OSError; then no descriptor is left open."""
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
    if not 0 < length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes")
    try:
        fields = json.loads(_read_exactly(connection, length))
    except (ValueError, RecursionError):
        raise FrameError("a frame that is not JSON") from None
    num_fds = fields.get("num_fds") if isinstance(fields, dict) else None
    if not isinstance(num_fds, int) or not 0 <= num_fds <= MAX_FDS:
        raise FrameError("a frame without a number of descriptors")
    return Frame(fields=fields, fds=_receive_fds(connection, num_fds))


def _receive_fds(connection: socket.socket, num_fds: int) -> tuple[int, ...]:
    fds: list[int] = []
    try:
        while len(fds) < num_fds:
            space = socket.CMSG_SPACE(_MAX_FDS_PER_MESSAGE * _INT_BYTES)
            mark, ancillary, flags, _ = connection.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(data[: len(data) - len(data) % _INT_BYTES])
                    fds.extend(numbers)
            if not mark or flags & socket.MSG_CTRUNC:
                raise FrameError(f"{len(fds)} of {num_fds} descriptors came")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return tuple(fds)


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        piece = connection.recv(length - len(received))
        if not piece:
            raise FrameError("the connection ended")
        received += piece
    return bytes(received)
