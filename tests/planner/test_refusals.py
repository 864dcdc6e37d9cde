"""What cannot be planned is refused by name, and what the originals lose or misplace is planned right."""

import dataclasses
from typing import Any

import pytest

from kvhold_server.domain.errors import Exhausted, InvalidRequest, KvholdError, PreconditionFailed, Unsupported
from kvhold_server.domain.kinds import EncoderOnlySpec
from kvhold_server.domain.kinds.attention import geometry_of
from kvhold_server.domain.layer_spec import LayerSpec
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import Strategy, WarningType
from kvhold_server.planner import errors
from kvhold_server.planner.plan import plan
from kvhold_server.planner.request import DraftPool, Hisparse
from tests.planner.builders import (
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
from tests.planner.test_golden import DRAFTS, glm_layers, hisparse_layers

GIB = 2**30


def refusal(layers: dict[str, LayerSpec], memory: int = GIB, length: int = 64, **fields: Any) -> KvholdError:
    with pytest.raises(KvholdError) as raised:
        planned(layers, memory, length, **fields)
    assert "\n" not in str(raised.value)
    return raised.value


# -------------------------------------------------------------------------------------------- planned where others fail


def test_layers_of_unbalanced_pages_are_all_dealt() -> None:
    """8 full + 12 and 2 windows of two page sizes: the original keeps 4 of the 14 and then fails."""
    layers = many(8, full(), "f") | many(12, sliding(), "a") | many(2, sliding(heads=4), "b")
    made = planned(layers, GIB, layout=Layout.BLHNC)
    assert sorted(name for group in groups_of(made) for name in group) == sorted(layers)


def test_no_group_is_empty_however_narrow_the_anchor() -> None:
    """One small full layer beside windows of mixed pages 4:1: the original makes more groups than there are rows."""
    layers = {"f": full(heads=1)} | many(4, sliding(), "a") | {"b": sliding(heads=4)}
    made = planned(layers, GIB, layout=Layout.BLHNC)
    assert all(groups_of(made))
    assert sorted(name for group in groups_of(made) for name in group) == sorted(layers)


@pytest.mark.parametrize("order", [("small", "large"), ("large", "small")])
def test_latent_windows_of_unequal_pages_keep_their_own_page(order: tuple[str, str]) -> None:
    specs = {"small": sliding_mla(size=32), "large": sliding_mla(size=576)}
    made = planned({name: specs[name] for name in order}, GIB)
    pages = {t.layer_names[0]: t.page_size_bytes for t in made.ranks[0].tensors}
    assert pages == {"small": 4096, "large": 73728}


def test_a_stage_has_tensors_of_its_own_layers_only() -> None:
    """Layers of a uniform group that are all on the other stage: the original places them here, too, out of bounds."""
    layers = {"m0": mamba(20000), "m1": mamba(20000, mamba_type="x"), "f": full()}
    ranks = [({"f": layers["f"]}, 409600), ({"m0": layers["m0"], "m1": layers["m1"]}, 4096000)]
    made = plan(request(ranks, config(64, layout=Layout.BLHNC, pipeline_parallel_size=2)))
    assert [name for tensor in made.ranks[0].tensors for name in tensor.layer_names] == ["f"]
    assert max(tensor.end_bytes for tensor in made.ranks[0].tensors) <= made.ranks[0].region_size_bytes


def test_promotion_of_a_replayed_latent_window_drops_the_replay() -> None:
    layers = {"m": mla(64, 512), "s": sliding_mla(bounded_replay=True)}
    made = planned(layers, GIB, disable_hybrid_kv_cache=True)
    assert len(made.ranks[0].groups) == 1


def test_explicit_padding_grows_with_the_block() -> None:
    layers = {"a": full(heads=1, page_size_padded_bytes=4608), "b": sliding(heads=2, page_size_padded_bytes=9216)}
    made = planned(layers, GIB)
    assert {group.page_size_bytes for group in made.ranks[0].groups} == {9216}


def test_states_grow_by_padding_where_hidden_states_enlarge_the_page() -> None:
    layers = {"f": full(heads=1, size=8), "m": mamba(512), "h": hidden(size=700)}
    made = planned(layers, GIB)
    assert {group.page_size_bytes for group in made.ranks[0].groups} == {1536}


def test_a_drafter_without_a_window_keeps_whole_requests_in_its_pool() -> None:
    layers = glm_layers(d0=full(64, 1))
    short = planned(layers, 10**8, 64, max_num_seqs=2).ranks[0].draft_num_blocks
    long = planned(layers, 10**8, 1024, max_num_seqs=2).ranks[0].draft_num_blocks
    assert (short, long) == (2 * 3 + 4 + 1, 2 * (16 + 2) + 4 + 1)


def test_an_override_comes_on_top_of_the_drafters_pool() -> None:
    """The original charges the pool against the blocks asked for and refuses lengths that fit."""
    made = planned(glm_layers(**DRAFTS), 10**8, 512, max_num_seqs=8, num_blocks_override=21)
    rank = made.ranks[0]
    assert made.num_blocks == 21
    assert rank.region_size_bytes == 21 * rank.bytes_per_block + (rank.draft_num_blocks or 0) * 32768


def test_mixtures_that_merely_resemble_the_aliasing_model_are_planned_as_usual() -> None:
    """Recurrent, compressed and plain layers that do not fit its shape: the original fails on a bare assertion."""
    layers = {"m": mamba(9000, 64), "c": mla(64, 512, tokens_per_state=4), "a": mla(64, 512), "b": mla(64, 64)}
    made = planned(layers, GIB, layout=Layout.BLHNC)
    assert sorted(name for group in groups_of(made) for name in group) == sorted(layers)


def test_a_stage_without_the_aliasing_shape_is_named() -> None:
    layers = glm_layers()
    first = {n: s for n, s in layers.items() if int(n.split(".")[1]) < 4 and "idx" not in n and "tail" not in n}
    second = {n: s for n, s in layers.items() if n not in first}
    settings = config(64, pipeline_parallel_size=2, total_hidden_layers=8)
    made = plan(request([(first, GIB), (second, GIB)], config(64, layout=Layout.BLNHC, **_pp(settings))))
    assert [w.type for w in made.warnings] == [WarningType.GLM_LAYOUT_NOT_USED]


def _pp(settings: Any) -> dict[str, Any]:
    return {
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "total_hidden_layers": settings.total_hidden_layers,
    }


# ------------------------------------------------------------------------------------------------------ refused by name


def test_layers_without_a_cache_are_refused_by_name() -> None:
    found = refusal({"enc": geometry_of(full(), EncoderOnlySpec)})
    assert isinstance(found, InvalidRequest) and isinstance(found, errors.KindNotPlannable)
    assert found.layer_name == "enc"


def test_two_windows_on_full_layers_are_refused() -> None:
    found = refusal({"a": full(sliding_window_tokens=8), "b": full(sliding_window_tokens=16)})
    assert isinstance(found, errors.ConflictingWindows)
    assert (found.first, found.second) == (8, 16)


def test_a_rank_without_layers_is_refused() -> None:
    with pytest.raises(errors.RankWithoutLayers, match="rank 1 has no layers"):
        plan(request([({"a": full()}, GIB), ({}, GIB)], config()))
    with pytest.raises(errors.RankWithoutLayers, match="rank 1 has no layers"):
        plan(request([({"a": full()}, GIB), ({}, GIB)], config(strategy=Strategy.LEGACY)))


def test_a_layer_with_two_specs_is_refused_with_the_field() -> None:
    with pytest.raises(errors.LayerSpecMismatch) as raised:
        plan(request([({"a": full()}, GIB), ({"a": full(heads=4)}, GIB)], config()))
    found = raised.value
    assert (found.layer_name, found.rank, found.field) == ("a", 1, "num_kv_heads")
    assert (found.value, found.first_value) == (4, 2)


def test_pages_that_neither_divide_nor_pad_are_refused_where_no_fallback_exists() -> None:
    found = refusal({"m": mla(block=16, size=100), "f": full(), "s": mamba(20000)})
    assert isinstance(found, Unsupported) and isinstance(found, errors.PageNotUnifiable)
    assert (found.layer_name, found.largest_page_bytes) == ("m", 20000)


def test_a_block_that_cannot_be_multiplied_is_refused() -> None:
    found = refusal({"a": full(6, heads=1, tokens_per_state=4), "b": sliding(12, 6, heads=12), "s": mamba(100)})
    assert isinstance(found, PreconditionFailed) and isinstance(found, errors.PageDoesNotScale)


def test_groups_whose_blocks_would_overlap_are_refused() -> None:
    """Equal pages of different heads: block 1 of one group lies on block 2 of the other."""
    found = refusal({"a": full(heads=2, size=64), "b": sliding(heads=4, size=32)}, layout=Layout.LHBNC)
    assert isinstance(found, InvalidRequest) and isinstance(found, errors.LayoutMixesStrides)
    assert {found.block_stride_bytes, found.other_block_stride_bytes} == {4096, 2048}


def test_hidden_states_alone_in_two_block_sizes_are_refused() -> None:
    found = refusal({"a": hidden(16), "b": hidden(32)})
    assert isinstance(found, errors.NoGroupForHiddenStates)


def test_a_state_larger_than_the_page_it_should_share_is_refused() -> None:
    found = refusal(glm_layers() | {f"l.{i}.state": mamba(40000, 64) for i in range(8) if i not in (3, 7)})
    assert (type(found).__name__, found.reason()) == ("StatePageTooLarge", "STATE_PAGE_TOO_LARGE")


@pytest.mark.parametrize("tokens", [0, 100, 128])
def test_a_drafters_block_must_divide_the_targets(tokens: int) -> None:
    found = refusal(glm_layers(**DRAFTS), draft_pool=DraftPool(block_size_tokens=tokens))
    assert type(found).__name__ == "DraftBlockSizeInvalid"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (Hisparse(index_topk=512, host_pool_bytes=10), "host_pool_bytes"),
        (Hisparse(index_topk=512, host_pool_bytes=GIB, device_buffer_rows=100), "device_buffer_rows"),
        (Hisparse(index_topk=40000, host_pool_bytes=GIB), "device_buffer_rows"),
    ],
)
def test_host_resident_settings_are_refused_by_field(settings: Hisparse, word: str) -> None:
    found = refusal(dict(hisparse_layers()), layout=Layout.BLHNC, hisparse=settings)
    assert isinstance(found, errors.HisparseInvalid) and found.field == word


