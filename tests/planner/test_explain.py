"""A plan that explains itself: every byte has a kind or a cause, and what is said about other memory is true."""

import dataclasses
from typing import Any

import pytest

from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import Plan, Strategy
from kvhold_server.planner.errors import InsufficientMemory
from kvhold_server.planner.explain import GIB, Explained, plan_explained
from kvhold_server.planner.explanation import BlockPool, RankExplanation, WasteCause
from kvhold_server.planner.plan import plan
from kvhold_server.planner.request import Hisparse
from tests.planner.builders import (
    Layers,
    config,
    full,
    indexer,
    mamba,
    many,
    mla,
    request,
    sliding,
    tail,
)


def explained(layers: Layers, memory: int = GIB, length: int = 1024, **fields: Any) -> Explained:
    return plan_explained(request((layers, memory), config(length, **fields)))


def wasted(rank: RankExplanation, cause: WasteCause) -> int:
    found = [waste.size_bytes for waste in (*rank.request_waste, *rank.memory_waste) if waste.cause is cause]
    return found[0] if found else 0


def accounted(rank: RankExplanation) -> int:
    held = sum(share.request_bytes for share in rank.kinds if share.pool is BlockPool.DEVICE)
    return held + sum(waste.size_bytes for waste in rank.request_waste)


def test_bytes_by_kind_and_the_dummy_layer_that_a_narrow_group_costs() -> None:
    # 1024 tokens: 64 blocks of full layers; windows hold ceil((127 + 256) / 16) + 1 = 25. A page has 8192 bytes.
    rank = explained(many(5, full(), "f") | many(4, sliding(), "s")).explanation.ranks[0]
    assert {share.kind: (share.num_layers, share.request_bytes) for share in rank.kinds} == {
        "full_attention": (5, 5 * 64 * 8192),
        "sliding_window": (4, 4 * 25 * 8192),
    }
    assert rank.request_bytes == 5 * (64 + 25) * 8192
    assert wasted(rank, WasteCause.NARROW_GROUP) == 25 * 8192
    assert rank.request_waste[0].groups == (1,)
    assert rank.request_waste[0].percent == pytest.approx(100 * 25 / (5 * 89))


def test_padding_of_pages_and_alignment_of_blocks_are_told_apart() -> None:
    padded = explained({"f": full(), "m": mamba(9000)}).explanation.ranks[0]
    assert wasted(padded, WasteCause.PAGE_PADDING) == 64 * (9000 - 8192)
    aligned = explained(many(2, full(block_stride_alignment_bytes=3000), "f")).explanation.ranks[0]
    assert wasted(aligned, WasteCause.BLOCK_ALIGNMENT) == 64 * (18_000 - 2 * 8192)


def test_the_memory_that_is_offered_is_the_blocks_the_null_block_and_what_is_left() -> None:
    memory = 100 * 8192 + 5000
    rank = explained({"f": full()}, memory).explanation.ranks[0]
    assert wasted(rank, WasteCause.NULL_BLOCK) == 8192
    assert wasted(rank, WasteCause.REMAINDER) == 5000
    assert wasted(rank, WasteCause.OTHER_LIMIT) == 0


def test_what_the_smallest_rank_leaves_unused_on_others_is_named_there() -> None:
    ranks = [({"a": full()}, 200 * 8192), ({"b": full()}, 150 * 8192 + 7)]
    made = plan_explained(request(ranks, config(1024))).explanation
    assert [rank.ranks for rank in made.ranks] == [(0,), (1,)]
    assert wasted(made.ranks[0], WasteCause.OTHER_LIMIT) == 50 * 8192
    assert wasted(made.ranks[1], WasteCause.REMAINDER) == 7


def test_equal_ranks_are_explained_once() -> None:
    ranks = [({"a": full()}, GIB)] * 4
    assert [rank.ranks for rank in plan_explained(request(ranks, config(64))).explanation.ranks] == [(0, 1, 2, 3)]


