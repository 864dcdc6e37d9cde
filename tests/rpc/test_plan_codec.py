"""Plan requests and plans on the wire: every bound names its field, and what goes in comes out."""

from collections.abc import Callable
from typing import Any

import pytest

from kvhold.v1 import plan_pb2 as pb
from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.kinds import KINDS
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.planner.errors import PlanTooLarge
from kvhold_server.planner.plan import plan
from kvhold_server.rpc.plan_codec import (
    DTYPES,
    LAYOUTS,
    REQUEST_KINDS,
    decode_plan_request,
    encode_plan,
    encode_plan_response,
)
from kvhold_server.rpc.spec_codec import KIND_CODECS, decode_layer_spec, encode_layer_spec
from tests.conformance.plan_invariants import broken_invariants
from tests.planner.builders import (
    chunked,
    cross,
    full,
    hidden,
    indexer,
    mamba,
    mla,
    planned,
    ring,
    sliding,
    sliding_mla,
    tail,
)

Change = Callable[[pb.PlanRequest], Any]


def valid() -> pb.PlanRequest:
    """Two ranks with two full layers and one recurrent layer."""
    request = pb.PlanRequest(
        config=pb.PlannerConfig(
            layout=pb.LAYOUT_BLHNC, max_model_len_tokens=256, max_num_batched_tokens=64, enable_prefix_caching=True
        )
    )
    geometry = pb.AttentionGeometry(num_kv_heads=2, head_size_elems=64, dtype=pb.DTYPE_BFLOAT16)
    request.layer_specs.add(block_size_tokens=16, geometry=geometry).full_attention.SetInParent()
    request.layer_specs.add(block_size_tokens=16).mamba.states.add(shape=[100], dtype=pb.DTYPE_FLOAT32)
    rank = request.ranks.add(available_memory_bytes=10**7)
    for name, index in (("a", 0), ("b", 0), ("m", 1)):
        rank.layers.add(layer_name=name, layer_spec_index=index)
    request.ranks.add(available_memory_bytes=10**7, layers_of_rank=0)
    return request


def test_a_valid_request_is_planned_and_encoded() -> None:
    request = valid()
    reply = encode_plan_response(plan(decode_plan_request(request)))
    assert broken_invariants(request, reply) == []
    assert [cost.kind for cost in reply.layer_costs] == ["full_attention", "mamba"]
    assert len(reply.plan.ranks) == 2 and reply.plan.ranks[0] == reply.plan.ranks[1]


def test_equal_ranks_can_be_folded() -> None:
    made = plan(decode_plan_request(valid()))
    folded = encode_plan(made, fold_identical_ranks=True)
    assert folded.ranks[1] == pb.RankPlan(same_as_rank=0)
    assert folded.ranks[0] == encode_plan(made).ranks[0]


