"""One open StepStream, driven by the calling thread alone.

gRPC's public stream for blocking callers hands every message to a thread that sends, and every answer comes from a
thread that receives: two changes of thread for a step. Its blocking unary calls do without, on a completion queue of
the call's own that the caller waits on. This does the same for a stream: send and receive are one batch of that queue.

    send     ─▶ batch [send message, receive message]         returns at once
    receive  ─▶ waits for the batch, in C and without the GIL ─▶ the answer's bytes, or how the stream ended

                                 status, initial metadata: batches that were there from the start
    The queue goes away with its last event, so everything that is due is taken from it when the stream ends.

These parts of grpcio are not its public interface. `open_stream` says so where another grpcio lacks them.
"""

import threading
from dataclasses import dataclass
from typing import Any

import grpc

try:
    from grpc._cython import cygrpc  # type: ignore[attr-defined]
except ImportError:  # another grpcio
    cygrpc = None

PATH = b"/kvhold.v1.BlockService/StepStream"
DETAILS_KEY = "grpc-status-details-bin"
_STATUS, _REPLY, _OTHER = "status", "reply", "other"


class StreamUnavailable(Exception):
    """This grpcio has no such parts."""


@dataclass(eq=False)
class StreamEnded(Exception):
    """The stream has ended and no answer will come: with which status."""

    code: int
    message: str
    details: bytes | None


def open_stream(channel: grpc.Channel, path: bytes = PATH) -> "StepStream":
    """Opens a stream; nothing is waited for. Raises StreamUnavailable, ValueError if the channel is closed."""
    try:
        batches = (
            ((cygrpc.SendInitialMetadataOperation((), 0),), _OTHER),
            ((cygrpc.ReceiveStatusOnClientOperation(0),), _STATUS),
            ((cygrpc.ReceiveInitialMetadataOperation(0),), _OTHER),
        )
        call = channel._channel.segregated_call(  # type: ignore[attr-defined]
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            path,
            None,  # host
            None,  # deadline
            (),  # metadata
            None,  # credentials
            batches,
            cygrpc.build_census_context(),
            None,  # registered call
        )
    except (AttributeError, TypeError) as error:
        raise StreamUnavailable(str(error)) from None
    return StepStream(call, num_due=len(batches))


class StepStream:
    """One thread sends and receives; any may cancel."""

    def __init__(self, call: Any, num_due: int) -> None:
        self._call = call
        self._num_due = num_due  # events to come
        self._status: Any = None  # the operation that has it, once it came
        self._in_use = threading.Lock()

    def send(self, payload: bytes) -> None:
        """Raises StreamEnded if it is known to have ended; usually `receive` finds out."""
        batch = (cygrpc.SendMessageOperation(payload, 0), cygrpc.ReceiveMessageOperation(0))
        with self._in_use:
            if not self._call.operate(batch, _REPLY):
                raise self._end()
            self._num_due += 1

    def receive(self) -> bytes:
        """The answer to what was sent. Raises StreamEnded."""
        with self._in_use:
            while self._num_due:
                event = self._next()
                if event.tag is _REPLY:
                    answer: bytes | None = event.batch_operations[1].message()
                    if answer is not None:
                        return answer
                    self._drain()
            raise self._end()

    def cancel(self, *, code: int, reason: str) -> None:
        """Ends the stream: what waits in `receive` gets this code and reason. Idempotent."""
        self._call.cancel(code, reason)

    def close(self) -> None:
        """Ends the stream and frees what belongs to it, unless another thread is in it: that one does. Idempotent."""
        self.cancel(code=grpc.StatusCode.CANCELLED.value[0], reason="closed")
        if self._in_use.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._in_use.release()

    def _next(self) -> Any:
        try:
            event = self._call.next_event()
        except BaseException:  # a signal's handler raised: gRPC has given the call up
            self._num_due = 0
            raise
        self._num_due -= 1
        if event.tag is _STATUS:
            self._status = event.batch_operations[0]
        return event

    def _drain(self) -> None:
        while self._num_due:
            self._next()

    def _end(self) -> StreamEnded:
        status = self._status
        if status is None:
            return StreamEnded(grpc.StatusCode.UNKNOWN.value[0], "the stream has ended", None)
        trailing = status.trailing_metadata() or ()
        details = next((value for key, value in trailing if key == DETAILS_KEY), None)
        return StreamEnded(status.code(), str(status.details()), details)
