"""The compact strategy: the known cases, its bounds, and what it says about its choice."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import StateCacheMode
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import Plan, Strategy
from kvhold_server.planner.compact import NoGroupingWithinBound
from kvhold_server.planner.errors import InsufficientMemory, PageNotUnifiable
from kvhold_server.planner.plan import plan
from kvhold_server.planner.request import CompactBounds, Speculation
from kvhold_server.rpc.plan_codec import decode_plan_request, encode_plan_response
from tests.conformance.plan import to_request
from tests.conformance.plan_invariants import broken_invariants
from tests.planner.beside_modern import never_worse
from tests.planner.builders import (
    Layers,
    config,
    cross,
    full,
    groups_of,
    hidden,
    indexer,
    mamba,
    many,
    mla,
    planned,
    request,
    sliding,
    sliding_mla,
)

GIB = 2**30
LENGTH = 131_072


def compact(layers: Layers, memory: int = 40 * GIB, length: int = LENGTH, **fields: Any) -> Plan:
    return planned(layers, memory, length, strategy=Strategy.COMPACT, **fields)


def modern(layers: Layers, memory: int = 40 * GIB, length: int = LENGTH, **fields: Any) -> Plan:
    return planned(layers, memory, length, strategy=Strategy.MODERN, **fields)


def concurrency(made: Plan) -> float:
    assert made.max_concurrency is not None
    return made.max_concurrency


def padding_layers(made: Plan) -> int:
    return sum(int(dict(warning.args).get("num_padding_layers", 0)) for warning in made.warnings)


@pytest.mark.parametrize("length", [1024, LENGTH, 1_000_000])
@pytest.mark.parametrize("layout", [Layout.LBHNC, Layout.BLNHC, Layout.LHBNC])
def test_plan_03_20_full_and_30_sliding_layers_are_dealt_by_tens(length: int, layout: Layout) -> None:
    layers = many(20, full(), "f") | many(30, sliding(), "s")
    made = compact(layers, length=length, layout=layout)
    assert [len(group) for group in groups_of(made)] == [10] * 5
    assert padding_layers(made) == 0
    assert concurrency(made) > concurrency(modern(layers, length=length, layout=layout))


def test_plan_04_19_full_and_18_sliding_layers_cost_one_dummy_layer() -> None:
    made = compact(many(19, full(), "f") | many(18, sliding(), "s"))
    assert [len(group) for group in groups_of(made)] == [19, 18]
    assert padding_layers(made) == 1


def test_plan_05_one_odd_state_does_not_make_a_group_of_every_layer() -> None:
    made = compact(many(36, mamba(8192), "a") | {"b": mamba(8192, mamba_type="other")})
    assert len(groups_of(made)) <= 12
    assert padding_layers(made) + len(groups_of(made)) <= 16


def test_plan_05_a_bound_asked_for_holds_even_where_padding_is_the_price() -> None:
    """States that hold different numbers of blocks cannot share a table: 37 groups, or some padding."""
    layers = many(36, mamba(8192), "a") | {"b": mamba(8192, num_speculative_blocks=2)}
    assert len(groups_of(modern(layers))) == 37
    made = compact(layers, compact=CompactBounds(max_num_groups=12))
    assert len(groups_of(made)) <= 12
    assert padding_layers(made) + len(groups_of(made)) <= 16


def test_one_odd_full_layer_gets_larger_blocks_instead_of_36_more_groups() -> None:
    layers = {"f": full()} | many(36, sliding(1024), "s")
    made, before = compact(layers, layout=Layout.BLHNC), modern(layers, layout=Layout.BLHNC)
    assert len(groups_of(before)) == 37
    assert len(groups_of(made)) <= 12
    assert concurrency(made) >= concurrency(before)


@pytest.mark.parametrize("layout", [Layout.LBHNC, Layout.BLHNC])
def test_a_state_page_of_a_thousand_attention_pages_does_not_blow_up_the_block(layout: Layout) -> None:
    layers = many(8, full(), "f") | many(24, mamba(8_192_000), "s")
    made, before = compact(layers, 80 * GIB, layout=layout), modern(layers, 80 * GIB, layout=layout)
    blocks = {group.block_size_tokens for group in made.ranks[0].groups}
    assert max(blocks) <= 16_000 // 2  # made equal in size, a page of attention would hold 16000 tokens
    assert concurrency(made) > concurrency(before)
    used = sum(page.page_size_bytes * len(page.layer_names) for page in made.ranks[0].tensors[:1])
    assert used > 0.99 * made.ranks[0].bytes_per_block


def test_a_state_page_that_no_block_divides_pads_the_state_rather_than_every_token() -> None:
    layers = many(4, full(), "f") | many(9, mamba(20_000), "s")
    fixed = CompactBounds(keep_layout=True)
    made, before = compact(layers, compact=fixed), modern(layers)
    assert {g.page_size_bytes for g in made.ranks[0].groups} == {24_576}  # three attention pages
    assert made.layout is Layout.LBHNC
    assert concurrency(made) > 2 * concurrency(before)


def test_what_modern_cannot_make_equal_is_packed_in_the_exchanged_layout() -> None:
    layers = (
        many(4, mla(64, 512, tokens_per_state=4, alignment_bytes=576), "a")
        | many(4, indexer(tokens_per_state=4, alignment_bytes=576), "i")
        | many(7, sliding_mla(alignment_bytes=576), "w")
    )
    with pytest.raises(PageNotUnifiable):
        modern(layers)
    assert compact(layers).layout is Layout.BLHNC
    with pytest.raises(PageNotUnifiable):
        compact(layers, compact=CompactBounds(keep_layout=True))
    packed = modern(layers, layout=Layout.BLHNC)
    assert concurrency(compact(layers, layout=Layout.BLHNC)) > 3 * concurrency(packed)


def test_where_there_is_nothing_to_decide_the_plan_is_moderns() -> None:
    for layers in (many(4, full(), "f"), {"a": full(), "b": full(heads=4)}):
        made, before = compact(layers), modern(layers)
        assert made.choice is None
        assert made.fingerprint == before.fingerprint


def test_no_block_is_larger_than_allowed() -> None:
    layers = many(8, full(), "f") | many(24, mamba(8_192_000), "s")
    made = compact(layers, 400 * GIB, compact=CompactBounds(max_block_size_tokens=512), layout=Layout.BLHNC)
    assert max(group.block_size_tokens for group in made.ranks[0].groups) <= 512


def test_a_bound_that_no_grouping_keeps_is_refused_with_its_value() -> None:
    layers = {"f": full(), "s": sliding(), "m": mamba()}
    with pytest.raises(NoGroupingWithinBound, match="max_num_groups is 2"):
        compact(layers, compact=CompactBounds(max_num_groups=2))


def test_memory_that_is_too_small_is_refused_as_modern_refuses_it() -> None:
    with pytest.raises(InsufficientMemory):
        compact(many(4, full(), "f") | many(6, sliding(), "s"), memory=1 << 20)


def test_a_drafters_layers_keep_one_table_of_their_own() -> None:
    layers = many(10, full(), "f") | many(16, sliding(), "s") | many(2, sliding(heads=4), "d")
    speculation = Speculation(method="eagle3", num_speculative_tokens=3)
    for layout in (Layout.LBHNC, Layout.BLHNC):
        asked = request((layers, GIB), config(1024, layout=layout, speculation=speculation, strategy=Strategy.COMPACT))
        made = plan(dataclasses.replace(asked, drafter_layers=frozenset({LayerName("d0"), LayerName("d1")})))
        flagged = [group.layer_names for group in made.ranks[0].groups if group.is_eagle_group]
        assert flagged == [("d0", "d1")]


def test_hidden_states_keep_a_group_each() -> None:
    layers = many(4, full(), "f") | many(9, sliding(heads=4), "s") | {"h": hidden(heads=4)}
    for layout in (Layout.LBHNC, Layout.BLHNC):
        assert ["h"] in groups_of(compact(layers, layout=layout))


def test_stages_of_a_pipeline_share_the_choice() -> None:
    layers = many(20, full(), "f") | many(30, sliding(), "s")
    names = list(layers)
    stages = [({name: layers[name] for name in names[first::2]}, 20 * GIB) for first in (0, 1)]
    made = plan(request(stages, config(LENGTH, strategy=Strategy.COMPACT, pipeline_parallel_size=2)))
    assert [len(g) for g in groups_of(made, 0)] == [5] * 5
    assert [len(g) for g in groups_of(made, 1)] == [5] * 5


def test_the_choice_names_what_else_was_possible_and_why_not() -> None:
    made = compact(many(20, full(), "f") | many(30, sliding(), "s"))
    assert made.choice is not None
    assert made.choice.chosen.description == "equal pages of 8192 bytes, groups of 10"
    assert made.choice.chosen.capacity_tokens == made.capacity_tokens
    before = next(each for each in made.choice.runners_up if "modern" in each.description)
    assert before.verdict.startswith("holds ") and before.verdict.endswith("less")
    assert before.capacity_tokens < made.choice.chosen.capacity_tokens
    assert made.choice.num_considered > len(made.choice.runners_up)


def test_a_model_whose_requests_hold_no_block_has_nothing_to_choose() -> None:
    made = compact({"a": cross(16), "b": cross(32, heads=4)}, max_num_encoder_input_tokens=0)
    assert made.capacity_tokens is None
    assert made.choice is None


def test_every_cached_mode_of_states_is_planned() -> None:
    layers = many(6, full(), "f") | many(18, mamba(50_000), "s")
    for mode in StateCacheMode:
        assert concurrency(compact(layers, state_cache_mode=mode)) >= concurrency(modern(layers, state_cache_mode=mode))


# --------------------------------------------------------------------------------------------- beside recorded inputs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compact_is_never_worse_than_modern_on_recorded_inputs(shared_dir: Path) -> None:
    compared = 0
    for line in (shared_dir / "vectors" / "plan_modern.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "config" not in row.get("input", {}):
            continue
        message = to_request(row)
        try:
            asked = decode_plan_request(message)
        except KvholdError:
            continue
        made = never_worse(asked)
        if made is not None:
            compared += 1
            assert broken_invariants(message, encode_plan_response(made)) == [], row["id"]
    assert compared > 300
