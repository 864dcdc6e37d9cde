"""AdminService: changes what others rely on. Every call that does leaves one line in the audit log with its caller."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvhold.v1 import admin_pb2 as pb
from kvhold.v1 import admin_pb2_grpc
from kvhold_server.domain.errors import InvalidField
from kvhold_server.node.errors import AlreadyDraining
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.node import Node
from kvhold_server.pool.diagnosis import (
    BlockKeys,
    BlockState,
    Explanation,
    GroupMiss,
    describe_block,
    describe_blocks,
    explain_lookup,
)
from kvhold_server.rpc.pool_codec import duration, wire_shape
from kvhold_server.rpc.step_answers import fill_counts
from kvhold_server.rpc.step_codec import MAX_INT32, TooManyItems, block_ids, cut_hashes
from kvhold_server.sessions.session import Session

audit = logging.getLogger("kvhold.audit")

STATES = {
    BlockState.NULL: pb.BLOCK_STATE_NULL,
    BlockState.FREE: pb.BLOCK_STATE_FREE,
    BlockState.CACHED: pb.BLOCK_STATE_CACHED,
    BlockState.HELD: pb.BLOCK_STATE_HELD,
    BlockState.QUARANTINED: pb.BLOCK_STATE_QUARANTINED,
    BlockState.RESERVED: pb.BLOCK_STATE_RESERVED,
}
DEFAULT_BLOCKS_IN_PAGE = 1000
DRAIN_PROGRESS_S = 0.2


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """See the proto. `request_stop(deadline_s)` begins the daemon's own drain; None: its configured deadline.

    `caller_of` tells from gRPC's name of a peer who it is, for the audit log.
    """

    def __init__(
        self,
        node: Node,
        request_stop: Callable[[float | None], None],
        caller_of: Callable[[str], str] | None = None,
    ) -> None:
        self._node = node
        self._request_stop = request_stop
        self._caller_of = caller_of or caller_without_door

    async def Drain(self, request: pb.DrainRequest, context: Any) -> AsyncIterator[pb.DrainResponse]:
        node = self._node
        if node.drain.is_draining:
            raise AlreadyDraining(round(node.drain_left_s, 3))
        deadline_s = request.deadline.seconds + request.deadline.nanos / 1e9
        if deadline_s < 0:
            raise InvalidField("deadline", deadline_s, "must not be negative")
        self._audit(context, "drain", deadline_s=deadline_s)
        self._request_stop(deadline_s or None)
        while not node.drain.is_draining:
            await asyncio.sleep(0)
        while node.sessions.num_open() and node.drain_left_s:
            yield self._progress(done=False)
            await asyncio.sleep(min(DRAIN_PROGRESS_S, node.drain_left_s))
        yield self._progress(done=True)

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, context: Any) -> pb.ResetPrefixCacheResponse:
        report = self._node.reset_cache(request.pool, force=request.force)
        self._audit(
            context, "reset_prefix_cache", pool=request.pool, force=request.force, blocks=report.num_reset_blocks
        )
        holders = [self._holder(session) for session in report.holders]
        return pb.ResetPrefixCacheResponse(
            boot_id=self._node.boot_id, num_reset_blocks=report.num_reset_blocks, holders=holders
        )

    async def EvictBlocks(self, request: pb.EvictBlocksRequest, context: Any) -> pb.EvictBlocksResponse:
        node = self._node
        if len(request.block_ids) > node.limits.max_evict_blocks:
            raise TooManyItems("block_ids", len(request.block_ids), node.limits.max_evict_blocks)
        wanted = block_ids("block_ids", request.block_ids, node.pool(request.pool).config.num_blocks)
        num_evicted = node.evict_blocks(request.pool, wanted)
        self._audit(context, "evict_blocks", pool=request.pool, asked=len(wanted), evicted=num_evicted)
        return pb.EvictBlocksResponse(boot_id=node.boot_id, num_evicted_blocks=num_evicted)

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Any) -> pb.SetQuotaResponse:
        node = self._node
        if not 1 <= len(request.tenant) <= node.limits.max_tenant_length:
            rule = f"must have 1..{node.limits.max_tenant_length} characters"
            raise InvalidField("tenant", request.tenant[:80], rule)
        if not 0 <= request.max_held_blocks <= MAX_INT32:
            raise InvalidField("max_held_blocks", request.max_held_blocks, f"must be 0..{MAX_INT32}")
        num_held = node.set_quota(request.pool, request.tenant, request.max_held_blocks)
        self._audit(
            context, "set_quota", pool=request.pool, tenant=request.tenant, max_held_blocks=request.max_held_blocks
        )
        return pb.SetQuotaResponse(boot_id=node.boot_id, num_held_blocks=num_held)

    async def DescribeBlocks(self, request: pb.DescribeBlocksRequest, context: Any) -> pb.DescribeBlocksResponse:
        node = self._node
        live = node.pool(request.pool)
        _check_page(request, live, node.limits.max_described_blocks)
        response = pb.DescribeBlocksResponse(boot_id=node.boot_id)
        if not request.omit_blocks:
            _fill_blocks(request, live, response)
        if request.include_free_order or request.include_tables or request.include_index:
            _fill_dump(request, live, response, node)
        counts = live.pool.counts()
        fill_counts(response.counts, counts, counts.available)
        return response

    async def ExplainLookup(self, request: pb.ExplainLookupRequest, context: Any) -> pb.ExplainLookupResponse:
        live = self._node.pool(request.pool)
        if request.num_tokens < 1:
            raise InvalidField("num_tokens", request.num_tokens, f"must be 1..{MAX_INT32}")
        shape = wire_shape(live)
        hashes = cut_hashes("explain", [len(request.hashes) // shape.hash_size_bytes], request.hashes, shape)
        return _encode_explanation(self._node.boot_id, live, explain_lookup(live.pool, request.num_tokens, hashes))

    def _audit(self, context: Any, action: str, **fields: object) -> None:
        shown = " ".join(f"{name}={value!r}" for name, value in fields.items())
        audit.info("action=%s caller=%s %s", action, self._caller_of(context.peer()), shown)

    def _progress(self, *, done: bool) -> pb.DrainResponse:
        node = self._node
        return pb.DrainResponse(
            boot_id=node.boot_id,
            num_sessions=node.sessions.num_open(),
            num_held_blocks=sum(live.pool.counts().held for live in node.pools.values()),
            time_left=duration(node.drain_left_s),
            done=done,
        )

    def _holder(self, session: Session) -> pb.Holder:
        return pb.Holder(
            short_session_id=session.short_id,
            client_name=session.request.client_name,
            num_held_blocks=self._node.session_use(session).num_held_blocks,
        )


def caller_without_door(peer: str) -> str:
    """An address over TCP; of a unix socket gRPC knows nothing."""
    return "unknown (on the engines' socket)" if peer.startswith("unix") else peer


def _check_page(request: pb.DescribeBlocksRequest, live: LivePool, max_blocks: int) -> None:
    if not 0 <= request.start_block_id < live.config.num_blocks:
        rule = f"must be 0..{live.config.num_blocks - 1}"
        raise InvalidField("start_block_id", request.start_block_id, rule)
    if not 0 <= request.max_blocks <= max_blocks:
        raise InvalidField("max_blocks", request.max_blocks, f"must be 0..{max_blocks}")


def _fill_blocks(request: pb.DescribeBlocksRequest, live: LivePool, response: pb.DescribeBlocksResponse) -> None:
    if request.block_hash:
        indexes = live.pool.store.index
        found = [index[request.block_hash] for index in indexes if request.block_hash in index]
        copies = [live.pool.store.copies[gid].get(request.block_hash, []) for gid in range(len(indexes))]
        blocks = sorted({*found, *(block for group in copies for block in group)})
        rows = [describe_block(live.pool, block) for block in blocks]
    else:
        count = request.max_blocks or DEFAULT_BLOCKS_IN_PAGE
        rows = describe_blocks(live.pool, request.start_block_id, count)
        end = request.start_block_id + count
        response.next_start_block_id = end if end < live.config.num_blocks else 0
    response.blocks.extend(_encode_block(row) for row in rows)


def _encode_block(row: BlockKeys) -> pb.BlockInfo:
    message = pb.BlockInfo(
        block_id=row.block, state=STATES[row.state], num_holders=row.num_holders, provisional=row.is_provisional
    )
    for i, key in enumerate(row.keys):
        tokens = row.key_tokens if i == 0 else 0
        message.keys.add(block_hash=key, group_id=row.group, num_tokens=tokens, primary=i == 0)
    return message


def _fill_dump(
    request: pb.DescribeBlocksRequest, live: LivePool, response: pb.DescribeBlocksResponse, node: Node
) -> None:
    """Whole structures, O(blocks): for conformance and post-mortems."""
    state = live.pool.describe()
    if request.include_free_order:
        response.free_order.extend(state.free_order[: node.limits.max_free_order])
    if request.include_index:
        for key, group, blocks in state.cache:
            response.index.add(block_hash=key, group_id=group, block_ids=blocks)
    if request.include_tables:
        names = {session.slot: session.short_id for session in node.sessions.sessions(live.name)}
        for (slot, sequence_id), tables in state.tables.items():
            response.tables.add(
                short_session_id=names.get(slot, ""),
                sequence_id=sequence_id,
                num_blocks=list(map(len, tables)),
                block_ids=[block for table in tables for block in table],
            )


def _encode_explanation(boot_id: str, live: LivePool, found: Explanation) -> pb.ExplainLookupResponse:
    response = pb.ExplainLookupResponse(
        boot_id=boot_id, hit_tokens=found.hit_tokens, num_additional_blocks=found.num_additional_blocks
    )
    for miss in found.groups:
        kind = live.config.groups[miss.group].kind.value
        response.groups.add(
            group_id=miss.group,
            kind=kind,
            hit_tokens=miss.hit_tokens,
            first_missing_block=miss.first_missing_block,
            reason=miss.reason.value,
            evictions_ago=miss.evictions_ago,
        )
        if miss.first_missing_block >= 0:
            response.notes.append(_note(miss, kind))
    shortest = min((miss.hit_tokens for miss in found.groups), default=0)
    if found.hit_tokens < shortest:
        cut = f"all groups have {shortest} tokens, cut to {found.hit_tokens} where their blocks end together"
        response.notes.append(cut)
    return response


def _note(miss: GroupMiss, kind: str) -> str:
    """One group's lack, for people."""
    why = miss.reason.value.lower().replace("_", " ")
    ago = f", {miss.evictions_ago} evictions ago" if miss.evictions_ago else ""
    block = miss.first_missing_block
    return f"group {miss.group} ({kind}) has {miss.hit_tokens} tokens; block {block}: {why}{ago}"
