"""BlockService: the hot path. Each handler is one synchronous turn of the event loop.

The `answer_*` methods need no gRPC at all, so that another transport can serve the same messages.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

import grpc

from kvhold.v1 import block_pb2 as pb
from kvhold.v1 import block_pb2_grpc
from kvhold_server.node.node import Node
from kvhold_server.node.recovering import PoolRecovering
from kvhold_server.node.step_values import StepAnswer, StepCommand
from kvhold_server.pool.values import LookupColumns
from kvhold_server.rpc.framed_calls import FramedMethod, step_stream_response
from kvhold_server.rpc.pool_codec import wire_shape
from kvhold_server.rpc.step_answers import (
    encode_step,
    fill_admit,
    fill_counts,
    fill_duties,
    fill_extend,
    fill_problems,
)
from kvhold_server.rpc.step_codec import decode_lookup, decode_step

Request = TypeVar("Request")
Answer = TypeVar("Answer")

MAX_RECOVERY_POLLS = 1000  # of 20 ms; a caller's own deadline ends the wait earlier
OBSERVER = 0  # sees what every session sees


class BlockService(block_pb2_grpc.BlockServiceServicer):
    """See the proto."""

    def __init__(self, node: Node) -> None:
        self._node = node
        limits = node.limits
        self._framed_step = FramedMethod(
            "Step", pb.StepRequest, self.answer_step, node.telemetry, limits.max_message_bytes
        )

    # ------------------------------------------------------------------ gRPC
    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        return await self._when_recovered(self.answer_step, request)

    async def StepStream(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        """One request after the other, each a call of its own; in bytes on both sides (rpc/interceptors.py)."""
        step = self._framed_step
        while (payload := await context.read()) is not grpc.aio.EOF:
            came_s = perf_counter()
            try:
                answer = await self._when_recovered(step.answer, payload)
            except PoolRecovering as error:
                answer = step.refuse(error, came_s)
            await context.write(step_stream_response(answer))

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return self.answer_lookup(request)

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:
        return await self._when_recovered(self.answer_allocate, request)

    async def Publish(self, request: pb.PublishRequest, context: Any) -> pb.PublishResponse:
        return self.answer_publish(request)

    async def Free(self, request: pb.FreeRequest, context: Any) -> pb.FreeResponse:
        return self.answer_free(request)

    async def _when_recovered(self, answer: Callable[[Request], Answer], request: Request) -> Answer:
        """After a restart, what allocates waits until all sessions have said what they hold: a pause, no error."""
        for _ in range(MAX_RECOVERY_POLLS):
            try:
                return answer(request)
            except PoolRecovering as error:
                await asyncio.sleep(error.retry_after_s)
        return answer(request)

    # --------------------------------------------------------- without gRPC
    def answer_step(self, request: pb.StepRequest) -> pb.StepResponse:
        """Applies a whole step."""
        command, answer = self._apply(request)
        return encode_step(self._node.boot_id, command, answer)

    def answer_allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        """The extend and admit parts alone."""
        step = _step_of(request)
        step.extend.CopyFrom(request.extend)
        step.admit.CopyFrom(request.admit)
        command, answer = self._apply(step)
        response = pb.AllocateResponse(boot_id=self._node.boot_id, replayed=answer.replayed)
        if command.items.extend.sequence_ids:
            fill_extend(response.extend, len(command.items.extend.sequence_ids), answer)
        if command.items.admit.sequence_ids:
            fill_admit(response.admit, len(command.items.admit.sequence_ids), answer)
        fill_duties(response, answer.output)
        fill_counts(response.counts, answer.counts, answer.num_available_blocks)
        fill_problems(response, answer.output)
        return response

    def answer_publish(self, request: pb.PublishRequest) -> pb.PublishResponse:
        """An extend that asks for no slots."""
        step = _step_of(request)
        step.extend.sequence_ids.extend(request.sequence_ids)
        step.extend.slots_needed.extend([0] * len(request.sequence_ids))
        step.extend.publish_tokens.extend(request.publish_tokens)
        step.extend.num_hashes.extend(request.num_hashes)
        step.extend.hashes = request.hashes
        command, answer = self._apply(step)
        results = pb.ExtendResults()
        fill_extend(results, len(command.items.extend.sequence_ids), answer)
        response = pb.PublishResponse(boot_id=self._node.boot_id, replayed=answer.replayed, statuses=results.statuses)
        fill_counts(response.counts, answer.counts, answer.num_available_blocks)
        return response

    def answer_free(self, request: pb.FreeRequest) -> pb.FreeResponse:
        """The free part alone."""
        step = _step_of(request)
        step.free.CopyFrom(request.free)
        _, answer = self._apply(step)
        response = pb.FreeResponse(boot_id=self._node.boot_id, replayed=answer.replayed)
        response.num_freed_blocks.extend(answer.output.free_counts)
        fill_counts(response.counts, answer.counts, answer.num_available_blocks)
        return response

    def answer_lookup(self, request: pb.LookupRequest) -> pb.LookupResponse:
        """Read only, for a session or for an observer."""
        node = self._node
        if request.session_id:
            session = node.fenced(request.session_id, request.epoch)
            live, slot = node.pools[session.pool], session.slot
        else:
            live = node.pool(request.pool)
            slot = OBSERVER
        columns = decode_lookup(request.lookup, wire_shape(live), node.limits)
        response = pb.LookupResponse(boot_id=node.boot_id)
        _look_up(live.pool, slot, columns, response.lookup, request.lookup.include_block_ids)
        return response

    def _apply(self, request: pb.StepRequest) -> tuple[StepCommand, StepAnswer]:
        node = self._node
        session = node.fenced(request.session_id, request.epoch, request.boot_id)
        live = node.pools[session.pool]
        command = decode_step(request, wire_shape(live), node.limits)
        return command, node.step(session, command)


def _step_of(request: Any) -> pb.StepRequest:
    """The head that all mutating requests have."""
    return pb.StepRequest(
        session_id=request.session_id,
        epoch=request.epoch,
        step=request.step,
        part=request.part,
        completed_step=request.completed_step,
    )


def _look_up(pool: Any, slot: int, columns: LookupColumns, results: pb.LookupResults, include_blocks: bool) -> None:
    position = 0
    for i, count in enumerate(columns.hash_counts):
        hit = pool.lookup(
            slot,
            num_tokens=columns.num_tokens[i],
            hashes=columns.hashes[position : position + count],
            max_hit_tokens=columns.max_hit_tokens[i] if columns.max_hit_tokens else -1,
        )
        position += count
        results.hit_tokens.append(hit.hit_tokens)
        results.shared_prefix_boundary_tokens.append(hit.boundary_tokens)
        if include_blocks:
            results.num_blocks.extend(map(len, hit.blocks))
            for table in hit.blocks:
                results.block_ids.extend(table)
