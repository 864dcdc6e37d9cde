"""BlockService without gRPC's cost, for clients on this host: the same messages, length-framed, on a unix socket.

A gRPC call costs some 400 µs in Python whatever it carries, a frame some 50 µs. Same process, same event loop, same
handlers, same typed errors, same counters. A client gets the path and a one-time token with OpenSession:

    client                                       daemon
      │ ── u32 length │ u8 0      │ token ───────▶ │   once per connection: binds it to the token's session
      │ ◀─ u32 length │ u8 0      │ ────────────── │   welcome
      │ ── u32 length │ u8 method │ request ─────▶ │   1 Step, 2 Lookup, 3 Allocate, 4 Publish, 5 Free
      │ ◀─ u32 length │ u8 code   │ reply ──────── │   0: the response; else a gRPC code and a google.rpc.Status

Lengths are little-endian and count everything behind them. Requests may be sent ahead; replies come in their order,
and each in a turn of its own, so that who sends a hundred ahead delays the others by one:

    sent    A: 1 2 3 4 ...   B: 1        answered    A1 B1 A2 A3 ...

A connection is not a sign of life: the session lives by its KeepAlive stream, and dies by its absence.

Bounds: connections, frame size, unsent replies (a client that does not read is not read from), time to say the token.
"""

import asyncio
import errno
import logging
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from kvhold.v1 import block_pb2 as pb
from kvhold_server.node.recovering import PoolRecovering
from kvhold_server.node.telemetry import Telemetry
from kvhold_server.rpc.fd_peer import listen
from kvhold_server.rpc.framed_calls import OK, Answer, FramedMethod, refusal
from kvhold_server.rpc.interceptors import MalformedMessage, MessageTooLarge
from kvhold_server.rpc.server import SOCKET_MODE
from kvhold_server.rpc.services.blocks import BlockService

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<IB")
LENGTH_BYTES = 4
HELLO = 0
READ_BYTES = 1 << 18
MAX_UNSENT_BYTES = 1 << 22
TOKEN_TTL_S = 30.0
HELLO_TIMEOUT_S = 5.0


class LocalTokens:
    """One-time tokens: each opens one connection for one session. Bounded; the oldest is forgotten."""

    def __init__(self, clock: Callable[[], float], new_token: Callable[[], bytes], max_tokens: int) -> None:
        self._clock = clock
        self._new_token = new_token
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def issue(self, session_id: str) -> bytes:
        """A fresh token for the session."""
        token = self._new_token()
        self._sessions[token] = (session_id, self._clock() + TOKEN_TTL_S)
        while len(self._sessions) > self._max_tokens:
            self._sessions.popitem(last=False)
        return token

    def redeem(self, token: bytes) -> str | None:
        """The token's session, once; None if it is unknown, used or too old."""
        session_id, expires_at_s = self._sessions.pop(token, ("", 0.0))
        return session_id if session_id and self._clock() <= expires_at_s else None


