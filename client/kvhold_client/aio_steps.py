"""Steps for asyncio: on one stream where the daemon has it, else call by call. The rules are step_senders.py's.

call ─▶ write ─▶ read ─▶ answer
         └────────┴─ the stream ended ─▶ typed error; the next call opens another one
                  └─ the caller was cancelled ─▶ so is the stream: its answer must not be taken for the next one's
"""

import asyncio
from typing import Any, NoReturn

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
        self._given_up = ""  # why we cancelled the stream ourselves

    async def call(self, request: pb.StepRequest) -> pb.StepResponse:
        """There and back. Raises KvholdError; Unreachable if there is no answer."""
        if self._is_missing:
            return await self._unary(request)
        if self._stream is None:
            self._stream = self._stub.StepStream()
        stream, self._given_up = self._stream, ""
        late = asyncio.get_running_loop().call_later(self._settings.timeout_s, self._give_up, "no answer in time")
        try:
            await stream.write(request)
            answer = await stream.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            answer = grpc.aio.EOF
        except BaseException:
            self.close()
            if not self._given_up:
                raise
            raise Unreachable(f"the kvhold daemon at {self._settings.target}: {self._given_up}") from None
        finally:
            late.cancel()
        if answer is not grpc.aio.EOF:
            return self._content(answer)
        self._stream = None
        if await stream.code() is grpc.StatusCode.UNIMPLEMENTED:
            self._is_missing = True
            return await self._unary(request)
        await self._ended(stream)

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

    def _content(self, answer: pb.StepStreamResponse) -> pb.StepResponse:
        if answer.HasField("step"):
            return answer.step
        raise refusal(answer.refusal.code, answer.refusal.status_details, self._settings.target)

    async def _ended(self, stream: Any) -> NoReturn:
        code, message = await stream.code(), await stream.details()
        details = next((value for key, value in await stream.trailing_metadata() or () if key == DETAILS_KEY), None)
        raise refusal(code.value[0], details, self._settings.target, message or "")