def test_every_arm_of_the_oneof_has_a_codec_and_a_kind() -> None:
    arms = {field.name for field in pb.LayerSpec.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert set(KIND_CODECS) == arms == {kind.kind for kind in KINDS}
    assert all(KIND_CODECS[kind.kind].spec is kind for kind in KINDS)
    assert set(REQUEST_KINDS) == {kind.kind for kind in KINDS if not kind.planner_made}
    assert len(LAYOUTS) == 6 and 0 not in DTYPES


@pytest.mark.parametrize(
    "spec",
    [
        full(sliding_window_tokens=8, non_causal=True, page_size_padded_bytes=9000, num_head_slots=3, max_tp_shards=2),
        mla(64, alignment_bytes=576, model_version="deepseek_v4", storage_block_size_tokens=4),
        indexer(tokens_per_state=4, is_index_group_leader=True),
        hidden(),
        sliding(extra_retained_tokens=2),
        sliding_mla(bounded_replay=True, cache_dtype_str="fp8"),
        tail(),
        ring(),
        chunked(),
        cross(),
        mamba(100, num_speculative_blocks=2, prefill_checkpoint_alignment_tokens=8, tp_replicated=True),
    ],
    ids=lambda spec: spec.kind,
)
def test_a_spec_survives_the_wire(spec: Any) -> None:
    message = pb.LayerSpec()
    encode_layer_spec(spec, message)
    again = decode_layer_spec(pb.LayerSpec.FromString(message.SerializeToString()), "spec")
    assert again.page_size_bytes == spec.page_size_bytes
    assert again.merge([spec]) == spec.merge([spec]) or again == spec


def set_config(**values: Any) -> Change:
    def change(request: pb.PlanRequest) -> None:
        for name, value in values.items():
            setattr(request.config, name, value)

    return change


def set_spec(index: int, **values: Any) -> Change:
    def change(request: pb.PlanRequest) -> None:
        for name, value in values.items():
            setattr(request.layer_specs[index], name, value)

    return change


def set_geometry(**values: Any) -> Change:
    def change(request: pb.PlanRequest) -> None:
        for name, value in values.items():
            setattr(request.layer_specs[0].geometry, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.ClearField("config"), "config"),
        (lambda r: r.ClearField("ranks"), "ranks"),
        (set_config(layout=0), "config.layout"),
        (set_config(layout=99), "config.layout"),
        (set_config(strategy=99), "config.strategy"),
        (set_config(max_model_len_tokens=0), "config.max_model_len_tokens"),
        (set_config(max_model_len_tokens=2**31), "config.max_model_len_tokens"),
        (set_config(max_num_batched_tokens=-1), "config.max_num_batched_tokens"),
        (set_config(num_blocks_override=-1), "config.num_blocks_override"),
        (set_config(num_blocks_override=2**31), "config.num_blocks_override"),
        (set_config(prefix_match_unit_tokens=0), "config.prefix_match_unit_tokens"),
        (set_config(pipeline_parallel_size=5000), "config.pipeline_parallel_size"),
        (set_config(model_type="x" * 65), "config.model_type"),
        (lambda r: setattr(r.config.draft_pool, "num_blocks", 0), "config.draft_pool.num_blocks"),
        (lambda r: setattr(r.config.compact, "max_num_groups", 0), "config.compact.max_num_groups"),
        (lambda r: setattr(r.config.compact, "max_num_groups", 65), "config.compact.max_num_groups"),
        (lambda r: setattr(r.config.compact, "max_block_size_tokens", 0), "config.compact.max_block_size_tokens"),
        (lambda r: setattr(r.config.hisparse, "host_pool_bytes", 1), "config.hisparse.index_topk"),
        (set_spec(0, block_size_tokens=0), "layer_specs[0].block_size_tokens"),
        (set_spec(1, block_size_tokens=-5), "layer_specs[1].block_size_tokens"),
        (set_spec(0, block_stride_alignment_bytes=0), "layer_specs[0].block_stride_alignment_bytes"),
        (lambda r: r.layer_specs[0].ClearField("geometry"), "layer_specs[0].geometry"),
        (lambda r: r.layer_specs[1].geometry.SetInParent(), "layer_specs[1].geometry"),
        (lambda r: r.layer_specs[0].ClearField("full_attention"), "layer_specs[0].kind"),
        (lambda r: r.layer_specs[0].hisparse_hot.SetInParent(), "layer_specs[0].kind"),
        (
            lambda r: r.layer_specs[0].sliding_window.SetInParent(),
            "layer_specs[0].sliding_window.sliding_window_tokens",
        ),
        (set_geometry(num_kv_heads=0), "layer_specs[0].geometry.num_kv_heads"),
        (set_geometry(head_size_elems=-1), "layer_specs[0].geometry.head_size_elems"),
        (set_geometry(dtype=0), "layer_specs[0].geometry.dtype"),
        (set_geometry(page_size_padded_bytes=0), "layer_specs[0].geometry.page_size_padded_bytes"),
        (set_geometry(tokens_per_state_den=-1), "layer_specs[0].geometry.tokens_per_state_den"),
        (set_geometry(num_kv_heads=2**31 - 1, head_size_elems=2**31 - 1), "layer_specs[0]"),
        (set_geometry(tokens_per_state_num=17), "layer_specs[0]"),  # no state fits the block
        (lambda r: r.layer_specs[1].mamba.ClearField("states"), "layer_specs[1].mamba.states"),
        (lambda r: r.layer_specs[1].mamba.states[0].ClearField("shape"), "layer_specs[1].mamba.states[0].shape"),
        (lambda r: r.layer_specs[1].mamba.states[0].shape.append(0), "layer_specs[1].mamba.states[0].shape"),
        (lambda r: setattr(r.ranks[0].layers[1], "layer_name", "a"), "ranks[0].layers[1].layer_name"),
        (lambda r: setattr(r.ranks[0].layers[1], "layer_name", ""), "ranks[0].layers[1].layer_name"),
        (lambda r: setattr(r.ranks[0].layers[1], "layer_name", "x" * 513), "ranks[0].layers[1].layer_name"),
        (lambda r: setattr(r.ranks[0].layers[2], "layer_spec_index", 2), "ranks[0].layers[2].layer_spec_index"),
        (lambda r: setattr(r.ranks[0].layers[2], "layer_spec_index", -1), "ranks[0].layers[2].layer_spec_index"),
        (lambda r: setattr(r.ranks[1], "layers_of_rank", 1), "ranks[1].layers_of_rank"),
        (lambda r: r.ranks[1].layers.add(layer_name="x"), "ranks[1].layers"),
    ],
)
def test_bad_input_is_refused_with_its_field(change: Change, field: str) -> None:
    request = valid()
    change(request)
    with pytest.raises(InvalidField) as refusal:
        decode_plan_request(pb.PlanRequest.FromString(request.SerializeToString()))
    assert refusal.value.field == field
    assert refusal.value.constraint


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (ServiceLimits(max_layers=5), "ranks[1].layers"),
        (ServiceLimits(max_ranks=1), "ranks"),
        (ServiceLimits(max_layer_specs=1), "layer_specs"),
    ],
)
def test_bounds_are_those_of_the_daemon(limits: ServiceLimits, field: str) -> None:
    with pytest.raises(InvalidField) as refusal:
        decode_plan_request(valid(), limits)
    assert refusal.value.field == field
    assert str(max(limits.max_layers, 1)) in refusal.value.constraint or "1" in refusal.value.constraint


def test_a_plan_beyond_the_wires_integers_is_refused() -> None:
    huge = {f"l{i}": full(2**20, heads=2**10, size=64) for i in range(2)}
    made = planned(huge, 1, 64, num_blocks_override=2**31 - 1)
    with pytest.raises(PlanTooLarge):
        encode_plan(made)


def test_a_million_layers_are_refused_before_they_are_planned() -> None:
    request = valid()
    del request.ranks[1]
    wide = pb.Rank(available_memory_bytes=1, layers_of_rank=0)
    request.ranks.extend([wide] * 9)
    limits = ServiceLimits(max_layers=29)
    with pytest.raises(InvalidField, match="at most 29 layers"):
        decode_plan_request(request, limits)