class LocalTransport:
    """Listens and serves. `start` and `close` on the event loop's thread."""

    def __init__(
        self,
        path: Path,
        service: BlockService,
        telemetry: Telemetry,
        tokens: LocalTokens,
        *,
        max_message_bytes: int,
        max_connections: int,
        gid: int | None = None,
    ) -> None:
        self.path = path
        self.tokens = tokens
        self.max_message_bytes = max_message_bytes
        self.methods = _methods(service, telemetry, max_message_bytes)
        self._max_connections = max_connections
        self._gid = gid
        self._connections: set[Connection] = set()
        self._listener: socket.socket | None = None

    async def start(self) -> None:
        """Binds with mode 0660. The daemon's socket lock guards the path: what lies there is a dead daemon's."""
        self.path.unlink(missing_ok=True)
        self._listener = listen(self.path, mode=SOCKET_MODE, group_gid=-1 if self._gid is None else self._gid)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def close(self) -> None:
        """Cuts every connection; clients find the daemon again through gRPC."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.close()

    @property
    def num_connections(self) -> int:
        """Open ones."""
        return len(self._connections)

    def forget(self, connection: "Connection") -> None:
        """It closed."""
        self._connections.discard(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            peer, _ = self._listener.accept()
        except OSError as error:  # gone again, or no descriptor left: both pass by themselves
            if error.errno in (errno.EMFILE, errno.ENFILE):
                logger.warning("local transport: no file descriptor left for a connection")
            return
        if len(self._connections) >= self._max_connections:
            peer.close()
            return
        self._connections.add(Connection(self, peer))


class Connection:
    """One client. Reads what is there and answers it, one request a turn; what was sent ahead waits in `_received`."""

    def __init__(self, transport: LocalTransport, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._transport = transport
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._session_id: str | None = None
        self._received = bytearray()  # frames sent ahead, the beginning of one whose rest is under way
        self._is_behind = False  # a turn for the next frame is on its way: nothing is read until then
        self._unsent = bytearray()
        self._is_reading = True
        self._num_unwanted = 0  # bytes that are still to come of a frame that is too large
        self._unwanted_length = 0
        self._hello_timer = self._loop.call_later(HELLO_TIMEOUT_S, self.close)
        self._loop.add_reader(peer, self._readable)

    def close(self) -> None:
        """Idempotent."""
        if self._peer.fileno() < 0:
            return
        self._hello_timer.cancel()
        self._loop.remove_reader(self._peer)
        self._loop.remove_writer(self._peer)
        self._peer.close()
        self._transport.forget(self)

    # ----------------------------------------------------------------- reading
    def _readable(self) -> None:
        if self._is_behind:
            return
        try:
            data = self._peer.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        if self._num_unwanted:
            data = self._without_unwanted(data)
        if self._received:
            self._received += data
            del self._received[: self._take_frame(self._received)]
        else:  # nearly always: one whole frame, which is not copied into a buffer first
            taken = self._take_frame(data)
            if taken < len(data):
                self._received += data[taken:]

    def _take_frame(self, data: bytes | bytearray) -> int:
        """Answers the first frame in `data` if it is whole, returns the number of bytes used, asks for another turn."""
        size = len(data)
        if size < HEADER.size:
            return 0
        length, kind = HEADER.unpack_from(data)
        end: int = LENGTH_BYTES + length
        if length - 1 > self._transport.max_message_bytes or not length:
            if not self._refuse_frame(length, end - size):
                return size
        elif end > size or not self._frame(kind, bytes(data[HEADER.size : end])):
            return 0
        if end < size and self._peer.fileno() >= 0:
            self._is_behind = True
            self._loop.call_soon(self._go_on)
        return end

    def _refuse_frame(self, length: int, num_missing: int) -> bool:
        """A frame too large to take: it is read to its end, then refused. True: it is all there.

        Nobody waits for the end of one that is more than twice too large, or has no length: the client hears of it, if
        it listens, and is hung up on.
        """
        limit = self._transport.max_message_bytes
        if not length or length - 1 > 2 * limit:
            self._send(refusal(MessageTooLarge(length, limit)))
            self.close()
            return False
        if num_missing > 0:
            self._num_unwanted, self._unwanted_length = num_missing, length
            return False
        self._send(refusal(MessageTooLarge(length, limit)))
        return True

    def _without_unwanted(self, data: bytes) -> bytes:
        num = min(self._num_unwanted, len(data))
        self._num_unwanted -= num
        if not self._num_unwanted:
            self._send(refusal(MessageTooLarge(self._unwanted_length, self._transport.max_message_bytes)))
        return data[num:]

    def _frame(self, kind: int, payload: bytes) -> bool:
        """Answers one frame; False: it has to wait, and everything behind it."""
        if self._session_id is None:
            self._hello(kind, payload)
            return True
        method = self._transport.methods.get(kind)
        if method is None:
            self._send(refusal(MalformedMessage("frame", f"no method {kind}")))
            return True
        try:
            self._send(method.answer(payload, self._session_id))
        except PoolRecovering as error:
            self._pause(error.retry_after_s)
            return False
        return True

    def _pause(self, seconds: float) -> None:
        """After a restart, what allocates waits until all sessions have said what they hold: a pause, no error."""
        self._is_behind = True
        self._loop.remove_reader(self._peer)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._peer.fileno() >= 0:
            if self._is_reading:
                self._loop.add_reader(self._peer, self._readable)
            self._go_on()

    def _go_on(self) -> None:
        """The turn of a frame that had to wait."""
        self._is_behind = False
        if self._peer.fileno() >= 0:
            del self._received[: self._take_frame(self._received)]

    def _hello(self, kind: int, token: bytes) -> None:
        session_id = self._transport.tokens.redeem(token) if kind == HELLO else None
        if session_id is None:
            self.close()
            return
        self._hello_timer.cancel()
        self._session_id = session_id
        self._send(Answer(OK, b""))

    # ----------------------------------------------------------------- writing
    def _send(self, answer: Answer) -> None:
        data = HEADER.pack(len(answer.payload) + 1, answer.code) + answer.payload
        if self._unsent:
            self._unsent += data
        else:
            sent = self._send_now(data)
            if sent == len(data):
                return
            self._unsent += data[sent:]
            self._loop.add_writer(self._peer, self._writable)
        if self._is_reading and len(self._unsent) > MAX_UNSENT_BYTES:
            self._is_reading = False
            self._loop.remove_reader(self._peer)

    def _send_now(self, data: bytes | bytearray) -> int:
        """Bytes taken by the kernel; a broken peer is noticed by the next read."""
        try:
            return self._peer.send(data)
        except OSError as error:
            return 0 if isinstance(error, BlockingIOError) else len(data)

    def _writable(self) -> None:
        del self._unsent[: self._send_now(self._unsent)]
        if self._unsent:
            return
        self._loop.remove_writer(self._peer)
        if not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._peer, self._readable)


def _methods(service: BlockService, telemetry: Telemetry, max_message_bytes: int) -> dict[int, FramedMethod]:
    """By the number on the wire; numbers are never reused."""
    table = (
        (1, "Step", pb.StepRequest, service.answer_step),
        (2, "Lookup", pb.LookupRequest, service.answer_lookup),
        (3, "Allocate", pb.AllocateRequest, service.answer_allocate),
        (4, "Publish", pb.PublishRequest, service.answer_publish),
        (5, "Free", pb.FreeRequest, service.answer_free),
    )
    return {
        number: FramedMethod(name, message, answer, telemetry, max_message_bytes)
        for number, name, message, answer in table
    }
