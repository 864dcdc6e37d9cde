"""Random models of all kinds: every plan keeps the invariants, or the refusal is typed.

At least 5000 cases in all. `KVHOLD_PROPERTY_SCALE=20` runs twenty times as many.
"""

import dataclasses
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhold.v1 import plan_pb2 as pb
from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.errors import InternalFault, KvholdError
from kvhold_server.domain.kinds import (
    ChunkedLocalSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullSpec,
    HiddenStateSpec,
    KpoolTailSpec,
    MambaSpec,
    MlaSpec,
    RswaSpec,
    SinkFullSpec,
    SlidingWindowMlaSpec,
    SlidingWindowSpec,
)
from kvhold_server.domain.kinds.mamba import StateArray
from kvhold_server.domain.kinds.mla import CacheRole
from kvhold_server.domain.layer_spec import LayerSpec, Mismatch, StateCacheMode, merge_specs
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import Plan, Strategy
from kvhold_server.planner.agcd import approximate_gcd
from kvhold_server.planner.explain import plan_explained
from kvhold_server.planner.explanation import BlockPool
from kvhold_server.planner.hidden import largest_divisor
from kvhold_server.planner.packed import bucket_layers, num_groups_of
from kvhold_server.planner.plan import plan
from kvhold_server.planner.request import DraftPool, Hisparse, Layer, PlannerConfig, PlanRequest, Rank, Speculation
from kvhold_server.rpc.plan_codec import encode_plan_response
from kvhold_server.rpc.spec_codec import encode_layer_spec
from tests.conformance.plan_invariants import broken_invariants

SCALE = int(os.environ.get("KVHOLD_PROPERTY_SCALE", "1"))


def cases(count: int) -> Any:
    return settings(
        max_examples=count * SCALE,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        derandomize=SCALE == 1,
    )


blocks = st.sampled_from([4, 8, 16, 32, 48, 64, 128])
dtypes = st.sampled_from(list(Dtype))
heads = st.sampled_from([1, 2, 3, 4, 8])
sizes = st.sampled_from([8, 16, 32, 64, 66, 80, 128])
maybe = st.booleans


ODDITIES: list[dict[str, int]] = [
    *[{}] * 8,
    {"block_stride_alignment_bytes": 576},
    {"block_stride_alignment_bytes": 4096},
    {"state_content_bytes": 68},
    {"state_content_bytes": 656},
    {"num_head_slots": 2},
    {"page_size_padded_bytes": 9000},
    {"page_size_padded_bytes": 65536},
    {"page_size_padded_bytes": 1 << 20},
]


@st.composite
def geometries(draw: st.DrawFn, value_size: int | None = None, num_heads: int | None = None) -> dict[str, Any]:
    size = draw(sizes)
    fields: dict[str, Any] = {
        "block_size_tokens": draw(blocks),
        "num_kv_heads": draw(heads) if num_heads is None else num_heads,
        "head_size_elems": size,
        "head_size_v_elems": size if value_size is None else value_size,
        "dtype": draw(dtypes),
    }
    fields |= draw(st.sampled_from(ODDITIES))
    return fields


@st.composite
def layer_specs(draw: st.DrawFn) -> LayerSpec:
    kind = draw(st.sampled_from(BUILDERS))
    return draw(kind)


