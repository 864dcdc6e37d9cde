"""Numbers that the original planners gave for small models, path by path."""

from typing import Any

import pytest

from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.errors import InvalidRequest, Unsupported
from kvhold_server.domain.layer_spec import LayerSpec, StateCacheMode
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import Plan, Strategy
from kvhold_server.planner.block_sizes import resolve_block_sizes
from kvhold_server.planner.errors import (
    CannotAutoFit,
    InsufficientMemory,
    LayoutCannotHoldPages,
    MatchUnitDoesNotDivide,
    NoMemory,
    PaddedPageSplit,
)
from kvhold_server.planner.plan import plan
from kvhold_server.planner.request import DraftPool, Hisparse, Speculation
from tests.planner.builders import (
    Layers,
    config,
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
    strides_of,
    tail,
)

TWO_FULL_THREE_SLIDING = {"a": full(), "b": full(), "c": sliding(), "d": sliding(), "e": sliding()}
UNEQUAL_PAGES = {"a": full(), "b": full(), "c": full(heads=1)}
MEM = 400_000


# --------------------------------------------------------------------------------------------------- layouts, placement


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        (Layout.LBHNC, (196608, 8192, 0)),
        (Layout.LHBNC, (196608, 4096, 0)),
        (Layout.BLHNC, (8192, 16384, 0)),
        (Layout.BHLNC, (4096, 16384, 0)),
    ],
)
def test_equal_pages_in_each_layout(layout: Layout, strides: tuple[int, int, int]) -> None:
    made = planned(TWO_FULL_THREE_SLIDING, MEM, max_num_batched_tokens=64, layout=layout)
    assert groups_of(made) == [["a", "b"], ["c", "e"], ["d"]]
    assert made.num_blocks == 24
    assert strides_of(made)[0] == strides
    assert {tensor.size_bytes for tensor in made.ranks[0].tensors} == {393216}


def test_unequal_pages_of_one_group_lie_behind_each_other() -> None:
    by_layer = planned(UNEQUAL_PAGES, MEM)
    assert (by_layer.num_blocks, by_layer.ranks[0].region_size_bytes) == (19, 389120)
    assert strides_of(by_layer) == [(155648, 8192, 0), (77824, 4096, 311296)]
    by_block = planned(UNEQUAL_PAGES, MEM, layout=Layout.BLHNC)
    assert strides_of(by_block) == [(8192, 20480, 0), (4096, 20480, 16384)]


@pytest.mark.parametrize("layout", [Layout.LHBNC, Layout.BHLNC])
def test_unequal_pages_need_a_layout_that_keeps_a_page_in_one_piece(layout: Layout) -> None:
    with pytest.raises(LayoutCannotHoldPages, match=r"pages of \(4096, 8192\) bytes .* BLHNC"):
        planned(UNEQUAL_PAGES, MEM, layout=layout)


def test_padding_needs_one_head_where_heads_are_outside() -> None:
    with pytest.raises(PaddedPageSplit, match="padded to 9000 bytes with 2 heads"):
        planned({"a": full(page_size_padded_bytes=9000)}, MEM, layout=Layout.LHBNC)
    made = planned({"a": full(heads=1, page_size_padded_bytes=9000)}, MEM, layout=Layout.LHBNC)
    assert made.num_blocks == 44
    assert strides_of(made) == [(396000, 9000, 0)]


def test_block_alignment_rounds_the_block_and_shows_in_block_outermost_strides() -> None:
    aligned = full(block_stride_alignment_bytes=3000)
    by_block = planned({"a": aligned, "b": aligned}, MEM, layout=Layout.BLHNC)
    assert (by_block.ranks[0].bytes_per_block, by_block.num_blocks) == (18000, 22)
    assert by_block.ranks[0].tensors[0].block_stride_bytes == 18000
    by_layer = planned({"a": aligned, "b": aligned}, MEM)
    assert strides_of(by_layer) == [(180224, 8192, 0)]
    assert by_layer.ranks[0].region_size_bytes == 396000


# ---------------------------------------------------------------------------------------------------- memory and length


def test_the_null_block_is_not_for_requests() -> None:
    with pytest.raises(NoMemory, match=r"rank 0: 8192 bytes .* 2 blocks"):
        planned({"a": full()}, 8192, length=16)
    assert planned({"a": full()}, 16384, length=16).num_blocks == 2


