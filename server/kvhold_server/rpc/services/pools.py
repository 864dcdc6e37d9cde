"""PoolService. Slow work (planning, memory) runs in threads between the node's two phases; see node/opening.py."""

import asyncio
import gc
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvhold.v1 import plan_pb2, pool_pb2_grpc
from kvhold.v1 import pool_pb2 as pb
from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.ids import PoolName
from kvhold_server.domain.plan import Plan
from kvhold_server.memory.backend import Region
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.node import Node
from kvhold_server.node.opening import OpenedPool, Opening
from kvhold_server.rpc.fd_channel import FdChannel
from kvhold_server.rpc.fd_tokens import FdGrant
from kvhold_server.rpc.plan_codec import encode_plan
from kvhold_server.rpc.planning import in_thread, make_plan
from kvhold_server.rpc.pool_codec import (
    BACKEND_NUMBERS,
    OUTCOMES,
    decode_content,
    decode_open_pool,
    duration,
    encode_pool,
    encode_recovery,
    encode_region,
)
from kvhold_server.rpc.regions import RegionKeeper

Result = TypeVar("Result")


class PoolService(pool_pb2_grpc.PoolServiceServicer):
    """See the proto."""

    def __init__(self, node: Node, keeper: RegionKeeper, fd_channel: FdChannel | None) -> None:
        self._node = node
        self._keeper = keeper
        self._fd_channel = fd_channel
        self._going_on: set[asyncio.Task[Any]] = set()

    async def OpenPool(self, request: pb.OpenPoolRequest, context: Any) -> pb.OpenPoolResponse:
        node = self._node
        plan = await in_thread(lambda: make_plan(request.plan, node.limits)) if request.HasField("plan") else None
        command = decode_open_pool(request, plan, node.default_backend, node.limits)
        command = replace(command, message=request.SerializeToString())
        begun = node.begin_open_pool(command)
        opened = await self._to_its_end(self._make(begun)) if isinstance(begun, Opening) else begun
        return self._opened(opened)

    async def GetPool(self, request: pb.GetPoolRequest, context: Any) -> pb.GetPoolResponse:
        live = self._node.pool(request.name)
        return pb.GetPoolResponse(boot_id=self._node.boot_id, pool=self._pool(live, with_plan=True))

    async def ListPools(self, request: pb.ListPoolsRequest, context: Any) -> pb.ListPoolsResponse:
        pools = [self._pool(live, with_plan=False) for _, live in sorted(self._node.pools.items())]
        return pb.ListPoolsResponse(boot_id=self._node.boot_id, pools=pools)

    async def DeletePool(self, request: pb.DeletePoolRequest, context: Any) -> pb.DeletePoolResponse:
        live = self._node.begin_delete_pool(request.name, force=request.force)
        if live is None:
            return pb.DeletePoolResponse(boot_id=self._node.boot_id)
        if self._fd_channel is not None:
            self._fd_channel.tokens.drop_pool(live.name)
        await self._to_its_end(self._release_deleted(live))
        return pb.DeletePoolResponse(boot_id=self._node.boot_id, freed_bytes=live.size_bytes)

    async def ExportMemory(self, request: pb.ExportMemoryRequest, context: Any) -> pb.ExportMemoryResponse:
        node = self._node
        export = node.export(
            request.pool,
            request.rank,
            expected_size_bytes=request.expected_size_bytes,
            num_warmup_blocks=request.num_warmup_blocks,
        )
        regions = []
        by_name = False
        for region, exported in export.regions:
            path, token = "", b""
            if self._fd_channel is not None and exported.has_fds:
                grant = FdGrant(
                    owner=request.session_id,
                    pool=PoolName(request.pool),
                    rank=request.rank,
                    host=region.host,
                    read_only=request.read_only,
                )
                path, token = str(self._fd_channel.path), self._fd_channel.issue(grant)
            by_name = by_name or bool(exported.shm_name)
            regions.append(encode_region(region, exported, path, token))
        if by_name and not request.read_only:
            node.worker_mapped(PoolName(request.pool), request.rank, request.session_id, 0, is_watched=False)
        ttl_s = self._fd_channel.options.token_ttl_s if self._fd_channel is not None else 0.0
        return pb.ExportMemoryResponse(
            boot_id=node.boot_id,
            backend=BACKEND_NUMBERS[export.backend],
            regions=regions,
            token_ttl=duration(ttl_s),
        )

    async def UpdateContent(self, request: pb.UpdateContentRequest, context: Any) -> pb.UpdateContentResponse:
        if not request.HasField("content"):
            raise InvalidField("content", "", "is required: the new identity")
        generation, num_fenced = self._node.update_content(
            request.pool,
            request.expected_generation,
            decode_content(request.content),
            even_if_shared=request.even_if_shared,
            message=request.content.SerializeToString(),
        )
        return pb.UpdateContentResponse(
            boot_id=self._node.boot_id, content_generation=generation, num_fenced_blocks=num_fenced
        )

    # --------------------------------------------------------------- private
    async def _make(self, opening: Opening) -> OpenedPool:
        """The slow middle of opening. Any failure gives back what was had, then the name."""
        command = opening.command
        regions: tuple[Region, ...] = ()
        try:
            if opening.replaces is not None:
                await self._keeper.release(opening.replaces.identity.options.backend, opening.replaces.regions)
            regions = await self._keeper.reserve(command.options.backend, opening.requests, command.memory_wait_s)
            made = await in_thread(partial(self._node.make_pool, opening, regions))
        except BaseException:
            await self._keeper.release(command.options.backend, regions)
            self._node.abort_open_pool(opening)
            raise
        opened = self._node.finish_open_pool(opening, regions, made)
        gc.freeze()  # a pool's arrays are long and live long: full collections would stall steps to walk over them
        return opened

    async def _release_deleted(self, live: LivePool) -> None:
        """The name is free again when the memory is."""
        try:
            await self._keeper.release(live.identity.options.backend, live.regions)
        finally:
            self._node.finish_delete_pool(live)

    async def _to_its_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Awaits work that goes on even if the caller hangs up: it is idempotent, half of it would not be."""
        task = asyncio.ensure_future(work)
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)
        return await asyncio.shield(task)

    def _opened(self, opened: OpenedPool) -> pb.OpenPoolResponse:
        recovery = opened.recovery
        response = pb.OpenPoolResponse(
            boot_id=self._node.boot_id,
            outcome=OUTCOMES[recovery.outcome] if recovery else pb.OPEN_POOL_OUTCOME_ATTACHED,
            pool=self._pool(opened.live, with_plan=True),
        )
        if recovery:
            response.recovery.CopyFrom(encode_recovery(recovery))
        return response

    def _pool(self, live: LivePool, *, with_plan: bool) -> pb.Pool:
        plan = _encoded(live.plan) if with_plan else None
        return encode_pool(live, self._node.sessions.num_open(live.name), plan)


def _encoded(plan: Plan | None) -> plan_pb2.Plan | None:
    return encode_plan(plan) if plan is not None else None
