"""Blocks, pages, equality, uniformity and merging of the layer-spec kinds. Golden numbers are those of the original."""

from fractions import Fraction

import pytest

from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.kinds import KINDS, RswaSpec, SinkFullSpec
from kvhold_server.domain.kinds.attention import geometry_of
from kvhold_server.domain.kinds.errors import PaddedPageTooSmall, UnknownModelVersion, WindowNotContextParallel
from kvhold_server.domain.layer_spec import LayerSpec, Limits, Mismatch, StateCacheMode, merge_specs
from tests.planner.builders import (
    chunked,
    cross,
    full,
    hidden,
    indexer,
    mamba,
    mla,
    ring,
    sliding,
    sliding_mla,
    tail,
)

LIMITS = Limits(
    max_model_len_tokens=1000,
    max_in_flight_tokens=256,
    max_num_encoder_input_tokens=1500,
    state_cache_mode=StateCacheMode.ALIGN,
)


def rswa(window: int = 64) -> RswaSpec:
    return geometry_of(full(), RswaSpec, rswa_window_tokens=window)


def sink(length: int | None = None, **fields: int) -> SinkFullSpec:
    return geometry_of(full(**fields), SinkFullSpec, sink_len_tokens=length)


def merged(*specs: LayerSpec) -> LayerSpec:
    answer = merge_specs(specs)
    assert isinstance(answer, LayerSpec), answer
    return answer


def mismatch(*specs: LayerSpec) -> Mismatch:
    answer = merge_specs(specs)
    assert isinstance(answer, Mismatch), answer
    return answer


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        (full(), 63),
        (sliding(), 25),
        (sliding_mla(), 7),
        (tail(), 1),
        (ring(), 1),
        (mamba(), 2),
        (chunked(), 20),
        (cross(), 94),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_most_blocks_of_a_request_of_1000_tokens(spec: LayerSpec, blocks: int) -> None:
    assert spec.max_request_blocks(LIMITS) == blocks


@pytest.mark.parametrize(("length", "extra", "blocks"), [(10**6, 0, 25), (10**6, 3, 26), (100, 0, 8)])
def test_a_window_is_bounded_by_length_and_grows_with_retained_tokens(length: int, extra: int, blocks: int) -> None:
    spec = sliding(extra_retained_tokens=extra)
    assert spec.max_request_blocks(LIMITS.with_len(length)) == blocks


def test_plan_20_a_window_longer_than_the_request_reserves_the_request() -> None:
    """PLAN-20: window 1024, batch 2048, but only 128 tokens: 8 blocks and one for a straddled edge."""
    limits = Limits(max_model_len_tokens=128, max_in_flight_tokens=2048)
    assert sliding(1024).max_request_blocks(limits) == 9


@pytest.mark.parametrize(
    ("mode", "blocks", "row"),
    [(StateCacheMode.NONE, 1, 4), (StateCacheMode.ALIGN, 2, 66), (StateCacheMode.ALL, 63, 66)],
)
def test_states_per_request_follow_the_engines_mode(mode: StateCacheMode, blocks: int, row: int) -> None:
    limits = Limits(max_model_len_tokens=1000, max_in_flight_tokens=256, state_cache_mode=mode)
    assert mamba().max_request_blocks(limits) == blocks
    assert mamba(num_speculative_blocks=3).table_row_blocks(limits, 1000) == row


def test_context_parallel_ranks_share_tokens() -> None:
    limits = Limits(max_model_len_tokens=1000, max_in_flight_tokens=256, decode_context_parallel_size=3)
    assert full().max_request_blocks(limits) == 21
    assert full().table_row_blocks(limits, 1000) == 21
    assert full(dcp_sharded=False).max_request_blocks(limits) == 63
    with pytest.raises(WindowNotContextParallel, match=r"layer l0: a sliding_window layer .*_size 3:"):
        sliding().check("l0", limits)
    sliding(dcp_sharded=False).check("l0", limits)


def test_fractions_of_a_token_per_state_multiply_states() -> None:
    spec = full(tokens_per_state=Fraction(1, 4))
    assert (spec.num_states, spec.page_size_bytes) == (64, 32768)
    assert full(tokens_per_state=3).num_states == 5  # the tail of the block is lost


def test_alignment_pads_a_page_anew_after_scaling() -> None:
    """A page that is aligned by chance after scaling keeps no stale padding."""
    spec = mla(block=2, size=100, dtype=Dtype.UINT8, alignment_bytes=300)
    assert (spec.unpadded_page_size_bytes, spec.page_size_bytes) == (200, 300)
    assert spec.scaled(3).page_size_bytes == 600


def test_padding_smaller_than_the_page_is_refused_with_the_layers_name() -> None:
    with pytest.raises(PaddedPageTooSmall, match=r"layer l7: page_size_padded_bytes 8000 .* 8192 bytes"):
        full(page_size_padded_bytes=8000).check("l7", LIMITS)
    with pytest.raises(PaddedPageTooSmall):
        mamba(page=100, page_size_padded_bytes=99).check("l7", LIMITS)
    with pytest.raises(UnknownModelVersion):
        sliding_mla(model_version="x").check("l7", LIMITS)