def test_too_long_a_request_is_refused_with_the_longest_that_fits_or_shortened() -> None:
    with pytest.raises(InsufficientMemory) as refusal:
        planned({"a": full()}, 40960, length=100)
    assert refusal.value.estimated_max_model_len_tokens == 64
    fitted = planned({"a": full()}, 40960, length=100, auto_fit_max_model_len=True)
    assert (fitted.max_model_len_tokens, fitted.num_blocks) == (64, 5)
    with pytest.raises(CannotAutoFit):
        planned({"a": full()}, 8192, length=100, auto_fit_max_model_len=True)


def test_all_ranks_have_the_blocks_of_the_smallest() -> None:
    ranks = [({"a": full()}, 81920), ({"b": full()}, 41037)]
    made = plan(request(ranks, config(32)))
    assert [rank.num_blocks for rank in made.ranks] == [5, 5]
    assert [rank.region_size_bytes for rank in made.ranks] == [40960, 40960]
    overridden = plan(request(ranks, config(32, num_blocks_override=9)))
    assert [rank.region_size_bytes for rank in overridden.ranks] == [73728, 73728]


def test_concurrency_counts_the_blocks_of_all_groups() -> None:
    made = planned({"a": full(), "b": sliding()}, 819200, length=100)
    assert made.num_blocks == 100
    assert made.max_concurrency == 6.666666666666667
    assert made.capacity_tokens == 666


# ------------------------------------------------------------------------------------------------------ hybrid grouping


@pytest.mark.parametrize(
    ("sliding_layers", "groups", "padding", "percent"),
    [
        (5, [["f0", "f1", "f2", "f3"], ["s0", "s1", "s2", "s3", "s4"]], "1", "25.00"),
        (6, [["f0", "f1", "f2", "f3"], ["s0", "s2", "s4"], ["s1", "s3", "s5"]], "2", "33.33"),
    ],
)
def test_layers_are_dealt_into_groups_of_about_one_size(
    sliding_layers: int, groups: list[list[str]], padding: str, percent: str
) -> None:
    made = planned(many(4, full(), "f") | many(sliding_layers, sliding(), "s"), 10**7)
    assert groups_of(made) == groups
    assert [dict(warning.args) for warning in made.warnings] == [
        {"num_padding_layers": padding, "wasted_percent": percent}
    ]


def test_hidden_states_follow_the_page_of_the_others() -> None:
    layers = many(4, full(), "f") | many(5, sliding(heads=4), "s") | {"h": hidden(heads=4)}
    made = planned(layers, 10**7)
    blocks = [(group.block_size_tokens, group.page_size_bytes) for group in made.ranks[0].groups]
    assert blocks == [(32, 16384), (16, 16384), (16, 16384)]
    assert made.num_blocks == 122
    assert made.ranks[0].tensors[0].layer_stride_bytes == 1998848


def test_hidden_states_in_packed_groups_keep_their_own_block() -> None:
    layers = many(4, full(), "f") | many(5, sliding(heads=4), "s") | {"h": hidden(heads=4)}
    made = planned(layers, 10**7, layout=Layout.BLHNC)
    assert groups_of(made) == [["f0", "f1", "f2", "f3"], ["s0", "s3"], ["s1", "s4"], ["s2"], ["h"]]
    assert (made.ranks[0].bytes_per_block, made.num_blocks) == (32768, 305)
    assert [s[0] for s in strides_of(made)] == [8192, 16384, 16384, 16384, 8192]
    assert {s[2] for s in strides_of(made)} == {0}


def test_a_wide_hidden_state_enlarges_everybodys_block() -> None:
    small = {"a": full(heads=1, size=8), "b": sliding(heads=1, size=8)}
    made = planned(small | {"h": hidden(size=700)}, 10**7)
    assert [(g.block_size_tokens, g.page_size_bytes) for g in made.ranks[0].groups] == [
        (48, 1536),
        (48, 1536),
        (1, 1536),
    ]


def test_states_are_spread_over_as_many_groups_as_keep_the_block_narrow() -> None:
    made = planned(many(4, full(), "f") | many(9, mamba(20000), "m"), 10**7, layout=Layout.BLHNC)
    assert [len(group) for group in groups_of(made)] == [4] + [1] * 9
    assert made.ranks[0].bytes_per_block == 32768


