"""Steps for asyncio: on one stream where the daemon has it, else call by call. The rules are step_senders.py's.

call ─▶ write ─▶ read ─▶ answer
         └────────┴─ the stream ended ─▶ typed error; the next call opens another one
                  └─ the caller was cancelled ─▶ so is the stream: its answer must not be taken for the next one's
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from kvhold.v1 import block_pb2 as pb
from kvhold.v1 import block_pb2_grpc
from kvhold_client.calls import DETAILS_KEY, CallSettings, aio_call
from kvhold_client.errors import Unreachable
from kvhold_client.step_refusal import refusal


class AsyncSteps:
    """One step at a time. Made anew with each set of credentials; whoever replaces it aborts the old one."""

    def __init__(self, channel: grpc.aio.Channel, settings: CallSettings) -> None:
        self._stub = block_pb2_grpc.BlockServiceStub(channel)
        self._settings = settings
        self._stream: Any = None
        self._is_missing = False  # an older daemon
        self._has_answered = False
        self._given_up = ""  # why we cancelled the stream ourselves

    async def call(self, request: pb.StepRequest) -> pb.StepResponse:
        """There and back. Raises KvholdError; Unreachable if there is no answer."""
        if self._is_missing:
            return await self._unary(request)
        if self._stream is None:
            self._stream = self._stub.StepStream()
        stream, self._given_up, cancels = self._stream, "", _num_cancels()
        late = asyncio.get_running_loop().call_later(self._settings.timeout_s, self._give_up, "no answer in time")
        try:
            await stream.write(request)
            answer = await stream.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            answer = grpc.aio.EOF
        except BaseException:
            self.close()
            if not self._given_up or _num_cancels() > cancels:  # who is cancelled ends, whatever else came
                raise
            raise Unreachable(f"the kvhold daemon at {self._settings.target}: {self._given_up}") from None
        finally:
            late.cancel()
        if answer is grpc.aio.EOF:
            self._stream = None
            return await self._after_end(stream, request)
        self._has_answered = True
        if answer.HasField("step"):
            response: pb.StepResponse = answer.step
            return response
        raise refusal(answer.refusal.code, answer.refusal.status_details, self._settings.target)

    def abort(self) -> None:
        """Ends a wait under way with Unreachable."""
        self._give_up("the session goes on elsewhere")

    def close(self) -> None:
        """Idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def _give_up(self, reason: str) -> None:
        self._given_up = reason
        self.close()

    async def _unary(self, request: pb.StepRequest) -> pb.StepResponse:
        answer: pb.StepResponse = await aio_call(self._stub.Step, request, self._settings)
        return answer

    async def _after_end(self, stream: Any, request: pb.StepRequest) -> pb.StepResponse:
        """An older daemon gets a call instead; everything else is the step's error.

        A stream that ends while we write to it has INTERNAL for us, whatever the daemon said: asyncio's gRPC does that.
        """
        code, message = await stream.code(), await stream.details()
        details = next((value for key, value in await stream.trailing_metadata() or () if key == DETAILS_KEY), None)
        if not details and code is grpc.StatusCode.INTERNAL:
            code = grpc.StatusCode.UNAVAILABLE if self._has_answered else grpc.StatusCode.UNIMPLEMENTED
        if not details and code is grpc.StatusCode.UNIMPLEMENTED:
            self._is_missing = True
            return await self._unary(request)
        raise refusal(code.value[0], details, self._settings.target, message or "")


def _num_cancels() -> int:
    """How often the task that runs was asked to end; 0 where asyncio does not count it, before Python 3.11."""
    task = asyncio.current_task()
    count: Callable[[], int] = getattr(task, "cancelling", int)
    return count()