@pytest.mark.parametrize("strategy", list(Strategy))
def test_the_longest_request_fits_and_the_next_does_not(strategy: Strategy) -> None:
    layers = many(8, full(heads=8, size=128), "f") | many(8, sliding(4096, heads=8, size=128), "s")
    asked = request((layers, 2 * GIB), config(1024, strategy=strategy))
    longest = plan_explained(asked).explanation.longest_request_tokens
    assert longest is not None and longest > 1024

    def at(length: int) -> Plan:
        return plan(dataclasses.replace(asked, config=dataclasses.replace(asked.config, max_model_len_tokens=length)))

    assert at(longest).max_model_len_tokens == longest
    with pytest.raises(InsufficientMemory):
        at(longest + 1)


def test_a_model_of_windows_only_has_no_longest_request() -> None:
    assert explained({"s": sliding()}).explanation.longest_request_tokens is None


@pytest.mark.parametrize("strategy", list(Strategy))
def test_a_gib_more_and_less_is_what_planning_with_it_gives(strategy: Strategy) -> None:
    layers = many(20, full(), "f") | many(30, sliding(), "s")
    made = explained(layers, 2 * GIB, strategy=strategy)
    less, more = made.explanation.memory_steps
    assert (less.delta_bytes, more.delta_bytes) == (-GIB, GIB)
    assert less.num_blocks < made.plan.num_blocks < more.num_blocks
    richer = plan(request((layers, 3 * GIB), config(1024, strategy=strategy)))
    assert (more.num_blocks, more.capacity_tokens) == (richer.num_blocks, richer.capacity_tokens)


def test_a_gib_that_cannot_be_spared_says_why() -> None:
    less = explained({"f": full()}, GIB).explanation.memory_steps[0]
    assert less.num_blocks == 0
    assert "rank 0" in less.refusal


def test_one_longest_request_and_the_shortest_ones_are_checked_against_what_can_be_used() -> None:
    layers = {"f": full()} | {"m": mamba(8192)}
    checks = explained(layers, 100 * 8192, 512, max_num_seqs=60).explanation.checks
    assert [(check.needed_blocks, check.usable_blocks, check.ok) for check in checks] == [
        (32 + 1, 99, True),
        (60 * 2, 99, False),
    ]


def test_legacy_accepts_memory_for_the_null_block_alone_and_the_check_says_so() -> None:
    checks = explained({"f": full()}, 8192, 16, strategy=Strategy.LEGACY).explanation.checks
    assert [(check.needed_blocks, check.usable_blocks, check.ok) for check in checks] == [(1, 0, False)]


def test_the_pools_of_a_drafter_and_of_the_host_are_checked_too() -> None:
    layers: dict[str, Any] = {f"l.{i}.m": mamba(20_000, 64) for i in (0, 1, 2)} | {
        "l.3.a": mla(64, 512, alignment_bytes=None),
        "l.3.i": indexer(64, 132, tokens_per_state=4),
        "l.3.t": tail(),
        "l.4.d": sliding(block=64, heads=1),
    }
    made = explained(layers, GIB, max_num_seqs=8)
    assert {check.pool for check in made.explanation.checks} == {BlockPool.DEVICE, BlockPool.DRAFT}
    assert all(check.ok for check in made.explanation.checks)
    assert accounted(made.explanation.ranks[0]) == made.explanation.ranks[0].request_bytes

    host: dict[str, Any] = {}
    for number in range(4):
        host[f"l.{number}.a"] = mla(64, is_index_group_leader=number % 2 == 0)
        host |= {f"l.{number}.i": indexer()} if number % 2 == 0 else {}
    host["f"] = full(64, heads=1, size=32)
    sparse = Hisparse(index_topk=512, host_pool_bytes=GIB)
    made = explained(host, GIB, layout=Layout.BLHNC, hisparse=sparse)
    assert {check.pool for check in made.explanation.checks} == {BlockPool.DEVICE, BlockPool.HOST}
    assert accounted(made.explanation.ranks[0]) == made.explanation.ranks[0].request_bytes


def test_the_explanation_of_compact_speaks_of_the_plan_it_comes_with() -> None:
    layers = many(20, full(), "f") | many(30, sliding(), "s")
    made = explained(layers, GIB, strategy=Strategy.COMPACT)
    assert made.plan == plan(request((layers, GIB), config(1024, strategy=Strategy.COMPACT)))
    assert wasted(made.explanation.ranks[0], WasteCause.NARROW_GROUP) == 0