def test_compressed_rows_and_indexers_pack_beside_windows() -> None:
    fields = {"alignment_bytes": 576}
    layers: dict[str, LayerSpec] = {}
    for index in range(4):
        layers[f"c4a{index}"] = mla(64, 512, tokens_per_state=4, **fields)
        layers[f"c4i{index}"] = indexer(64, 132, tokens_per_state=4, **fields)
    layers |= {f"sw{index}": sliding_mla(**fields) for index in range(7)}
    made = planned(layers, 10**8, layout=Layout.BLHNC)
    assert groups_of(made) == [
        [f"c4{role}{index}" for index in range(4) for role in "ai"],
        ["sw0", "sw2", "sw4", "sw6"],
        ["sw1", "sw3", "sw5"],
    ]
    assert (made.ranks[0].bytes_per_block, made.num_blocks) == (262656, 380)
    assert [(t.layer_stride_bytes, t.offset_bytes) for t in made.ranks[0].tensors] == [
        (16704, 0),
        (2304, 66816),
        (65664, 0),
        (65664, 0),
    ]


def test_pages_that_do_not_unify_are_allocated_in_full() -> None:
    made = planned({"m": mla(block=16), "s": sliding(block=32, heads=8, size=80)}, 10**7)
    assert [(group.kind, group.block_size_tokens) for group in made.ranks[0].groups] == [("uniform_type", 16)]
    assert made.num_blocks == 168
    assert [tensor.offset_bytes for tensor in made.ranks[0].tensors] == [0, 3096576]


# ------------------------------------------------------------------------------------------------------------------ GLM


def glm_layers(**drafts: LayerSpec) -> dict[str, LayerSpec]:
    layers: dict[str, LayerSpec] = {}
    for index in range(8):
        if index in (3, 7):
            layers[f"l.{index}.mla"] = mla(64, 512, Dtype.UINT8)
            layers[f"l.{index}.idx"] = indexer(64, 132, tokens_per_state=4)
            layers[f"l.{index}.tail"] = tail()
        elif index != 8:
            layers[f"l.{index}.state"] = mamba(20000, 64)
    return layers | drafts


DRAFTS = {"d0": sliding(128, 64, 1), "d1": sliding(128, 64, 1)}


def test_states_share_the_bytes_of_mla_pages() -> None:
    made = planned(glm_layers(), 10**7)
    rank = made.ranks[0]
    assert (rank.bytes_per_block, made.num_blocks, rank.region_size_bytes) == (69760, 143, 9975680)
    states = [names for names in groups_of(made) if "state" in names[0]]
    assert states == [[f"l.{i}.state" for i in pair] for pair in ((0, 4), (1, 5), (2, 6))]
    offsets = {tensor.layer_names[0]: tensor.offset_bytes for tensor in rank.tensors}
    assert offsets["l.3.mla"] == offsets["l.0.state"] == offsets["l.2.state"] == 0
    assert offsets["l.7.mla"] == offsets["l.6.state"] == 4685824
    assert (offsets["l.3.idx"], offsets["l.7.idx"], offsets["l.7.tail"]) == (9371648, 9673664, 9673664)


def test_the_drafter_has_a_pool_of_its_own() -> None:
    made = planned(glm_layers(**DRAFTS), 10**7, length=1024, max_num_seqs=8)
    rank = made.ranks[0]
    assert (rank.draft_num_blocks, made.num_blocks, rank.region_size_bytes) == (37, 125, 9932416)
    drafts = [tensor for tensor in rank.tensors if tensor.layer_names[0] in DRAFTS]
    assert [(t.layer_stride_bytes, t.offset_bytes) for t in drafts] == [(606208, 8720000), (606208, 9326208)]
    assert made.max_concurrency == 6.25
    assert [group.kind for group in made.scheduler_groups if group.uses_draft_pool] == ["draft_sliding_window"]


def test_without_a_pool_drafter_pages_are_part_of_the_block() -> None:
    made = planned(glm_layers(**DRAFTS), 10**7, length=1024, max_num_seqs=8, draft_pool=DraftPool(enabled=False))
    rank = made.ranks[0]
    assert (rank.draft_num_blocks, made.num_blocks, rank.region_size_bytes) == (None, 97, 9945216)
    drafts = [tensor for tensor in rank.tensors if tensor.layer_names[0] in DRAFTS]
    assert [tensor.offset_bytes for tensor in drafts] == [6766720, 8355968]