def test_host_resident_rows_need_mla_layers() -> None:
    settings = Hisparse(index_topk=512, host_pool_bytes=GIB)
    found = refusal({"a": full()}, layout=Layout.BLHNC, hisparse=settings)
    assert isinstance(found, errors.HisparseInvalid)


def test_a_host_pool_below_one_request_is_refused_as_a_shortage() -> None:
    settings = Hisparse(index_topk=512, host_pool_bytes=10 * 294912)
    found = refusal(dict(hisparse_layers()), length=64 * 11, layout=Layout.BLHNC, hisparse=settings)
    assert isinstance(found, Exhausted) and isinstance(found, errors.HostPoolTooSmall)
    assert (found.host_num_blocks, found.needed_host_blocks) == (10, 11)


def test_unequal_host_resident_stages_share_the_smaller_pool() -> None:
    """Wider rows on one stage give it fewer host blocks: both plan with those."""
    wide, narrow = mla(64, 576, is_index_group_leader=True), mla(64, 512, is_index_group_leader=True)
    stages = [({"l0": wide, "i0": indexer()}, 10**8), ({"l1": narrow, "i1": indexer()}, 10**8)]
    hisparse = Hisparse(index_topk=512, host_pool_bytes=2**22)
    made = plan(request(stages, config(64, layout=Layout.BLHNC, hisparse=hisparse, pipeline_parallel_size=2)))
    assert [rank.host_num_blocks for rank in made.ranks] == [2**22 // wide.page_size_bytes] * 2
    assert len({rank.num_blocks for rank in made.ranks}) == 1


def test_nothing_but_cross_attention_without_an_encoder_has_no_concurrency() -> None:
    made = planned({"c": cross()}, GIB)
    assert made.max_concurrency is None and made.capacity_tokens is None


def test_a_model_without_a_cache_is_one_block_of_nothing() -> None:
    made = planned({}, 0)
    assert (made.num_blocks, made.ranks[0].region_size_bytes, made.max_concurrency) == (1, 0, None)


def test_every_refusal_formats_its_fields() -> None:
    """A template with a field that does not exist would fail only when somebody needs the message."""
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, KvholdError) and error.template:
            values = {field.name: 7 for field in dataclasses.fields(error)}
            assert str(error(**values))


def test_inputs_are_not_changed() -> None:
    layers = many(4, full(), "f") | many(5, sliding(heads=4), "s") | {"h": hidden()}
    asked = request((layers, GIB), config(disable_hybrid_kv_cache=False, auto_fit_max_model_len=True))
    before = repr(asked)
    plan(asked)
    with pytest.raises(KvholdError):
        planned(layers, 0)
    assert repr(asked) == before


def test_host_resident_stages_must_have_the_same_pattern_of_rows() -> None:
    """Their rows would pack into different groups, so that one block table could not serve both."""
    layers = dict(hisparse_layers())
    first = {"l0": layers["l0"], "i0": layers["i0"], "f": layers["f"]}
    second = {name: spec for name, spec in layers.items() if name not in first}
    second |= {"l4": layers["l2"], "i4": layers["i2"], "l5": layers["l2"], "i5": layers["i2"]}
    hisparse = Hisparse(index_topk=512, host_pool_bytes=GIB)
    settings = config(64, layout=Layout.BLHNC, hisparse=hisparse, pipeline_parallel_size=2)
    with pytest.raises(errors.GroupsDisagree, match="rank 1: its rows form"):
        plan(request([(first, 10**8), (second, 10**8)], settings))
