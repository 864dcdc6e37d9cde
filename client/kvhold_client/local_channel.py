"""The local transport's client end: BlockService's messages, length-framed, on a blocking unix socket.

    u32 length, little-endian │ u8 method or code │ protobuf          (the daemon's rpc/local_transport.py draws it)

`call` is one round trip. `send` and `receive` are its halves, for callers that have something to do in between; answers
come in the order of the requests. Not thread-safe.
"""

import contextlib
import socket
import struct
from typing import Any, TypeVar

from kvhold.v1 import block_pb2 as pb
from kvhold_client.errors import Unreachable, error_from_status

_HEADER = struct.Struct("<IB")
_LENGTH_BYTES = 4
_HELLO = 0
_READ_BYTES = 1 << 16
_CODES = {
    1: "CANCELLED", 2: "UNKNOWN", 3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND", 6: "ALREADY_EXISTS",
    7: "PERMISSION_DENIED", 8: "RESOURCE_EXHAUSTED", 9: "FAILED_PRECONDITION", 10: "ABORTED", 11: "OUT_OF_RANGE",
    12: "UNIMPLEMENTED", 13: "INTERNAL", 14: "UNAVAILABLE", 15: "DATA_LOSS", 16: "UNAUTHENTICATED",
}  # fmt: skip

Answer = TypeVar("Answer")

STEP, LOOKUP, ALLOCATE, PUBLISH, FREE = 1, 2, 3, 4, 5
RESPONSES: dict[int, Any] = {
    STEP: pb.StepResponse,
    LOOKUP: pb.LookupResponse,
    ALLOCATE: pb.AllocateResponse,
    PUBLISH: pb.PublishResponse,
    FREE: pb.FreeResponse,
}


class LocalChannel:
    """One connection, bound to one session by the token that OpenSession gave."""

    def __init__(self, socket_path: str, token: bytes, *, timeout_s: float) -> None:
        """Connects and says the token. Raises Unreachable: the token may be used up, or the daemon gone."""
        self.socket_path = socket_path
        self._received = b""
        self._num_awaited = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        timeout = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        # The kernel keeps the time: a timeout of the socket module's would cost a poll for each read and write.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        try:
            self._socket.connect(socket_path)
        except OSError as error:
            raise self._broken(error) from None
        self._hello(token)

    def call(self, method: int, request: Any) -> Any:
        """Sends a request and returns its response. Raises KvholdError."""
        self.send(method, request)
        return self.receive(method)

    def send(self, method: int, request: Any) -> None:
        """Half a call: `receive` must follow, once for each, in order."""
        payload = request.SerializeToString()
        try:
            self._socket.sendall(_HEADER.pack(len(payload) + 1, method) + payload)
        except OSError as error:
            raise self._broken(error) from None
        self._num_awaited += 1

    def receive(self, method: int) -> Any:
        """The other half."""
        assert self._num_awaited > 0, "nothing was sent"
        self._num_awaited -= 1
        code, payload = self._read()
        if code:
            raise error_from_status(_CODES.get(code, "UNKNOWN"), "", payload, self.socket_path)
        return RESPONSES[method].FromString(payload)

    def abort(self) -> None:
        """Breaks the connection from another thread: a call under way ends with Unreachable."""
        with contextlib.suppress(OSError):  # broken already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _hello(self, token: bytes) -> None:
        try:
            self._socket.sendall(_HEADER.pack(len(token) + 1, _HELLO) + token)
        except OSError as error:
            raise self._broken(error) from None
        self._read()

    def _read(self) -> tuple[int, bytes]:
        data = self._received or self._more()
        while len(data) < _HEADER.size:
            data += self._more()
        length, code = _HEADER.unpack_from(data)
        end = _LENGTH_BYTES + length
        if len(data) < end:
            rest = bytearray(data)  # a long answer: grown in place
            while len(rest) < end:
                rest += self._more()
            data = bytes(rest)
        self._received = data[end:]
        return code, data[_HEADER.size : end]

    def _more(self) -> bytes:
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise self._broken(error) from None
        if not data:
            raise self._broken(ConnectionResetError("the daemon closed the connection"))
        return data

    def _broken(self, error: OSError) -> Unreachable:
        self._socket.close()
        if isinstance(error, BlockingIOError):
            error = TimeoutError("no answer in time")
        return Unreachable(f"{self.socket_path}: {error}", reason="CONNECTION_BROKEN")