def test_plan_13_indexer_rows_follow_their_storage_format() -> None:
    """PLAN-13: 128 values of 4 bits and a scale byte per 32: 68 bytes a row, not 132."""
    four_bit = indexer(block=64, size=128, state_content_bytes=128 // 2 + 128 // 32)
    assert four_bit.content_size_bytes == 68
    assert four_bit.page_size_bytes == 4352
    assert indexer(block=64, size=132).content_size_bytes == 132


def test_plan_23_few_heads_are_replicated_not_multiplied() -> None:
    """PLAN-23: 2 heads over 4 ranks: one head per rank, 512 bytes per token and layer."""
    per_rank = full(block=16, heads=max(1, 2 // 4), size=128)
    assert per_rank.page_size_bytes // per_rank.block_size_tokens == 512


# ------------------------------------------------------------------------------------------------ equality, uniformity


def test_equality_tells_unset_from_zero_and_types_of_equal_size_apart() -> None:
    assert full() == full() and hash(full()) == hash(full())
    assert full(tokens_per_state=1) == full(tokens_per_state=Fraction(1, 1))
    assert full(page_size_padded_bytes=8192) != full()
    assert mamba(page_size_padded_bytes=8192) != mamba()
    assert full() != sliding()


@pytest.mark.parametrize(
    ("first", "other", "uniform"),
    [
        (full(), full(heads=8), True),
        (full(), mla(block=16), True),
        (full(), sliding(), False),
        (sliding(128), sliding(256), False),
        (sliding(4), tail(), True),
        (tail(), sliding(4), False),  # not symmetric
        (tail(window=4), tail(window=8), True),
        (sliding(128), sliding_mla(128), True),
        (sliding_mla(128), sliding(128), False),
        (sliding_mla(), sliding_mla(bounded_replay=True), False),
        (chunked(64), chunked(64, heads=4), True),
        (chunked(64), chunked(32), False),
        (mamba(100), mamba(100, mamba_type="x"), True),
        (mamba(100), mamba(200), False),
        (mamba(100), mamba(100, num_speculative_blocks=1), False),
        (cross(), full(), False),
        (ring(), ring(heads=4), True),
    ],
)
def test_uniformity_follows_the_first_layers_rule(first: LayerSpec, other: LayerSpec, uniform: bool) -> None:
    assert first.uniform_with(other) is uniform


# -------------------------------------------------------------------------------------------------------------- merging


def test_full_layers_adopt_the_one_window_that_is_set() -> None:
    assert merged(full(), full(sliding_window_tokens=128), full()) == full(sliding_window_tokens=128)
    assert merged(full(), full(non_causal=True)) == full(non_causal=True)


def test_two_windows_are_a_conflict_even_where_geometry_differs_too() -> None:
    found = mismatch(full(sliding_window_tokens=128), full(heads=4, sliding_window_tokens=64))
    assert found.conflict and found.field == "sliding_window_tokens"


def test_window_beside_chunk_is_a_mere_mismatch() -> None:
    found = mismatch(full(sliding_window_tokens=128), full(attention_chunk_size_tokens=64))
    assert not found.conflict


def test_merging_depends_on_the_first_kind() -> None:
    assert merged(full(), rswa()) == full()
    assert mismatch(rswa(), full()).field == "kind"
    assert merged(full(), sink(4)) == full()
    assert merged(sink(4), full()) == sink(4)
    assert merged(sink(4), sink(8)) == sink(4)
    assert mismatch(sink(tokens_per_state=2), sink(tokens_per_state=2)).field == "tokens_per_state"
    assert mismatch(rswa(64), rswa(32)).field == "rswa_window_tokens"
    assert mismatch(full(), mla(block=16)).field == "kind"


def test_mla_merges_rows_of_one_meaning_and_never_with_a_value_size() -> None:
    leader = mla(is_index_group_leader=True)
    assert mismatch(mla(), leader).field == "is_index_group_leader"
    assert mismatch(mla(block=64, size=132), indexer()).field in ("dtype", "cache_role")
    assert merged(mla(), hidden(block=64, size=576)) == mla()
    odd = geometry_of(mla(), type(mla()), head_size_v_elems=64)
    assert mismatch(odd).field == "head_size_v_elems"


def test_merged_mla_keeps_the_aligned_page() -> None:
    aligned = mla(size=100, alignment_bytes=576)
    assert merged(aligned, aligned).page_size_bytes == aligned.page_size_bytes == 13248


def test_sliding_mla_of_unequal_pages_does_not_merge() -> None:
    """The original merges them into the first's page, so that the larger pages overlap."""
    assert mismatch(sliding_mla(size=32), sliding_mla(size=512)).field == "head_size_elems"


def test_other_kinds_merge_only_with_their_equals() -> None:
    assert merged(sliding(), sliding()) == sliding()
    assert mismatch(sliding(128), sliding(64)) == Mismatch(field="sliding_window_tokens", first=128, second=64)
    assert mismatch(mamba(100), mamba(200)).field == "states"
    assert mismatch(sliding(), chunked()).field == "kind"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_each_kind_says_what_it_is(kind: type[LayerSpec]) -> None:
    assert kind.kind and kind.__doc__
    assert isinstance(kind.planner_made, bool) and isinstance(kind.plannable, bool)