def test_stages_agree_on_blocks_though_one_has_the_drafter() -> None:
    layers = glm_layers(**DRAFTS)
    first = {name: spec for name, spec in layers.items() if name.startswith("l.") and int(name.split(".")[1]) < 4}
    second = {name: spec for name, spec in layers.items() if name not in first}
    settings = config(1024, max_num_seqs=8, pipeline_parallel_size=2, total_hidden_layers=8)
    made = plan(request([(first, 10**7), (second, 10**7)], settings))
    assert [rank.num_blocks for rank in made.ranks] == [251, 251]
    assert [rank.region_size_bytes for rank in made.ranks] == [8754880, 9967296]
    assert made.ranks[0].draft_num_blocks == made.ranks[1].draft_num_blocks
    assert not made.ranks[0].draft_layer_names and made.ranks[1].draft_layer_names == ("d0", "d1")
    # The drafter's pool takes no block ids of the target, whichever stage has its layers.
    one_request = sum(g.max_request_blocks for g in made.scheduler_groups if g.kind != "draft_sliding_window")
    assert made.max_concurrency == 251 / one_request == 12.55


# ------------------------------------------------------------------------------------------------------------- HiSparse


def hisparse_layers() -> Layers:
    layers: dict[str, LayerSpec] = {}
    for index in range(4):
        leads = index in (0, 2)
        layers[f"l{index}"] = mla(64, 576, is_index_group_leader=leads)
        if leads:
            layers[f"i{index}"] = indexer(64, 132)
    return layers | {"f": full(64, 1, 32)}


def hisparse(memory: int, length: int, host_bytes: int, **fields: Any) -> Plan:
    settings = Hisparse(index_topk=512, host_pool_bytes=host_bytes)
    return planned(hisparse_layers(), memory, length, layout=Layout.BLHNC, hisparse=settings, **fields)


def test_rows_lie_in_host_memory_and_indexers_decide_the_device_block() -> None:
    made = hisparse(10**8, 1024, int(0.05 * 2**30))
    rank = made.ranks[0]
    assert (rank.bytes_per_block, made.num_blocks) == (147456, 678)
    assert (rank.host_num_blocks, rank.host_block_stride_bytes) == (182, 294912)
    host = [tensor for tensor in rank.tensors if tensor.host_resident]
    assert [list(t.layer_names) for t in host] == [["l0", "l2"], ["l1", "l3"]]
    assert [(t.layer_stride_bytes, t.block_stride_bytes, t.offset_bytes) for t in host] == [
        (13418496, 73728, 0),
        (13418496, 73728, 26836992),
    ]
    assert {t.size_bytes for t in host} == {53673984}
    hot = [group for group in rank.groups if group.kind == "hisparse_hot"]
    assert [list(g.layer_names) for g in hot] == [
        ["l0.hisparse_hot", "l1.hisparse_hot"],
        ["l2.hisparse_hot", "l3.hisparse_hot"],
    ]
    assert {group.max_request_blocks for group in hot} == {16}
    assert made.max_concurrency == 9.416666666666666
    assert made.capacity_tokens == 9642


@pytest.mark.parametrize(("memory", "host_bytes", "length"), [(10**9, int(0.05 * 2**30), 11648), (10**7, 2**30, 768)])
def test_length_is_fitted_to_host_and_device(memory: int, host_bytes: int, length: int) -> None:
    made = hisparse(memory, 10**6, host_bytes, auto_fit_max_model_len=True)
    assert made.max_model_len_tokens == length
    assert made.max_concurrency is not None and made.max_concurrency >= 1


# ---------------------------------------------------------------------------------------------------------- block sizes

ALIGN = StateCacheMode.ALIGN


