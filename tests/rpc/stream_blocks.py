"""BlockService's stub whose Step goes over a StepStream, with a unary call's face: the same tests run on all ways."""

from typing import Any

import grpc

from kvhold.v1 import block_pb2 as pb
from tests.rpc.local_blocks import CODES


class StreamBlocks:
    """Calls by name, as the generated stub has them. One stream for all sessions: each request is fenced by itself."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.stream = stub.StepStream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def Step(self, request: pb.StepRequest) -> pb.StepResponse:
        await self.stream.write(request)
        return await self.receive()

    async def receive(self) -> pb.StepResponse:
        """The next answer. Raises AioRpcError for a refusal, which is none of the stream's own."""
        answer = await self.stream.read()
        assert isinstance(answer, pb.StepStreamResponse), "the stream has ended"
        if answer.HasField("step"):
            return answer.step
        trailing = grpc.aio.Metadata(("grpc-status-details-bin", answer.refusal.status_details))
        raise grpc.aio.AioRpcError(CODES[answer.refusal.code], grpc.aio.Metadata(), trailing)