windows = st.sampled_from([4, 16, 100, 128, 1024])
BUILDERS: list[st.SearchStrategy[LayerSpec]] = [
    st.builds(lambda g: FullSpec(**g), geometries()),
    st.builds(lambda g, w: FullSpec(**g, sliding_window_tokens=w), geometries(), windows),
    st.builds(lambda g, w: SlidingWindowSpec(**g, sliding_window_tokens=w), geometries(), windows),
    st.builds(
        lambda g, a, r, t: MlaSpec(**g, alignment_bytes=a, cache_role=r, tokens_per_state=t),
        geometries(value_size=0, num_heads=1),
        st.sampled_from([None, None, 512, 576]),
        st.sampled_from(list(CacheRole)),
        st.sampled_from([1, 1, 2, 4]),
    ),
    st.builds(
        lambda g, w, a: SlidingWindowMlaSpec(**g, sliding_window_tokens=w, alignment_bytes=a),
        geometries(value_size=0, num_heads=1),
        windows,
        st.sampled_from([None, 576]),
    ),
    st.builds(
        lambda page, block, spec_blocks, padded, mode: MambaSpec(
            block_size_tokens=block,
            states=(StateArray(shape=(page,), dtype=Dtype.FLOAT16), StateArray(shape=(3, 5), dtype=Dtype.FLOAT32)),
            num_speculative_blocks=spec_blocks,
            page_size_padded_bytes=padded,
            state_cache_mode=mode,
        ),
        st.sampled_from([10, 1000, 4096, 20000, 100_000]),
        blocks,
        st.integers(0, 2),
        st.sampled_from([None, None, 65536, 1 << 20]),
        st.sampled_from(list(StateCacheMode)),
    ),
    st.builds(lambda g: ChunkedLocalSpec(**g, attention_chunk_size_tokens=64), geometries()),
    st.builds(lambda g: CircularBufferSpec(**g), geometries()),
    st.builds(lambda g: CrossAttentionSpec(**g), geometries()),
    st.builds(lambda g: KpoolTailSpec(**g, sliding_window_tokens=4), geometries()),
    st.builds(lambda g: HiddenStateSpec(**g), geometries(value_size=0)),
    st.builds(lambda g, w: RswaSpec(**g, rswa_window_tokens=w), geometries(), windows),
    st.builds(lambda g, n: SinkFullSpec(**g, sink_len_tokens=n), geometries(), st.sampled_from([None, 4])),
]


@st.composite
def models(draw: st.DrawFn) -> dict[str, LayerSpec]:
    """Few different specs, as real models have, repeated in runs or in turn."""
    specs = draw(st.lists(layer_specs(), min_size=1, max_size=4))
    if draw(maybe()):  # pages that may be equal
        first = specs[0]
        specs += [dataclasses.replace(first)]
    count = draw(st.integers(1, 14))
    pattern = draw(st.lists(st.integers(0, len(specs) - 1), min_size=1, max_size=count))
    return {f"layers.{index}.x": specs[pattern[index % len(pattern)]] for index in range(count)}


@st.composite
def glm_models(draw: st.DrawFn) -> dict[str, LayerSpec]:
    """Compressed MLA with recurrent layers, and what may come with it."""
    block = draw(st.sampled_from([64, 256]))
    row = {"block_size_tokens": block, "num_kv_heads": 1, "head_size_v_elems": 0}
    rows = MlaSpec(**row, head_size_elems=draw(st.sampled_from([256, 512])), dtype=Dtype.UINT8)
    index = MlaSpec(**row, head_size_elems=132, dtype=Dtype.UINT8, tokens_per_state=4, cache_role=CacheRole.INDEXER)
    state = MambaSpec(
        block_size_tokens=block,
        states=(StateArray(shape=(draw(st.sampled_from([1000, 9000, 40000])),), dtype=Dtype.UINT8),),
    )
    ring = KpoolTailSpec(
        **(row | {"block_size_tokens": 4, "head_size_v_elems": 16}),
        head_size_elems=16,
        dtype=Dtype.BFLOAT16,
        sliding_window_tokens=4,
    )
    layers: dict[str, LayerSpec] = {}
    with_tails = draw(maybe())
    for number in range(draw(st.integers(2, 12))):
        if number % 4 == 3 or number == 1:
            layers |= {f"l.{number}.mla": rows, f"l.{number}.idx": index}
            layers |= {f"l.{number}.tail": ring} if with_tails else {}
        else:
            layers[f"l.{number}.state"] = state
    for number in range(draw(st.integers(0, 2))):
        geometry = row | {"head_size_elems": 64, "head_size_v_elems": 64, "dtype": Dtype.BFLOAT16}
        layers[f"draft.{100 + number}.x"] = draw(
            st.sampled_from([FullSpec(**geometry), SlidingWindowSpec(**geometry, sliding_window_tokens=128)])
        )
    return layers