@pytest.mark.parametrize(
    ("specs", "fields", "sizes"),
    [
        ([full(32), sliding(128, 48)], {}, (96, 16)),
        ([full(32), sliding(128, 48)], {"needs_hashes": False}, (96, 96)),
        ([full(32), sliding(128, 48)], {"prefix_match_unit_tokens": 8}, (96, 8)),
        ([full(32), mamba(block=64, state_cache_mode=ALIGN)], {}, (64, 32)),
        ([full(32), mamba(block=64)], {}, (64, 64)),
        ([full(32), mamba(block=64, state_cache_mode=ALIGN)], {"context_parallel_size": 2}, (64, 64)),
        ([full(32), tail()], {"prefix_match_unit_tokens": 32}, (32, 32)),
        ([mla(64, tokens_per_state=4), full(64)], {"prefix_match_unit_tokens": 2}, (64, 2)),
    ],
)
def test_grids_of_scheduler_and_hashes(specs: list[LayerSpec], fields: dict[str, Any], sizes: tuple[int, int]) -> None:
    resolved = resolve_block_sizes(specs, cache_block_size_tokens=16, **fields)
    assert (resolved.scheduler_tokens, resolved.hash_tokens) == sizes


@pytest.mark.parametrize(
    ("specs", "unit"),
    [
        ([full(32), sliding(128, 48)], 32),
        ([mla(64, tokens_per_state=48), full(64)], None),
        ([mla(64, tokens_per_state=4), mamba(block=64, state_cache_mode=ALIGN)], 2),
    ],
)
def test_a_unit_that_does_not_divide_is_refused(specs: list[LayerSpec], unit: int | None) -> None:
    with pytest.raises(MatchUnitDoesNotDivide):
        resolve_block_sizes(specs, cache_block_size_tokens=16, prefix_match_unit_tokens=unit)


# --------------------------------------------------------------------------------------------------------------- legacy


def legacy(ranks: Any, length: int = 64) -> Plan:
    return plan(request(ranks, config(length, strategy=Strategy.LEGACY)))


def test_legacy_tensors_are_shared_by_one_layer_of_each_group() -> None:
    made = legacy((TWO_FULL_THREE_SLIDING, 10**7))
    assert made.num_blocks == 610
    assert [list(t.layer_names) for t in made.ranks[0].tensors] == [["a", "c", "d"], ["b", "e"]]
    assert {t.size_bytes for t in made.ranks[0].tensors} == {4997120}


def test_legacy_keeps_a_tensor_per_layer_of_unequal_pages() -> None:
    unequal = {"a": full(), "b": full(heads=1)}
    made = legacy((unequal, 10**8))
    assert made.num_blocks == 8138
    assert [t.size_bytes for t in made.ranks[0].tensors] == [66666496, 33333248]
    stages = legacy([({"a": full()}, 10**7), ({"b": full(heads=1)}, 10**7)])
    assert stages.num_blocks == 813
    assert [rank.tensors[0].size_bytes for rank in stages.ranks] == [6660096, 3330048]


def test_legacy_ranks_keep_their_own_tensor_sizes() -> None:
    made = legacy([({"a": full()}, 10**7), ({"a": full()}, 5 * 10**6)])
    assert [rank.num_blocks for rank in made.ranks] == [610, 610]
    assert [rank.tensors[0].size_bytes for rank in made.ranks] == [9994240, 4997120]


def test_legacy_deals_into_groups_of_the_smaller_size() -> None:
    made = legacy((many(4, full(), "f") | many(5, sliding(), "s"), 10**7))
    assert [len(group) for group in groups_of(made)] == [4, 3, 2]


def test_legacy_refuses_what_it_does_not_know() -> None:
    with pytest.raises(Unsupported, match="legacy strategy"):
        legacy(({"t": tail()}, 10**7))
    with pytest.raises(Unsupported, match="cannot group"):
        legacy(({"a": full(), "b": sliding(heads=4)}, 10**7))


def test_an_mtp_drafter_is_the_group_of_the_last_layer() -> None:
    drafting = Speculation(method="mtp", num_speculative_tokens=1)
    layers = many(4, full(), "f") | many(4, sliding(), "s")
    made = planned(layers, 10**7, speculation=drafting)
    assert [group.is_eagle_group for group in made.ranks[0].groups] == [False, True]


def test_disable_hybrid_promotes_windows_to_full_attention() -> None:
    made = planned({"a": full(), "b": sliding()}, 10**7, disable_hybrid_kv_cache=True)
    assert [(g.kind, g.layer_names) for g in made.ranks[0].groups] == [("full_attention", ("a", "b"))]
    with pytest.raises(InvalidRequest, match="do not become one type"):
        planned({"a": full(), "m": mamba()}, 10**7, disable_hybrid_kv_cache=True)
