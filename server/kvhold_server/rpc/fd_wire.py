"""Frames, descriptors and readiness on a non-blocking unix socket, for the fd channel."""

import asyncio
import json
import socket
import struct
from dataclasses import dataclass

from kvhold_server.domain.errors import PreconditionFailed

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 4096
MAX_FDS_PER_MESSAGE = 64  # the kernel takes 253
FD_MARK = b"F"


@dataclass(eq=False)
class BadFrame(PreconditionFailed):
    """Not a request of this protocol."""

    template = "not a request: {problem}"
    problem: str


async def read_frame(connection: socket.socket) -> dict[str, object]:
    """Raises BadFrame, IncompleteReadError at the end of the stream."""
    (length,) = LENGTH.unpack(await _read_exactly(connection, LENGTH.size))
    if not 0 < length <= MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {length} bytes, 1..{MAX_FRAME_BYTES} are allowed")
    try:
        frame = json.loads(await _read_exactly(connection, length))
    except (ValueError, RecursionError):
        raise BadFrame("a frame that is not JSON") from None
    if not isinstance(frame, dict):
        raise BadFrame("a frame that is not an object")
    return frame


async def _read_exactly(connection: socket.socket, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < length:
        piece = await loop.sock_recv(connection, length - len(received))
        if not piece:
            raise asyncio.IncompleteReadError(received, length)
        received += piece
    return received


async def send_frame(connection: socket.socket, frame: dict[str, object]) -> None:
    """Length and JSON."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    await asyncio.get_running_loop().sock_sendall(connection, LENGTH.pack(len(body)) + body)


async def send_fds(connection: socket.socket, fds: tuple[int, ...]) -> None:
    """One byte and the descriptors, which travel with it or not at all."""
    while True:
        try:
            sent = socket.send_fds(connection, [FD_MARK], list(fds))
            assert sent == len(FD_MARK)
            return
        except BlockingIOError:
            await _wait_writable(connection)


async def _wait_writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(connection, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_writer(connection)


async def wait_readable(fd: int) -> None:
    """Returns once a read on `fd` would not block; for a pidfd: once the process has ended."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


def _resolve(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)
