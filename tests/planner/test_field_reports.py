"""Reports from the field about planning: each test has the report's id and its numbers."""

import dataclasses
from typing import Any

import pytest

from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds import FullSpec
from kvhold_server.domain.layer_spec import cdiv
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import WarningType
from kvhold_server.planner.errors import InsufficientMemory, NoMemory
from kvhold_server.planner.plan import plan
from kvhold_server.planner.request import Speculation
from tests.planner.builders import (
    config,
    full,
    groups_of,
    indexer,
    mamba,
    many,
    mla,
    planned,
    request,
    sliding,
)

GIB = 2**30


def wide(**fields: Any) -> FullSpec:
    """A page of 65536 bytes: 16 tokens, 8 heads of 128, bf16."""
    return full(heads=8, size=128, **fields)


def test_plan_02_a_state_is_padded_where_per_token_layers_are_scaled() -> None:
    layers = {
        "main_attn": full(heads=4, size=128),
        "state": mamba(32768, 16),
        "draft_attn": sliding(heads=8, size=128),
    }
    groups = {group.layer_names[0]: group for group in planned(layers, GIB).ranks[0].groups}
    assert {group.page_size_bytes for group in groups.values()} == {65536}
    assert groups["main_attn"].block_size_tokens == 32
    assert groups["state"].block_size_tokens == 16
    assert groups["state"].spec.padded_page_size_bytes == 65536


def test_plan_04_one_dummy_layer_is_enough_for_19_and_18() -> None:
    made = planned(many(19, full(), "f") | many(18, sliding(), "s"), GIB)
    assert [len(group) for group in groups_of(made)] == [19, 18]
    assert [dict(w.args)["num_padding_layers"] for w in made.warnings] == ["1"]


@pytest.mark.parametrize("layout", [Layout.LBHNC, Layout.BLHNC])
@pytest.mark.parametrize("heads", [2, 4])
def test_plan_06_a_drafters_layers_stay_in_one_group_and_only_that_is_flagged(layout: Layout, heads: int) -> None:
    layers = many(10, full(), "f") | many(16, sliding(), "s") | many(2, sliding(heads=heads), "d")
    asked = request(
        (layers, GIB), config(1024, layout=layout, speculation=Speculation(method="eagle3", num_speculative_tokens=3))
    )
    made = plan(dataclasses.replace(asked, drafter_layers=frozenset({LayerName("d0"), LayerName("d1")})))
    with_drafts = [group for group in made.ranks[0].groups if any(name.startswith("d") for name in group.layer_names)]
    assert [group.layer_names for group in with_drafts] == [("d0", "d1")]
    assert [group.is_eagle_group for group in made.ranks[0].groups] == [
        group is with_drafts[0] for group in made.ranks[0].groups
    ]


def test_plan_07_groups_and_blocks_are_decided_for_all_stages_together() -> None:
    states = many(3, mamba(1000, 512), "s")
    ranks = [(states, GIB), ({"m": mla(512)}, GIB)]
    made = plan(request(ranks, config(1024, enable_prefix_caching=True, pipeline_parallel_size=2)))
    kinds = [[(g.kind, g.block_size_tokens, g.page_size_bytes) for g in rank.groups] for rank in made.ranks]
    assert kinds[0] == kinds[1]
    assert {block for _, block, _ in kinds[0]} == {512}
    assert [g.layer_names for g in made.ranks[0].groups if g.kind == "mla_attention"] == [()]


def test_plan_08_the_rank_without_memory_is_named() -> None:
    layers = many(32, full(), "l")
    halves = [dict(list(layers.items())[:16]), dict(list(layers.items())[16:])]
    with pytest.raises(NoMemory) as refusal:
        plan(request([(halves[0], 8 * GIB), (halves[1], 0)], config(1024, pipeline_parallel_size=2)))
    assert (refusal.value.rank, refusal.value.available_bytes) == (1, 0)
    assert "rank 1: 0 bytes" in str(refusal.value)


def test_plan_09_ranks_end_with_one_block_count() -> None:
    ranks = [(many(20, wide(), "a"), 1310720000), (many(12, wide(), "b"), 707788800)]
    made = plan(request(ranks, config(1024, pipeline_parallel_size=2)))
    assert made.num_blocks == 900
    assert made.ranks[0].region_size_bytes == 1179648000


@pytest.mark.parametrize(("block", "blocks", "fitted"), [(128, 8, 896), (16, 1201, 19200)])
def test_plan_11_the_null_block_is_not_part_of_the_fitted_length(block: int, blocks: int, fitted: int) -> None:
    spec = full(block)
    made = planned({"a": spec}, blocks * spec.page_size_bytes, length=1 << 20, auto_fit_max_model_len=True)
    assert (made.num_blocks, made.max_model_len_tokens) == (blocks, fitted)


def test_plan_14_every_registered_cache_has_a_tensor() -> None:
    layers = many(78, mla(), "mla") | many(21, indexer(), "idx")
    made = planned(layers, GIB, layout=Layout.BLHNC)
    assert sum(len(tensor.layer_names) for tensor in made.ranks[0].tensors) == 99


def test_plan_15_an_override_drives_tensors_capacity_and_the_length_check() -> None:
    memory = 333325 * 8192
    with pytest.raises(InsufficientMemory):
        planned({"a": full()}, memory, length=131072, num_blocks_override=100)
    made = planned({"a": full()}, memory, length=1584, num_blocks_override=100)
    assert (made.num_blocks, made.capacity_tokens) == (100, 1600)
    assert made.ranks[0].region_size_bytes == 100 * 8192