@st.composite
def hisparse_models(draw: st.DrawFn) -> dict[str, LayerSpec]:
    """MLA rows with an indexer at the head of each run of followers, and perhaps other layers."""
    row = {"block_size_tokens": draw(st.sampled_from([16, 64])), "num_kv_heads": 1, "head_size_v_elems": 0}
    rows = MlaSpec(**row, head_size_elems=576, dtype=Dtype.BFLOAT16)
    index = MlaSpec(**row, head_size_elems=132, dtype=Dtype.UINT8, cache_role=CacheRole.INDEXER)
    layers: dict[str, LayerSpec] = {}
    for number in range(draw(st.integers(1, 8))):
        leads = number % draw(st.integers(1, 3)) == 0
        layers[f"l.{number}.mla"] = dataclasses.replace(rows, is_index_group_leader=leads)
        if leads:
            layers[f"l.{number}.idx"] = index
    return layers | (draw(models()) if draw(maybe()) else {})


@st.composite
def configs(draw: st.DrawFn, strategy: Strategy = Strategy.MODERN) -> PlannerConfig:
    speculation = st.builds(
        Speculation,
        method=st.sampled_from(["mtp", "eagle3", "ngram", "dflash"]),
        num_speculative_tokens=st.integers(1, 4),
        num_mtp_modules=st.integers(1, 3),
        disable_block_drop=maybe(),
    )
    return PlannerConfig(
        strategy=strategy,
        layout=draw(st.sampled_from(list(Layout))),
        max_model_len_tokens=draw(st.sampled_from([1, 17, 64, 1000, 8192, 131072])),
        max_num_batched_tokens=draw(st.sampled_from([1, 64, 2048])),
        auto_fit_max_model_len=draw(maybe()),
        max_num_seqs=draw(st.sampled_from([0, 4, 256])),
        max_num_encoder_input_tokens=draw(st.sampled_from([0, 1500])),
        async_scheduling=draw(maybe()),
        num_blocks_override=draw(st.sampled_from([None] * 9 + [0, 50, 3000])),
        enable_prefix_caching=draw(maybe()),
        prefix_match_unit_tokens=draw(st.sampled_from([None] * 6 + [1, 4, 32])),
        state_cache_mode=draw(st.sampled_from(list(StateCacheMode))),
        disable_hybrid_kv_cache=draw(st.integers(0, 11)) == 0,
        decode_context_parallel_size=draw(st.sampled_from([1] * 9 + [2])),
        speculation=draw(st.one_of(st.none(), st.none(), speculation)),
        draft_pool=DraftPool(enabled=draw(st.integers(0, 3)) > 0),
    )


memories = st.sampled_from([10**10, 10**9, 10**11, 10**8, 10**12, 10**7, 100_000, -1])


