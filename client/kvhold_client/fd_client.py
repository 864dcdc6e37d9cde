"""Fetches a region's descriptors from the daemon's fd channel, and keeps the connection, which says that we live.

One request, one answer, descriptors beside it (SCM_RIGHTS). While the connection is open the daemon knows that this
process may still touch the memory; `unmapped` says that it no longer does. If the process dies, the kernel says it.
"""

import array
import json
import os
import socket
import stat
import struct
from dataclasses import dataclass

from kvhold_client.mapping_errors import ChannelBroken, ChannelNotReachable, ChannelRefused

GOODBYE_TIMEOUT_S = 1.0
_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 1 << 20
_MAX_FDS = 8192
_MAX_FDS_PER_MESSAGE = 253


class MappingLease:
    """The open connection that stands for one mapping."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection: socket.socket | None = connection

    def unmapped(self) -> None:
        """Tells the daemon that this process no longer maps the region. Call it after unmapping, not before.

        Returns when the daemon has heard it (it hangs up), so that what follows, such as deleting the pool, finds no
        mapping; or after GOODBYE_TIMEOUT_S.
        """
        if self._connection is None:
            return
        with self._connection as connection:
            self._connection = None
            try:
                connection.settimeout(GOODBYE_TIMEOUT_S)
                _send_frame(connection, {"event": "unmapped"})
                while connection.recv(4096):
                    continue
            except OSError:
                return  # the daemon is gone, or has better to do: it will find out


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRegion:
    """Descriptors, in order of address, that the receiver closes, and what the daemon says about them."""

    fds: tuple[int, ...]
    chunk_sizes_bytes: tuple[int, ...]
    size_bytes: int
    device_uuid: str
    read_only: bool
    lease: MappingLease


def fetch_region(path: str, token: bytes, *, timeout_s: float = 10.0) -> ReceivedRegion:
    """Redeems a token. Raises ChannelNotReachable, ChannelRefused, ChannelBroken."""
    connection = _connect(path, timeout_s)
    fds: list[int] = []
    try:
        _send_frame(connection, {"token": token.hex()})
        answer = _read_frame(connection, path)
        if answer.get("status") != "ok":
            raise ChannelRefused(path, str(answer.get("status")), str(answer.get("message")))
        _receive_fds(connection, path, _int(answer, "num_fds", path), fds)
        region = ReceivedRegion(
            fds=tuple(fds),
            chunk_sizes_bytes=_ints(answer, "chunk_sizes_bytes", path),
            size_bytes=_int(answer, "size_bytes", path),
            device_uuid=str(answer.get("device_uuid", "")),
            read_only=bool(answer.get("read_only")),
            lease=MappingLease(connection),
        )
        if len(region.chunk_sizes_bytes) != len(fds) or sum(region.chunk_sizes_bytes) != region.size_bytes:
            raise ChannelBroken(path, f"{len(fds)} descriptors do not add up to a region of {region.size_bytes} bytes")
        connection.settimeout(None)
        return region
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        connection.close()
        if isinstance(error, OSError):
            raise ChannelBroken(path, f"{error.strerror or error}") from error
        raise


def _connect(path: str, timeout_s: float) -> socket.socket:
    """Waits where others are before us: with a timeout of the socket module's a full queue would refuse us at once."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    kernels_timeout = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, kernels_timeout)
    try:
        connection.connect(path)
        connection.settimeout(timeout_s)
    except OSError as error:
        connection.close()
        waited = isinstance(error, BlockingIOError)
        problem = f"not accepted within {timeout_s:g} s" if waited else f"{error.strerror or error}"
        raise ChannelNotReachable(path, problem, os.geteuid(), os.getegid(), _describe_socket(path)) from error
    return connection


def _describe_socket(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError as error:
        return f"not visible to us: {error.strerror}"
    return f"uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):o}"


def _send_frame(connection: socket.socket, frame: dict[str, object]) -> None:
    body = json.dumps(frame).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _read_frame(connection: socket.socket, path: str) -> dict[str, object]:
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size, path))
    if not 0 < length <= _MAX_FRAME_BYTES:
        raise ChannelBroken(path, f"an answer of {length} bytes")
    try:
        frame = json.loads(_read_exactly(connection, length, path))
    except ValueError:
        raise ChannelBroken(path, "an answer that is not JSON") from None
    if not isinstance(frame, dict):
        raise ChannelBroken(path, "an answer that is not an object")
    return frame


def _read_exactly(connection: socket.socket, length: int, path: str) -> bytes:
    received = b""
    while len(received) < length:
        piece = connection.recv(length - len(received))
        if not piece:
            raise ChannelBroken(path, "the daemon closed the connection")
        received += piece
    return received


def _receive_fds(connection: socket.socket, path: str, num_fds: int, fds: list[int]) -> None:
    """Appends to `fds` as they come, so that the caller can close what did come."""
    if not 0 < num_fds <= _MAX_FDS:
        raise ChannelBroken(path, f"{num_fds} descriptors announced")
    item_bytes = array.array("i").itemsize
    while len(fds) < num_fds:
        space = socket.CMSG_SPACE(_MAX_FDS_PER_MESSAGE * item_bytes)
        mark, ancillary, flags, _ = connection.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % item_bytes])
                fds.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise ChannelBroken(path, "descriptors were cut off: raise RLIMIT_NOFILE of this process")
        if not mark:
            raise ChannelBroken(path, f"the daemon closed the connection after {len(fds)} of {num_fds} descriptors")


def _int(answer: dict[str, object], key: str, path: str) -> int:
    value = answer.get(key)
    if not isinstance(value, int):
        raise ChannelBroken(path, f"{key} is {value!r}")
    return value


def _ints(answer: dict[str, object], key: str, path: str) -> tuple[int, ...]:
    values = answer.get(key)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ChannelBroken(path, f"{key} is {values!r}")
    return tuple(values)
