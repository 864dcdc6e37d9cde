"""The local transport's client end: steps, length-framed, on a blocking unix socket. A way to send them as the others
in step_senders.py.

    u32 length, little-endian │ u8 method or code │ protobuf          (the daemon's rpc/local_transport.py draws it)

Not thread-safe, but for `abort`.
"""

import contextlib
import socket
import struct

from kvhold.v1 import block_pb2 as pb
from kvhold_client.errors import InvalidRequest, Unreachable
from kvhold_client.step_refusal import refusal
from kvhold_client.target import MAX_MESSAGE_BYTES

_HEADER = struct.Struct("<IB")
_LENGTH_BYTES = 4
_HELLO = 0
_READ_BYTES = 1 << 16
_STEP = 1  # the daemon serves the whole BlockService here; steps are all that a session sends


class LocalChannel:
    """One connection, bound to one session by the token that OpenSession gave."""

    transport = "local"

    def __init__(self, socket_path: str, token: bytes, *, timeout_s: float) -> None:
        """Connects and says the token. Raises Unreachable: the token may be used up, or the daemon gone."""
        self.socket_path = socket_path
        self._received = b""
        self._is_awaiting = False  # an answer
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

    def call(self, request: pb.StepRequest) -> pb.StepResponse:
        """Sends a step and returns its response. Raises KvholdError."""
        self.send(request)
        return self.receive()

    def send(self, request: pb.StepRequest) -> None:
        """Half a call: `receive` must follow."""
        if self._is_awaiting:  # a signal's exception: the last answer is still to come, and is not this one's
            raise self._broken(ConnectionAbortedError("the last answer was left behind"))
        payload = request.SerializeToString()
        if len(payload) > MAX_MESSAGE_BYTES:
            text = f"the request has {len(payload)} bytes, at most {MAX_MESSAGE_BYTES} are sent; split it"
            raise InvalidRequest(text, reason="MESSAGE_TOO_LARGE")
        self._is_awaiting = True
        try:
            self._socket.sendall(_HEADER.pack(len(payload) + 1, _STEP) + payload)
        except OSError as error:
            raise self._broken(error) from None

    def receive(self) -> pb.StepResponse:
        """The other half."""
        assert self._is_awaiting, "nothing was sent"
        code, payload = self._read()
        self._is_awaiting = False
        if code:
            raise refusal(code, payload, self.socket_path)
        return pb.StepResponse.FromString(payload)

    def give_up_late(self) -> None:
        """The kernel keeps the time."""

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