@st.composite
def requests(draw: st.DrawFn, strategy: Strategy = Strategy.MODERN) -> PlanRequest:
    settings_ = draw(configs(strategy))
    shape = draw(st.integers(0, 9))
    if shape == 0:
        layers = draw(hisparse_models())
        host = draw(st.sampled_from([1 << 22, 1 << 26, 1 << 32]))
        settings_ = dataclasses.replace(settings_, hisparse=Hisparse(index_topk=64, host_pool_bytes=host))
        settings_ = dataclasses.replace(settings_, layout=draw(st.sampled_from([Layout.BLHNC, Layout.BLNHC])))
    else:
        layers = draw(glm_models() if shape < 4 else models())
    names = list(layers)
    if draw(st.integers(0, 2)) == 0 and len(names) > 1:  # pipeline stages
        cut = draw(st.integers(1, len(names) - 1))
        parts = [names[:cut], names[cut:]]
        settings_ = dataclasses.replace(
            settings_, pipeline_parallel_size=2, total_hidden_layers=draw(st.sampled_from([12, 14, 102]))
        )
    else:
        parts = [names] * draw(st.integers(1, 2))
    ranks = tuple(
        Rank(layers=tuple(Layer(name, layers[name]) for name in part), available_memory_bytes=draw(memories))
        for part in parts
    )
    drafters = draw(st.sets(st.sampled_from(names), max_size=2)) if draw(st.integers(0, 4)) == 4 else ()
    return PlanRequest(
        config=settings_,
        ranks=ranks,
        layer_specs=tuple(dict.fromkeys(layers.values())),
        drafter_layers=frozenset(drafters),
    )


def wire_request(request: PlanRequest) -> pb.PlanRequest:
    """The part of the request that invariants speak of."""
    message = pb.PlanRequest()
    message.config.max_model_len_tokens = request.config.max_model_len_tokens
    if request.config.num_blocks_override is not None:
        message.config.num_blocks_override = request.config.num_blocks_override
    positions = {spec: index for index, spec in enumerate(request.layer_specs)}
    for spec in request.layer_specs:
        encode_layer_spec(spec, message.layer_specs.add())
    for rank in request.ranks:
        wire_rank = message.ranks.add(available_memory_bytes=rank.available_memory_bytes)
        for layer in rank.layers:
            wire_rank.layers.add(layer_name=layer.name, layer_spec_index=positions[layer.spec])
    return message


def planned(request: PlanRequest) -> Plan | None:
    """The plan; None for a typed refusal, which must have a readable text. Anything else fails the test."""
    try:
        return plan(request)
    except KvholdError as refusal:
        assert not isinstance(refusal, InternalFault)
        assert str(refusal) and refusal.reason()
        return None


@pytest.mark.slow
@pytest.mark.timeout(600 * SCALE)
@cases(1700)
@given(requests())
def test_every_plan_keeps_the_invariants(request: PlanRequest) -> None:
    made = planned(request)
    if made is not None:
        assert broken_invariants(wire_request(request), encode_plan_response(made)) == []


@pytest.mark.slow
@pytest.mark.timeout(600 * SCALE)
@cases(700)
@given(requests(Strategy.LEGACY))
def test_every_legacy_plan_keeps_the_invariants(request: PlanRequest) -> None:
    made = planned(request)
    if made is not None:
        assert broken_invariants(wire_request(request), encode_plan_response(made)) == []


@cases(500)
@given(requests(), st.sampled_from([2, 10, 1000]))
def test_more_memory_never_gives_less(request: PlanRequest, factor: int) -> None:
    made = planned(request)
    if made is None:
        return
    richer = dataclasses.replace(
        request,
        ranks=tuple(
            dataclasses.replace(rank, available_memory_bytes=max(rank.available_memory_bytes, 1) * factor)
            for rank in request.ranks
        ),
    )
    more = plan(richer)
    assert more.num_blocks >= made.num_blocks
    assert more.max_model_len_tokens >= made.max_model_len_tokens
    if more.max_model_len_tokens == made.max_model_len_tokens and made.max_concurrency is not None:
        assert more.max_concurrency is not None and more.max_concurrency >= made.max_concurrency


@cases(500)
@given(requests())
def test_a_fitted_length_fits_and_the_next_does_not(request: PlanRequest) -> None:
    asked = dataclasses.replace(request.config, auto_fit_max_model_len=True)
    made = planned(dataclasses.replace(request, config=asked))
    if made is None:
        return

    def fits(length: int) -> bool:
        exact = dataclasses.replace(asked, max_model_len_tokens=length, auto_fit_max_model_len=False)
        return planned(dataclasses.replace(request, config=exact)) is not None

    assert fits(made.max_model_len_tokens)
    if made.max_model_len_tokens < request.config.max_model_len_tokens:
        assert not fits(made.max_model_len_tokens + 1) or request.config.hisparse is not None


