"""BlockService over a real socket: what a step does, exactly once, and what its items answer."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvhold.v1 import block_pb2 as pb
from kvhold.v1 import pool_pb2
from tests.rpc.harness import ClientSession, RunningDaemon, digest, refused, running, simulated
from tests.rpc.local_blocks import LocalBlocks
from tests.rpc.stream_blocks import StreamBlocks

OK = pb.ITEM_STATUS_OK


@pytest.fixture(params=["unary", "stream", "local"])
async def daemon(short_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[RunningDaemon]:
    """Each test runs over all ways of sending steps: they carry the same messages with the same meaning."""
    async with running(short_dir) as started:
        if request.param == "stream":
            started.blocks = StreamBlocks(started.blocks)  # type: ignore[assignment]
        if request.param == "local":
            started.blocks = LocalBlocks(started.daemon, started.blocks)  # type: ignore[assignment]
        yield started
        started.check()


@pytest.fixture
async def session(daemon: RunningDaemon) -> ClientSession:
    await daemon.open_pool()
    return await daemon.open_session()


async def test_admit_extend_free_and_hit_again(daemon: RunningDaemon, session: ClientSession) -> None:
    admitted = await session.admit(7, 40, 1, 2)
    assert (list(admitted.admit.statuses), list(admitted.admit.hit_tokens)) == ([OK], [0])
    assert (list(admitted.admit.block_ids), list(admitted.admit.num_blocks)) == ([1, 2, 3], [3])
    assert admitted.counts.num_provisional_blocks == 2
    extend = pb.ExtendItems(sequence_ids=[7], slots_needed=[49], processed_tokens=[40])
    extended = await session.step(extend=extend)
    assert (list(extended.extend.num_new_blocks), list(extended.extend.block_ids)) == ([1], [4])
    again = await session.step(extend=extend)
    assert (list(again.extend.statuses), list(again.extend.block_ids)) == ([OK], [])
    freed = await session.free(7)
    assert list(freed.num_freed_blocks) == [4] and freed.counts.num_cached_blocks == 2
    hit = await session.admit(8, 40, 1, 2)
    assert (list(hit.admit.hit_tokens), list(hit.admit.num_hit_blocks), list(hit.admit.granted_tokens)) == (
        [32],
        [2],
        [8],
    )
    assert list(hit.admit.block_ids)[:2] == [1, 2]


async def test_repeated_step_gets_the_first_answer_and_applies_nothing(
    daemon: RunningDaemon, session: ClientSession
) -> None:
    items = pb.AdmitItems(sequence_ids=[1], num_tokens=[40], num_hashes=[2], hashes=digest(1, 2))
    first = await session.step(step=5, admit=items)
    counts = daemon.node.pools["p"].pool.counts()  # type: ignore[index]
    again = await session.step(step=5, admit=items)
    assert again.replayed and not first.replayed
    again.replayed = False
    assert again == first and daemon.node.pools["p"].pool.counts() == counts  # type: ignore[index]


async def test_refused_extend_leaves_the_rest_untried(session: ClientSession) -> None:
    """R1: nothing is admitted in a step that could not extend."""
    await session.admit(1, 16 * 60, skip_lookup=[True])
    await session.admit(2, 16 * 30, skip_lookup=[True])
    answer = await session.step(
        extend=pb.ExtendItems(sequence_ids=[1, 2], slots_needed=[16 * 99, 16 * 30], processed_tokens=[0, 0]),
        admit=pb.AdmitItems(sequence_ids=[3], num_tokens=[16]),
    )
    assert list(answer.extend.statuses) == [pb.ITEM_STATUS_OUT_OF_BLOCKS, pb.ITEM_STATUS_NOT_TRIED]
    assert list(answer.admit.statuses) == [pb.ITEM_STATUS_NOT_TRIED]
    assert list(answer.extend.num_new_blocks) == [0, 0] and answer.counts.num_available_blocks == 9


async def test_budget_ends_admission_and_says_so(session: ClientSession) -> None:
    items = pb.AdmitItems(token_budget=50, sequence_ids=[1, 2, 3], num_tokens=[40, 40, 40])
    answer = await session.step(admit=items)
    assert list(answer.admit.statuses) == [OK, OK, pb.ITEM_STATUS_NO_BUDGET]
    assert list(answer.admit.granted_tokens) == [40, 10, 0]


async def test_a_refused_head_is_asked_again_by_id(session: ClientSession) -> None:
    """R19: hashes travel once."""
    await session.admit(1, 16 * 98, skip_lookup=[True])
    refused_head = await session.admit(2, 40, 1, 2)
    assert list(refused_head.admit.statuses) == [pb.ITEM_STATUS_OUT_OF_BLOCKS]
    await session.free(1)
    answer = await session.admit(2, 40)
    assert list(answer.admit.statuses) == [OK]
    await session.free(2)
    assert (await session.admit(3, 40, 1, 2)).admit.hit_tokens == [32], "its hashes were published"


async def test_unremembered_hashes_are_asked_for(session: ClientSession) -> None:
    answer = await session.admit(5, 40)
    assert list(answer.admit.statuses) == [pb.ITEM_STATUS_UNKNOWN_SEQUENCE]
    assert answer.problems[0].reason == "HASHES_MISSING"
    absent = await session.step(admit=pb.AdmitItems(sequence_ids=[5], num_tokens=[40]))
    assert list(absent.admit.statuses) == [OK], "no array at all: it has none, rather than remembered ones"


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (pb.ITEM_STATUS_SEQUENCE_EXISTS, {"sequence_ids": [1], "num_tokens": [10]}),
        (pb.ITEM_STATUS_NEVER_FITS, {"sequence_ids": [9], "num_tokens": [16 * 100], "skip_lookup": [True]}),
        (pb.ITEM_STATUS_HIT_CONFLICT, {"sequence_ids": [9], "num_tokens": [10], "expect_hit_tokens": [16]}),
        (pb.ITEM_STATUS_INVALID, {"sequence_ids": [9], "num_tokens": [10], "num_external_tokens": [11]}),
    ],
)
async def test_item_statuses(session: ClientSession, status: int, fields: dict[str, list[int]]) -> None:
    await session.admit(1, 10)
    answer = await session.step(admit=pb.AdmitItems(**fields))  # type: ignore[arg-type]
    assert list(answer.admit.statuses) == [status]
    assert (await session.step()).counts.num_held_blocks == 1


async def test_extend_of_an_unknown_sequence_does_not_stop_the_others(session: ClientSession) -> None:
    await session.admit(1, 10)
    items = pb.ExtendItems(sequence_ids=[99, 1], slots_needed=[32, 32], processed_tokens=[0, 0])
    answer = await session.step(extend=items)
    assert list(answer.extend.statuses) == [pb.ITEM_STATUS_UNKNOWN_SEQUENCE, OK]
    assert list(answer.extend.num_new_blocks) == [0, 1]


async def test_provisional_blocks_are_seen_by_their_session_only(daemon: RunningDaemon, session: ClientSession) -> None:
    other = await daemon.open_session()
    await session.admit(1, 40, 1, 2)
    lookup = pb.LookupItems(num_tokens=[40], num_hashes=[2], hashes=digest(1, 2))
    assert (await session.step(completed_step=0, lookup=lookup)).lookup.hit_tokens == [32]
    assert (await other.step(lookup=lookup)).lookup.hit_tokens == [0]
    observer = pb.LookupRequest(pool="p", lookup=lookup)
    assert (await daemon.blocks.Lookup(observer)).lookup.hit_tokens == [0]
    await session.step()
    assert (await other.step(lookup=lookup)).lookup.hit_tokens == [32]
    assert (await daemon.blocks.Lookup(observer)).lookup.hit_tokens == [32]


async def test_freed_blocks_wait_for_the_step_before_others_get_them(
    daemon: RunningDaemon, session: ClientSession
) -> None:
    other = await daemon.open_session()
    await session.admit(1, 16 * 98, skip_lookup=[True])
    await session.step(completed_step=0, free=pb.FreeItems(sequence_ids=[1]))
    assert list((await other.admit(1, 32, skip_lookup=[True])).admit.statuses) == [pb.ITEM_STATUS_OUT_OF_BLOCKS]
    await session.step()
    assert list((await other.admit(1, 32, skip_lookup=[True])).admit.statuses) == [OK]


async def test_invalidate_drops_hashes_and_frees_nothing(session: ClientSession) -> None:
    """R10."""
    await session.admit(1, 64, 1, 2, 3, 4)
    await session.admit(2, 32, 8, 9)
    invalidate = pb.InvalidateItems(sequence_ids=[1], first_tokens=[32], block_ids=[6])
    lookup = pb.LookupItems(num_tokens=[65, 33], num_hashes=[4, 2], hashes=digest(1, 2, 3, 4, 8, 9))
    answer = await session.step(invalidate=invalidate, lookup=lookup)
    assert list(answer.lookup.hit_tokens) == [32, 16] and answer.counts.num_held_blocks == 6


async def test_evicted_hashes_are_reported_when_asked_for(session: ClientSession) -> None:
    await session.admit(1, 32, 1, 2)
    await session.free(1)
    answer = await session.step(
        admit=pb.AdmitItems(sequence_ids=[2], num_tokens=[16 * 99], skip_lookup=[True]), report_evictions=True
    )
    assert answer.evicted_hashes in (digest(2, 1), digest(1, 2))


async def test_single_verbs_are_parts_of_the_step(daemon: RunningDaemon, session: ClientSession) -> None:
    admit = pb.AdmitItems(sequence_ids=[1], num_tokens=[40], defer_publish=[True], num_hashes=[2], hashes=digest(1, 2))
    allocated = await daemon.blocks.Allocate(pb.AllocateRequest(**session.head, step=1, admit=admit))
    assert list(allocated.admit.statuses) == [OK] and not allocated.counts.num_provisional_blocks
    publish = pb.PublishRequest(**session.head, step=2, sequence_ids=[1, 9], publish_tokens=[40, 16])
    published = await daemon.blocks.Publish(publish)
    assert list(published.statuses) == [OK, pb.ITEM_STATUS_UNKNOWN_SEQUENCE]
    assert published.counts.num_provisional_blocks == 2
    freed = await daemon.blocks.Free(pb.FreeRequest(**session.head, step=3, free=pb.FreeItems(sequence_ids=[1, 9])))
    assert list(freed.num_freed_blocks) == [3, 0]
    assert (
        await daemon.blocks.Free(pb.FreeRequest(**session.head, step=3, free=pb.FreeItems(sequence_ids=[1, 9])))
    ).replayed


async def test_two_groups_answer_item_major(daemon: RunningDaemon) -> None:
    options = simulated()
    options.overrides.groups.add(kind="sliding_window", block_size_tokens=16, sliding_window_tokens=32)
    await daemon.pools.OpenPool(pool_pb2.OpenPoolRequest(name="p", options=options))
    session = await daemon.open_session()
    items = pb.AdmitItems(sequence_ids=[1, 2], num_tokens=[40, 20], skip_lookup=[True, True])
    answer = (await session.step(admit=items)).admit
    assert list(answer.num_blocks) == [3, 3, 2, 2] and len(answer.block_ids) == 10


async def test_preempted_sequences_are_counted_apart(daemon: RunningDaemon, session: ClientSession) -> None:
    await session.admit(1, 40, 1, 2)
    await session.step(free=pb.FreeItems(sequence_ids=[1], publish_tokens=[40], preempted=[True]))
    await session.admit(1, 40, 1, 2)
    pool = (await daemon.pools.GetPool(pool_pb2.GetPoolRequest(name="p"))).pool
    stats = pool.prefix_stats
    assert (stats.query_tokens, stats.preempted_query_tokens, stats.preempted_hit_tokens) == (40, 40, 32)


async def test_boot_id_of_another_tenure_is_refused(session: ClientSession) -> None:
    refusal = await refused(session.step(boot_id="before"))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BOOT_ID_MISMATCH")


async def test_steps_must_not_go_back(session: ClientSession) -> None:
    await session.step(step=5)
    refusal = await refused(session.step(step=4, completed_step=0))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER")


async def test_hashes_of_a_refused_extend_are_sent_again_and_name_the_right_blocks(
    daemon: RunningDaemon, session: ClientSession
) -> None:
    """A refusal leaves no trace; hashes kept from it once shifted all later ones, and wrong blocks were hit."""
    await session.admit(1, 32, 1, 2)
    await session.admit(2, 16 * 96, skip_lookup=[True])
    extend = pb.ExtendItems(
        sequence_ids=[1],
        slots_needed=[64],
        processed_tokens=[32],
        publish_tokens=[64],
        num_hashes=[2],
        hashes=digest(3, 4),
    )
    for _ in range(2):
        refused_once = await session.step(extend=extend)
        assert list(refused_once.extend.statuses) == [pb.ITEM_STATUS_OUT_OF_BLOCKS]
    await session.free(2)
    assert list((await session.step(extend=extend)).extend.statuses) == [OK]
    await session.free(1)
    hit = await session.admit(3, 65, 1, 2, 3, 4)
    assert list(hit.admit.hit_tokens) == [64]
    state = daemon.node.pools["p"].pool.describe()  # type: ignore[index]
    named = {block_hash: blocks for block_hash, _, blocks in state.cache}
    assert [named[digest(i)][0] for i in (1, 2, 3, 4)] == list(hit.admit.block_ids)[:4]
    await session.free(3)


OTHER_CONTENTS = [
    ("admit.num_tokens", {"admit": pb.AdmitItems(sequence_ids=[1], num_tokens=[41], num_hashes=[2])}),
    ("admit.sequence_ids", {"admit": pb.AdmitItems(sequence_ids=[2], num_tokens=[40], num_hashes=[2])}),
    ("admit.reserved_blocks", {"admit": pb.AdmitItems(reserved_blocks=[1])}),
    ("admit.hashes", {"admit": pb.AdmitItems(hashes=digest(1, 3))}),
    ("free.sequence_ids", {"free": pb.FreeItems(sequence_ids=[9])}),
    ("extend.sequence_ids", {"extend": pb.ExtendItems(sequence_ids=[1], slots_needed=[48])}),
    ("lookup.sequence_ids", {"lookup": pb.LookupItems(num_tokens=[16], num_hashes=[0])}),
    ("completed_step", {"completed_step": 3}),
    ("invalidate.block_ids", {"invalidate": pb.InvalidateItems(block_ids=[1])}),
    ("report_evictions", {"report_evictions": True}),
]


@pytest.mark.parametrize("quota", [0, 50])
@pytest.mark.parametrize(("field", "change"), OTHER_CONTENTS, ids=[field for field, _ in OTHER_CONTENTS])
async def test_a_number_that_comes_again_for_something_else_is_refused(
    daemon: RunningDaemon, session: ClientSession, field: str, change: dict[str, Any], quota: int
) -> None:
    """The stored answer is that of another request: whoever took it for its own would use blocks that it never got."""
    daemon.node.set_quota("p", "default", quota)
    first = {"admit": pb.AdmitItems(sequence_ids=[1], num_tokens=[40], num_hashes=[2], hashes=digest(1, 2))}
    await session.step(step=5, **first)
    before = daemon.node.pools["p"].pool.describe()  # type: ignore[index]
    other = {**first, **change}
    if "admit" in change:
        other["admit"] = pb.AdmitItems.FromString(first["admit"].SerializeToString())
        for part, _ in change["admit"].ListFields():
            other["admit"].ClearField(part.name)
        other["admit"].MergeFrom(change["admit"])
    refusal = await refused(session.step(step=5, **other))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "STEP_CONTENTS_DIFFER")
    assert refusal.metadata == {"field": field, "step": "5", "part": "0"}
    assert daemon.node.pools["p"].pool.describe() == before  # type: ignore[index]
    assert (await session.step(step=5, **first)).replayed, "the retry is one"


async def test_of_older_steps_the_number_of_items_must_agree(session: ClientSession) -> None:
    items = pb.AdmitItems(sequence_ids=[1], num_tokens=[40], num_hashes=[2], hashes=digest(1, 2))
    await session.step(step=5, admit=items)
    await session.step(step=6)
    assert (await session.step(step=5, admit=items)).replayed
    refusal = await refused(session.step(step=5, admit=items, free=pb.FreeItems(sequence_ids=[3])))
    assert refusal.reason == "STEP_CONTENTS_DIFFER" and refusal.metadata["field"] == "free.sequence_ids"


async def with_allotment(session: ClientSession) -> list[int]:
    """Sequence 1 has two blocks; the next eight are allotted."""
    items = pb.AdmitItems(sequence_ids=[1], num_tokens=[20], num_hashes=[1], hashes=digest(1))
    answer = await session.step(admit=items, max_allotted_blocks=8)
    assert answer.is_only_session and list(answer.allotted_block_ids) == list(range(3, 11))
    return list(answer.allotted_block_ids)


def drawn(slots: int, **fields: Any) -> pb.ExtendItems:
    return pb.ExtendItems(sequence_ids=[1], slots_needed=[slots], processed_tokens=[20], **fields)


async def test_what_was_drawn_is_told_later(daemon: RunningDaemon, session: ClientSession) -> None:
    allotted = await with_allotment(session)
    parts = {"drawn": drawn(70, num_hashes=[1], hashes=digest(2), publish_tokens=[40]), "num_drawn_blocks": 3}
    items = pb.ExtendItems(sequence_ids=[1], slots_needed=[90], processed_tokens=[70])
    answer = await session.step(extend=items, max_allotted_blocks=2, **parts)
    assert list(answer.extend.block_ids) == allotted[3:4]
    assert list(answer.allotted_block_ids) == allotted[4:6]
    again = await session.step(step=session.next_step - 1, extend=items, max_allotted_blocks=2, **parts)
    assert again.replayed and again.allotted_block_ids == answer.allotted_block_ids
    tables = daemon.node.pools["p"].pool.describe().tables  # type: ignore[index]
    assert list(tables.values()) == [[[1, 2, *allotted[:4]]]]


@pytest.mark.parametrize(
    "parts",
    [
        {"drawn": drawn(70), "num_drawn_blocks": 2},
        {"drawn": drawn(70)},
        {"drawn": drawn(16 * 11), "num_drawn_blocks": 9},
        {"drawn": drawn(70), "num_drawn_blocks": -1},
        {"drawn": drawn(-1), "num_drawn_blocks": 0},
        {"drawn": drawn(70, num_lookahead_tokens=[1]), "num_drawn_blocks": 3},
        {"drawn": drawn(70, num_hashes=[1]), "num_drawn_blocks": 3},
        {"drawn": drawn(70, num_hashes=[-1]), "num_drawn_blocks": 3},
        {"drawn": drawn(70, publish_tokens=[-1]), "num_drawn_blocks": 3},
        {"drawn": pb.ExtendItems(sequence_ids=[1]), "num_drawn_blocks": 3},
        {"num_drawn_blocks": 3},
        {"max_allotted_blocks": -1},
    ],
)
async def test_draws_that_cannot_be_are_refused_and_leave_no_trace(
    daemon: RunningDaemon, session: ClientSession, parts: dict[str, Any]
) -> None:
    allotted = await with_allotment(session)
    pool = daemon.node.pools["p"].pool  # type: ignore[index]
    before = pool.describe()
    refusal = await refused(session.step(free=pb.FreeItems(sequence_ids=[1]), **parts))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert pool.describe() == before
    await session.step(step=2, drawn=drawn(70), num_drawn_blocks=3)
    assert list(pool.describe().tables.values()) == [[[1, 2, *allotted[:3]]]]


async def test_a_second_session_ends_allotments_and_takes_nothing_of_them(
    daemon: RunningDaemon, session: ClientSession
) -> None:
    allotted = await with_allotment(session)
    other = await daemon.open_session()
    answer = await other.admit(1, 16 * 5, skip_lookup=[True])
    assert not set(answer.admit.block_ids) & set(allotted)
    answer = await session.step(drawn=drawn(70), num_drawn_blocks=3, max_allotted_blocks=8)
    assert not answer.is_only_session and not answer.allotted_block_ids
    tables = daemon.node.pools["p"].pool.describe().tables  # type: ignore[index]
    assert [[1, 2, *allotted[:3]]] in tables.values()