def test_plan_16_an_override_too_small_for_one_request_says_how_many_it_takes() -> None:
    with pytest.raises(NoMemory) as refusal:
        planned({"a": full()}, GIB, length=2048, num_blocks_override=1)
    assert refusal.value.min_blocks == 129
    with pytest.raises(InsufficientMemory) as refusal_too:
        planned({"a": full()}, GIB, length=2048, num_blocks_override=128)
    assert refusal_too.value.min_blocks == 129
    assert planned({"a": full()}, GIB, length=2048, num_blocks_override=129).num_blocks == 129


def test_plan_17_memory_grows_with_the_override_so_no_id_lies_outside() -> None:
    made = planned({"a": full()}, 1000 * 8192, num_blocks_override=1500)
    rank = made.ranks[0]
    assert rank.region_size_bytes == made.num_blocks * 8192 == 1500 * 8192
    assert max(tensor.end_bytes for tensor in rank.tensors) <= rank.region_size_bytes
    [warning] = [w for w in made.warnings if w.type is WarningType.OVERRIDE_EXCEEDS_MEMORY]
    assert dict(warning.args) == {"rank": "0", "needed_bytes": str(1500 * 8192), "available_bytes": str(1000 * 8192)}


def test_plan_18_capacity_is_concurrency_times_length() -> None:
    attention = full(528)
    page = attention.page_size_bytes
    layers = {"a": attention} | {f"s{i}": mamba(page, 528, num_speculative_blocks=0) for i in range(3)}
    made = planned(layers, 1000 * page, length=32768)
    assert sum(group.max_request_blocks for group in made.scheduler_groups) == 66
    assert made.max_concurrency == pytest.approx(15.14, abs=1 / 66)
    assert made.capacity_tokens == pytest.approx(495988, abs=528)


def test_plan_19_the_blocks_of_groups_their_grid_and_the_users_value_are_three_numbers() -> None:
    layers = {"a": full(256), "b": sliding(64, 64), "c": sliding(32, 8), "d": sliding(16, 4)}
    asked = config(1024, layout=Layout.BLHNC, cache_block_size_tokens=256)
    made = plan(request((layers, GIB), asked))
    assert [group.block_size_tokens for group in made.ranks[0].groups] == [256, 64, 8, 4]
    assert made.cache_block_size_tokens == 4
    assert asked.cache_block_size_tokens == 256


def test_plan_21_promoted_windows_are_charged_for_what_is_allocated() -> None:
    layers = many(12, full(), "f") | many(12, sliding(1024), "s")
    made = planned(layers, GIB, length=8192, disable_hybrid_kv_cache=True)
    [group] = made.ranks[0].groups
    assert group.max_request_blocks * group.block_size_tokens == 8192
    assert len(group.layer_names) == 24


def test_plan_22_the_planned_bound_admits_a_prompt_chunk_by_chunk() -> None:
    window, chunk, prompt, block = 1024, 8192, 65536, 16
    layers = {"f": full(block), "s": sliding(window, block)}
    limits = config(prompt, max_num_batched_tokens=chunk).limits
    bound = {name: spec.max_request_blocks(limits) for name, spec in layers.items()}
    page = full(block).page_size_bytes
    made = planned(layers, (sum(bound.values()) + 1) * page, length=prompt, max_num_batched_tokens=chunk)
    free = made.num_blocks - 1
    for computed in range(0, prompt, chunk):  # what a recycling scheduler holds at each step
        first_kept = max(0, computed - window + 1)
        held_window = cdiv(computed + chunk, block) - first_kept // block
        held_full = cdiv(computed + chunk, block)
        assert held_window <= bound["s"]
        assert held_full + held_window <= free


def test_plan_24_the_number_of_requests_that_fit_is_reported() -> None:
    made = planned({"s": mamba()}, 615 * 8192, max_num_seqs=1024)
    [warning] = [w for w in made.warnings if w.type is WarningType.MAX_NUM_SEQS_UNREACHABLE]
    assert dict(warning.args)["suggested_max_num_seqs"] == "614"
    fitting = planned({"s": mamba()}, 615 * 8192, max_num_seqs=614)
    assert not fitting.warnings


def test_plan_25_the_footprint_floor_is_the_number_of_groups() -> None:
    layers = {"a": full(7808, 1, 8)}
    page = layers["a"].page_size_bytes
    made = planned(layers | {f"s{i}": mamba(page - i, 7808) for i in range(22)}, 71 * page, length=7808, max_num_seqs=4)
    assert len(made.scheduler_groups) == 23
    assert made.min_request_blocks == 23
    assert (made.num_blocks - 1) // made.min_request_blocks == 3
    assert [w.type for w in made.warnings] == [WarningType.MAX_NUM_SEQS_UNREACHABLE]


def test_plan_27_the_estimated_length_fits_and_the_next_does_not() -> None:
    layers = many(8, wide(), "f") | many(8, sliding(4096, heads=8, size=128), "s")
    with pytest.raises(InsufficientMemory) as refusal:
        planned(layers, 2 * GIB, length=1 << 20)
    longest = refusal.value.estimated_max_model_len_tokens
    assert planned(layers, 2 * GIB, length=longest).max_model_len_tokens == longest
    with pytest.raises(InsufficientMemory):
        planned(layers, 2 * GIB, length=longest + 1)


def test_indexer_pages_use_the_stored_width() -> None:
    """PLAN-13: what is reserved for 64 four-bit rows is 4352 bytes."""
    packed = indexer(64, 128, state_content_bytes=68)
    made = planned({"m": mla(64, 512, Dtype.UINT8), "i": packed}, GIB, layout=Layout.BLHNC)
    assert [t.page_size_bytes for t in made.ranks[0].tensors if t.layer_names == ("i",)] == [4352]
