"""AdminService: what changes things for others, and what explains them."""

import logging
from typing import Any

import grpc
import pytest

from kvhold.v1 import admin_pb2 as pb
from kvhold.v1 import block_pb2
from tests.rpc.harness import ClientSession, RunningDaemon, digest, refused


@pytest.fixture
async def session(daemon: RunningDaemon) -> ClientSession:
    await daemon.open_pool(num_blocks=21)
    return await daemon.open_session(client_name="engine", tenant="red")


async def test_reset_is_refused_while_blocks_are_held_unless_forced(
    daemon: RunningDaemon, session: ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    await session.admit(1, 40, 1, 2)
    refusal = await refused(daemon.admin.ResetPrefixCache(pb.ResetPrefixCacheRequest(pool="p")))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BLOCKS_IN_USE")
    assert refusal.metadata["holders"] == f"{session.head['session_id'][:8]} (engine)"
    with caplog.at_level(logging.INFO, "kvhold.audit"):
        answer = await daemon.admin.ResetPrefixCache(pb.ResetPrefixCacheRequest(pool="p", force=True))
    assert answer.num_reset_blocks == 2
    assert [(h.client_name, h.num_held_blocks) for h in answer.holders] == [("engine", 3)]
    assert "reset_prefix_cache" in caplog.text and "caller=unknown (on the engines' socket)" in caplog.text
    assert list((await session.admit(2, 40, 1, 2)).admit.hit_tokens) == [0]


async def test_evict_drops_hashes_only(daemon: RunningDaemon, session: ClientSession) -> None:
    await session.admit(1, 40, 1, 2)
    answer = await daemon.admin.EvictBlocks(pb.EvictBlocksRequest(pool="p", block_ids=[2, 3]))
    assert answer.num_evicted_blocks == 1
    lookup = block_pb2.LookupItems(num_tokens=[40], num_hashes=[2], hashes=digest(1, 2))
    assert list((await session.step(lookup=lookup)).lookup.hit_tokens) == [16]
    for wrong in (0, 21, -1):
        refusal = await refused(daemon.admin.EvictBlocks(pb.EvictBlocksRequest(pool="p", block_ids=[wrong])))
        assert refusal.metadata["field"] == "block_ids" and "1..20" in refusal.message


async def test_quota_bounds_a_tenant_and_leaves_the_others_alone(daemon: RunningDaemon, session: ClientSession) -> None:
    def request(blocks: int) -> pb.SetQuotaRequest:
        return pb.SetQuotaRequest(pool="p", tenant="red", max_held_blocks=blocks)

    other = await daemon.open_session(tenant="blue")
    await session.admit(1, 40, 1, 2)
    assert (await daemon.admin.SetQuota(request(5))).num_held_blocks == 3
    refused_item = await session.admit(2, 48, 3, 4, 5)
    assert list(refused_item.admit.statuses) == [block_pb2.ITEM_STATUS_QUOTA_EXCEEDED]
    assert list((await session.admit(3, 32, 3, 4)).admit.statuses) == [block_pb2.ITEM_STATUS_OK]
    extend = block_pb2.ExtendItems(sequence_ids=[1], slots_needed=[49])
    assert list((await session.step(extend=extend)).extend.statuses) == [block_pb2.ITEM_STATUS_QUOTA_EXCEEDED]
    both = await session.step(free=block_pb2.FreeItems(sequence_ids=[3]), extend=extend)
    assert list(both.extend.statuses) == [block_pb2.ITEM_STATUS_OK], "what a step frees counts"
    assert list((await other.admit(1, 16 * 10, skip_lookup=[True])).admit.statuses) == [block_pb2.ITEM_STATUS_OK]
    await daemon.admin.SetQuota(request(0))
    assert list((await session.admit(9, 48, 7, 8, 9)).admit.statuses) == [block_pb2.ITEM_STATUS_OK]


async def test_blocks_are_described(daemon: RunningDaemon, session: ClientSession) -> None:
    await session.admit(1, 40, 1, 2)
    await session.admit(2, 16, 9)
    await session.step(completed_step=2, free=block_pb2.FreeItems(sequence_ids=[2]))
    page = await daemon.admin.DescribeBlocks(pb.DescribeBlocksRequest(pool="p", max_blocks=6))
    states = [block.state for block in page.blocks]
    held, cached, free = pb.BLOCK_STATE_HELD, pb.BLOCK_STATE_CACHED, pb.BLOCK_STATE_FREE
    assert states == [pb.BLOCK_STATE_NULL, held, held, held, cached, free] and page.next_start_block_id == 6
    assert (page.blocks[1].keys[0].block_hash, page.blocks[1].keys[0].num_tokens) == (digest(1), 16)
    rest = await daemon.admin.DescribeBlocks(pb.DescribeBlocksRequest(pool="p", start_block_id=6))
    assert [block.block_id for block in rest.blocks] == list(range(6, 21)) and rest.next_start_block_id == 0
    found = await daemon.admin.DescribeBlocks(pb.DescribeBlocksRequest(pool="p", block_hash=digest(9)))
    assert [block.block_id for block in found.blocks] == [4]
    dump = await daemon.admin.DescribeBlocks(
        pb.DescribeBlocksRequest(
            pool="p", omit_blocks=True, include_free_order=True, include_tables=True, include_index=True
        )
    )
    assert not dump.blocks and len(dump.free_order) == 17 and dump.free_order[-1] == 4
    assert [list(table.block_ids) for table in dump.tables] == [[1, 2, 3]]
    assert {entry.block_hash for entry in dump.index} == {digest(1), digest(2), digest(9)}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("start_block_id", {"start_block_id": 21}),
        ("max_blocks", {"max_blocks": 10_001}),
        ("start_block_id", {"start_block_id": -1}),
    ],
)
async def test_pages_are_bounded(
    daemon: RunningDaemon, session: ClientSession, field: str, fields: dict[str, Any]
) -> None:
    refusal = await refused(daemon.admin.DescribeBlocks(pb.DescribeBlocksRequest(pool="p", **fields)))
    assert (refusal.code, refusal.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_a_miss_is_explained(daemon: RunningDaemon, session: ClientSession) -> None:
    def explain(*hashes: int) -> Any:
        return daemon.admin.ExplainLookup(pb.ExplainLookupRequest(pool="p", num_tokens=100, hashes=digest(*hashes)))

    await session.admit(1, 33, 1, 2)
    provisional = (await explain(1, 2)).groups[0]
    assert (provisional.hit_tokens, provisional.first_missing_block, provisional.reason) == (0, 0, "PROVISIONAL")
    await session.step()
    unseen = await explain(1, 2, 3)
    assert (unseen.hit_tokens, unseen.groups[0].reason, unseen.groups[0].first_missing_block) == (32, "NEVER_SEEN", 2)
    assert "never seen" in unseen.notes[0]
    await session.free(1)
    await session.admit(2, 16 * 20, skip_lookup=[True])
    await session.free(2)
    evicted = await explain(1, 2)
    assert (evicted.hit_tokens, evicted.groups[0].reason) == (0, "EVICTED")
    assert evicted.num_additional_blocks == 2
    assert (await explain()).groups[0].first_missing_block == -1
    assert (await refused(daemon.admin.ExplainLookup(pb.ExplainLookupRequest(pool="p")))).metadata[
        "field"
    ] == "num_tokens"


async def test_drain_streams_progress_until_sessions_are_gone(daemon: RunningDaemon, session: ClientSession) -> None:
    await session.keep_alive()
    stream = daemon.admin.Drain(pb.DrainRequest())
    first = await stream.read()
    assert (first.num_sessions, first.done) == (1, False) and first.time_left.seconds > 0
    refusal = await refused(daemon.admin.Drain(pb.DrainRequest()).read())
    assert refusal.reason == "ALREADY_DRAINING"
    await session.close()
    session.break_stream()
    last = first
    while (message := await stream.read()) is not grpc.aio.EOF:
        last = message
    assert last.done and last.num_sessions == 0
