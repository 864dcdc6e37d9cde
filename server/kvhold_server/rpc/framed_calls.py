"""A call of BlockService in bytes: how the local transport and the step stream answer one of many on a connection.

    request ─▶ bound ─▶ decode ─▶ whose? ─▶ handler ─▶ Answer(0, response)
                 └────────┴─────────┴──────────┴─ error ─▶ Answer(gRPC code, google.rpc.Status)

The error is the one that a unary call would have ended with, and the call is counted like one. Nothing here ends the
connection: a refused call is no reason to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any

from kvhold.v1 import block_pb2 as pb
from kvhold_server.domain.errors import KvholdError, PreconditionFailed
from kvhold_server.logs import CURRENT_TRACE_ID
from kvhold_server.node.recovering import PoolRecovering
from kvhold_server.node.telemetry import Telemetry
from kvhold_server.rpc.interceptors import bounded, typed
from kvhold_server.rpc.status import code_of, to_wire

OK = 0
STEP_TAG = b"\x0a"  # field 1 of StepStreamResponse, length-delimited


@dataclass(eq=False)
class WrongSession(PreconditionFailed):
    """A request names another session than the one its connection was opened for."""

    template = "this connection belongs to session {connection_session}…, not to {request_session}…"
    connection_session: str
    request_session: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back: the response if the code is 0, else a google.rpc.Status, encoded."""

    code: int
    payload: bytes


class FramedMethod:
    """One method of BlockService."""

    def __init__(
        self, name: str, message: Any, answer: Callable[[Any], Any], telemetry: Telemetry, max_message_bytes: int
    ) -> None:
        self._name = f"BlockService/{name}"
        self._decode = bounded(message.FromString, max_message_bytes)
        self._answer = answer
        self._telemetry = telemetry
        self._stats = telemetry.method(self._name)

    def answer(self, payload: bytes, session_id: str = "") -> Answer:
        """Handles one request, which must be of this session if one is given.

        Raises PoolRecovering, and nothing else: whoever owns the connection waits and asks again.
        """
        begun = perf_counter()
        try:
            request = self._decode(payload)
            if session_id and request.session_id != session_id:
                raise WrongSession(session_id[:8], request.session_id[:8])
            response = self._answer(request).SerializeToString()
        except PoolRecovering:
            raise
        except Exception as error:
            return self.refuse(error, begun)
        self._count("OK", perf_counter() - begun)
        return Answer(OK, response)

    def refuse(self, error: Exception, begun_s: float) -> Answer:
        """The answer that says so; the call is counted as failed."""
        known = typed(error, self._name, self._telemetry)
        self._count(code_of(known).name, perf_counter() - begun_s)
        return refusal(known)

    def _count(self, code: str, seconds: float) -> None:
        self._stats.finished(code, seconds)
        trace_id = CURRENT_TRACE_ID.get()
        if trace_id:
            self._stats.exemplify(seconds, trace_id, time())


def refusal(error: KvholdError) -> Answer:
    """The error as an answer."""
    wire = to_wire(error)
    ((_, status),) = wire.trailing_metadata
    assert isinstance(status, bytes)
    return Answer(wire.code.value[0], status)


def step_stream_response(answer: Answer) -> bytes:
    """An encoded StepStreamResponse. The step's response is put in as it is: it may have thousands of block ids."""
    if answer.code == OK:
        return b"".join((STEP_TAG, _varint(len(answer.payload)), answer.payload))
    refusal = pb.StepRefusal(code=answer.code, status_details=answer.payload)
    return pb.StepStreamResponse(refusal=refusal).SerializeToString()


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first, the eighth says that more follow."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
