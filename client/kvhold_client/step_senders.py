"""The ways a step can go: a protocol, and the two over gRPC. The third is local_channel.py.

    StreamSteps    a message on a stream that stays open                 the usual way
      └ UnarySteps a call for each step                                  daemons without StepStream, and on demand

`call` is one round trip. `send` and `receive` are its halves, for callers that have something to do in between: one
step is under way at a time, and its request must not change until its answer is there. A sender is made anew with each
set of credentials; whoever replaces it aborts the old one: a thread waiting in it gets Unreachable and looks again.
"""

import time
from typing import Any, NoReturn, Protocol

import grpc

from kvhold.v1 import block_pb2 as pb
from kvhold.v1 import block_pb2_grpc
from kvhold_client.calls import CallSettings, call
from kvhold_client.errors import KvholdError, Unreachable
from kvhold_client.step_refusal import refusal
from kvhold_client.step_stream import StepStream, StreamEnded, StreamUnavailable, open_stream

_CANCELLED, _DEADLINE_EXCEEDED, _UNIMPLEMENTED = 1, 4, 12


class StepSender(Protocol):
    """Sends steps and returns their answers. Raises KvholdError; Unreachable if there is no answer."""

    @property
    def transport(self) -> str:
        """What the steps travel over."""

    def call(self, request: pb.StepRequest) -> pb.StepResponse:
        """There and back."""

    def send(self, request: pb.StepRequest) -> None:
        """Half a call: `receive` must follow."""

    def receive(self) -> pb.StepResponse:
        """The other half."""

    def give_up_late(self) -> None:
        """Ends a wait that takes longer than the client's timeout. From any thread, now and then."""

    def abort(self) -> None:
        """Ends a wait under way with Unreachable; nothing is sent any more. From any thread."""

    def close(self) -> None:
        """Idempotent."""


class UnarySteps:
    """Each step is a call of its own, with a deadline of its own."""

    transport = "grpc-unary"

    def __init__(self, channel: grpc.Channel, settings: CallSettings) -> None:
        self._step = block_pb2_grpc.BlockServiceStub(channel).Step
        self._settings = settings
        self._future: Any = None

    def call(self, request: pb.StepRequest) -> pb.StepResponse:
        return call(self._step, request, self._settings)

    def send(self, request: pb.StepRequest) -> None:
        self._future = self._step.future(request, timeout=self._settings.timeout_s)

    def receive(self) -> pb.StepResponse:
        answer: pb.StepResponse = call(lambda _, timeout: self._future.result(), None, self._settings)
        return answer

    def give_up_late(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class StreamSteps:
    """All steps on one stream, which is opened with the first of them, and again after it broke without a resume."""

    def __init__(self, channel: grpc.Channel, settings: CallSettings) -> None:
        self._channel = channel
        self._settings = settings
        self._calls = UnarySteps(channel, settings)
        self._stream: StepStream | None = None
        self._is_missing = False  # the daemon, or this grpcio, has no stream
        self._is_closed = False
        self._request: pb.StepRequest | None = None  # under way
        self._sent_s: float | None = None  # when it was sent; None: its answer is there

    @property
    def transport(self) -> str:
        """As it turned out."""
        return self._calls.transport if self._is_missing else "grpc"

    def call(self, request: pb.StepRequest) -> pb.StepResponse:
        if self._is_missing:
            return self._calls.call(request)
        self.send(request)
        return self.receive()

    def send(self, request: pb.StepRequest) -> None:
        if self._sent_s is not None:  # a signal's exception: the last answer is still to come, and is not this one's
            self._drop()
        self._request, self._sent_s = request, time.monotonic()
        try:
            self._open().send(request.SerializeToString())
        except StreamUnavailable:
            self._is_missing = True
        except StreamEnded as end:
            self._broken(end)
        except ValueError as error:  # what gRPC raises for a closed channel
            raise Unreachable(f"the client of {self._settings.target} is closed: {error}") from None
        if self._is_missing:
            self._calls.send(request)

    def receive(self) -> pb.StepResponse:
        if self._is_missing:
            return self._calls.receive()
        try:
            answer = pb.StepStreamResponse.FromString(self._opened().receive())
        except StreamEnded as end:
            if end.code == _UNIMPLEMENTED and not end.details:  # an older daemon
                return self._without_stream()
            self._broken(end)
        self._sent_s = None
        if answer.HasField("step"):
            return answer.step
        raise self._error(answer.refusal.code, answer.refusal.status_details)

    def give_up_late(self) -> None:
        sent_s, stream = self._sent_s, self._stream
        if stream is not None and sent_s is not None and time.monotonic() - sent_s > self._settings.timeout_s:
            stream.cancel(code=_DEADLINE_EXCEEDED, reason=f"no answer in {self._settings.timeout_s:g} s")

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        self._drop()

    def _open(self) -> StepStream:
        """Raises StreamUnavailable, StreamEnded if this is closed, ValueError if the channel is."""
        if self._is_missing:
            raise StreamUnavailable
        if self._stream is None and not self._is_closed:
            self._stream = open_stream(self._channel)
        return self._opened()

    def _opened(self) -> StepStream:
        stream = self._stream
        if stream is None:
            raise StreamEnded(_CANCELLED, "the stream is closed", None)
        return stream

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _broken(self, end: StreamEnded) -> NoReturn:
        self._stream = self._sent_s = None
        raise self._error(end.code, end.details, end.message) from None

    def _without_stream(self) -> pb.StepResponse:
        self._stream, self._is_missing = None, True
        assert self._request is not None
        return self._calls.call(self._request)

    def _error(self, code: int, details: bytes | None, message: str = "") -> KvholdError:
        return refusal(code, details, self._settings.target, message)