@cases(400)
@given(requests())
def test_a_plan_depends_on_its_request_only_and_survives_renaming(request: PlanRequest) -> None:
    made = planned(request)
    if made is None:
        return
    assert plan(request) == made
    renamed = dataclasses.replace(
        request,
        ranks=tuple(
            dataclasses.replace(rank, layers=tuple(Layer(layer.name + "y", layer.spec) for layer in rank.layers))
            for rank in request.ranks
        ),
        drafter_layers=frozenset(name + "y" for name in request.drafter_layers),
    )
    again = plan(renamed)
    assert again.num_blocks == made.num_blocks
    assert [t.offset_bytes for t in again.ranks[0].tensors] == [t.offset_bytes for t in made.ranks[0].tensors]
    assert again.fingerprint != made.fingerprint


@cases(300)
@given(requests())
def test_another_rank_never_adds_blocks(request: PlanRequest) -> None:
    if request.config.pipeline_parallel_size > 1:
        return
    alone = planned(dataclasses.replace(request, ranks=request.ranks[:1]))
    both = planned(request)
    if alone is not None and both is not None:
        assert both.num_blocks <= alone.num_blocks


@cases(300)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 70))
def test_the_group_size_pads_least(values: list[int], lower: int) -> None:
    found = approximate_gcd(values, lower)
    if max(1, lower) > max(values):
        assert found == max(1, lower)
        return
    candidates = range(max(1, lower), max(values) + 1)
    padding = {size: sum(-value % size for value in values) for size in candidates}
    least = min(padding.values())
    assert found == max(size for size, cost in padding.items() if cost == least)


@cases(300)
@given(st.lists(layer_specs(), min_size=1, max_size=3))
def test_merging_is_settled_after_once(specs: list[LayerSpec]) -> None:
    merged = merge_specs(specs)
    if isinstance(merged, Mismatch):
        return
    assert merge_specs([merged]) == merged
    assert merged.page_size_bytes == specs[0].page_size_bytes


@cases(200)
@given(models())
def test_packed_buckets_lose_no_layer_and_have_no_empty_group(layers: dict[str, LayerSpec]) -> None:
    buckets = bucket_layers(layers)  # type: ignore[arg-type]
    for bucket, count in zip(buckets, num_groups_of(buckets), strict=True):
        dealt = bucket.deal(count)
        assert sorted(name for hand in dealt for name in hand) == sorted(bucket.names)
        assert all(dealt)
    assert sum(len(bucket.names) for bucket in buckets) == len(layers)


@cases(100)
@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_the_largest_divisor_below_a_limit(number: int, limit: int) -> None:
    found = largest_divisor(number, limit)
    assert number % found == 0 and found <= limit
    assert not any(number % other == 0 for other in range(found + 1, min(limit, number) + 1))


@cases(150)
@given(requests(), st.sampled_from(list(Strategy)))
def test_every_byte_of_a_request_has_a_kind_or_a_cause(request: PlanRequest, strategy: Strategy) -> None:
    asked = dataclasses.replace(request, config=dataclasses.replace(request.config, strategy=strategy))
    try:
        made = plan_explained(asked)
    except KvholdError as refusal:
        assert not isinstance(refusal, InternalFault)
        return
    for rank in made.explanation.ranks:
        held = sum(share.request_bytes for share in rank.kinds if share.pool is BlockPool.DEVICE)
        causes = (*rank.request_waste, *rank.memory_waste)
        assert held + sum(waste.size_bytes for waste in rank.request_waste) == rank.request_bytes
        assert all(waste.size_bytes > 0 for waste in causes)
