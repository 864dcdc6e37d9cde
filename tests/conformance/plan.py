"""Recorded planner inputs as requests, and answers compared with what was recorded.

`to_request(row)` gives the PlanRequest to send, `check(row, answer)` the differences of the reply or refusal. Both
work on the wire's messages, so that it does not matter whether the daemon or the planner in process has answered.

Verdicts: `exact` rows compare every field that counts, `error` rows the gRPC code; for `either` rows a plan must
satisfy the invariants (plan_invariants.py), and any typed refusal will do.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvhold.v1 import plan_pb2 as pb
from tests.conformance.plan_invariants import broken_invariants

Row = dict[str, Any]
Ignored = frozenset[str]

_ARM_OF_KIND = {
    kind: kind
    for kind in (
        "full_attention",
        "mla_attention",
        "hidden_state",
        "rswa",
        "sink_full",
        "sliding_window",
        "sliding_window_mla",
        "kpool_tail",
        "circular_buffer",
        "chunked_local",
        "mamba",
        "cross_attention",
        "encoder_only",
    )
}
_SPEC_FIELDS = {"block_size": "block_size_tokens", "block_stride_alignment": "block_stride_alignment_bytes"}
_GEOMETRY_FIELDS = {
    "num_kv_heads": "num_kv_heads",
    "head_size": "head_size_elems",
    "head_size_v": "head_size_v_elems",
    "page_size_padded": "page_size_padded_bytes",
    "num_head_slots": "num_head_slots",
    "state_content_bytes": "state_content_bytes",
    "kv_quant_mode": "kv_quant_mode",
}
_ARM_FIELDS = {
    "sliding_window": "sliding_window_tokens",
    "attention_chunk_size": "attention_chunk_size_tokens",
    "cache_dtype_str": "cache_dtype_str",
    "alignment": "alignment_bytes",
    "model_version": "model_version",
    "is_index_group_leader": "is_index_group_leader",
    "non_causal_multi_token_decode": "non_causal_multi_token_decode",
    "bounded_replay": "bounded_replay",
    "sink_len": "sink_len_tokens",
    "rswa_window": "rswa_window_tokens",
    "num_speculative_blocks": "num_speculative_blocks",
    "num_prefill_checkpoint_blocks": "num_prefill_checkpoint_blocks",
    "mamba_type": "mamba_type",
}
_ELSEWHERE = {"kind", "dtype", "tokens_per_state", "shapes", "dtypes", "cache_role", "mamba_cache_mode"}
_CONFIG_FIELDS = {
    "max_model_len": "max_model_len_tokens",
    "auto_fit_max_model_len": "auto_fit_max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_num_encoder_input_tokens": "max_num_encoder_input_tokens",
    "async_scheduling": "async_scheduling",
    "use_v2_model_runner": "use_v2_model_runner",
    "block_size": "cache_block_size_tokens",
    "num_gpu_blocks_override": "num_blocks_override",
    "enable_prefix_caching": "enable_prefix_caching",
    "prefix_match_unit": "prefix_match_unit_tokens",
    "kv_connector": "kv_connector_enabled",
    "disable_hybrid_kv_cache_manager": "disable_hybrid_kv_cache",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "decode_context_parallel_size": "decode_context_parallel_size",
    "total_num_hidden_layers": "total_hidden_layers",
    "model_type": "model_type",
}
_WARNING_BEGINNINGS = {
    "Hybrid KV cache manager is disabled": pb.WARNING_TYPE_HYBRID_DISABLED,
    "Add ": pb.WARNING_TYPE_PADDING_LAYERS,
    "KV cache page sizes cannot be unified": pb.WARNING_TYPE_PAGES_NOT_UNIFIABLE,
    "Speculative decoding": pb.WARNING_TYPE_NO_EAGLE_GROUP,
    "HiSparse device_buffer_size": pb.WARNING_TYPE_HISPARSE_BUFFER_ROWS_UNUSED,
}
_ROLES = {
    "default": pb.GROUP_ROLE_DEFAULT,
    "hisparse_source": pb.GROUP_ROLE_HISPARSE_SOURCE,
    "hisparse_indexer": pb.GROUP_ROLE_HISPARSE_INDEXER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back: a reply, or the name of a gRPC code with its text."""

    reply: pb.PlanResponse | None = None
    code: str = ""
    text: str = ""


# ---------------------------------------------------------------------------------------------------------- requests


def to_request(row: Row) -> pb.PlanRequest:
    """The request of a recorded row."""
    recorded = row["input"]
    request = pb.PlanRequest(config=_config(recorded["config"], is_legacy(row)))
    positions = {}
    for spec_id, spec in recorded["layer_specs"].items():
        positions[spec_id] = len(request.layer_specs)
        fill_spec(request.layer_specs.add(), spec)
    for worker in recorded["workers"]:
        rank = request.ranks.add(available_memory_bytes=worker["available_memory_bytes"])
        for name, spec_id in worker["layers"]:
            rank.layers.add(layer_name=name, layer_spec_index=positions[spec_id])
    return request


def is_legacy(row: Row) -> bool:
    """Was it recorded with the old planner?"""
    return bool(row["oracle"].startswith("vllm_0.11"))


def _config(recorded: Row, legacy: bool) -> pb.PlannerConfig:
    config = pb.PlannerConfig(strategy=pb.STRATEGY_LEGACY if legacy else pb.STRATEGY_MODERN)
    for name, field in _CONFIG_FIELDS.items():
        if recorded.get(name) is not None:
            setattr(config, field, recorded[name])
    if "kv_cache_layout" in recorded:
        config.layout = pb.Layout.Value(f"LAYOUT_{recorded['kv_cache_layout']}")
    mode = recorded.get("mamba_cache_mode", "none")
    config.state_cache_mode = pb.StateCacheMode.Value(f"STATE_CACHE_MODE_{mode.upper()}")
    if recorded.get("pp_layer_partition"):
        config.pp_layer_partition.extend(int(part) for part in recorded["pp_layer_partition"].split(","))
    _fill_speculative(config, recorded.get("speculative"))
    _fill_hisparse(config, recorded.get("hisparse"))
    _fill_draft_pool(config, recorded.get("draft_pool"))
    return config


def _fill_speculative(config: pb.PlannerConfig, recorded: Row | None) -> None:
    if recorded is None:
        return
    config.speculative.method = recorded["method"]
    config.speculative.num_speculative_tokens = recorded["num_speculative_tokens"]
    if recorded.get("num_mtp_modules") is not None:
        config.speculative.num_mtp_modules = recorded["num_mtp_modules"]
    config.speculative.disable_eagle_block_drop = bool(recorded.get("disable_eagle_block_drop"))


def _fill_hisparse(config: pb.PlannerConfig, recorded: Row | None) -> None:
    if recorded is None:
        return
    config.hisparse.index_topk = recorded["index_topk"]
    config.hisparse.host_pool_bytes = int(recorded["host_pool_gib"] * 2**30)
    config.hisparse.shared_host_pool = recorded["shared_host_pool"]
    if recorded["device_buffer_size"] is not None:
        config.hisparse.device_buffer_rows = recorded["device_buffer_size"]


def _fill_draft_pool(config: pb.PlannerConfig, recorded: Row | None) -> None:
    if recorded is None:
        return
    if recorded.get("enabled") is not None:
        config.draft_pool.enabled = recorded["enabled"]
    if recorded.get("blocks") is not None:
        config.draft_pool.num_blocks = recorded["blocks"]
    if recorded.get("block_size") is not None:
        config.draft_pool.block_size_tokens = recorded["block_size"]


def fill_spec(message: pb.LayerSpec, spec: Row) -> None:
    """One recorded layer spec. A field that is not known here is an error, lest it be ignored."""
    arm = getattr(message, _ARM_OF_KIND[spec["kind"]])
    arm.SetInParent()
    arm_fields = {field.name for field in arm.DESCRIPTOR.fields}
    for name, value in spec.items():
        if value is None or name in _ELSEWHERE:
            continue
        if name in _SPEC_FIELDS:
            setattr(message, _SPEC_FIELDS[name], value)
        elif name == "page_size_padded" and spec["kind"] == "mamba":
            arm.page_size_padded_bytes = value
        elif name in _GEOMETRY_FIELDS:
            setattr(message.geometry, _GEOMETRY_FIELDS[name], value)
        elif _ARM_FIELDS.get(name) in arm_fields:
            setattr(arm, _ARM_FIELDS[name], value)
        elif name == "head_size_v" or value not in (False, 0):
            raise ValueError(f"{spec['kind']} has a field that is not known here: {name}")
    _fill_irregular(message, arm, spec)


def _fill_irregular(message: pb.LayerSpec, arm: Any, spec: Row) -> None:
    if "dtype" in spec:
        message.geometry.dtype = _dtype(spec["dtype"])
    if "tokens_per_state" in spec:
        ratio = Fraction(spec["tokens_per_state"])
        message.geometry.tokens_per_state_num, message.geometry.tokens_per_state_den = ratio.as_integer_ratio()
    if spec.get("cache_role"):
        arm.cache_role = pb.CacheRole.Value(f"CACHE_ROLE_{spec['cache_role'].upper()}")
    if spec.get("mamba_cache_mode"):
        arm.state_cache_mode = pb.StateCacheMode.Value(f"STATE_CACHE_MODE_{spec['mamba_cache_mode'].upper()}")
    for shape, dtype in zip(spec.get("shapes", ()), spec.get("dtypes", ()), strict=False):
        arm.states.add(shape=shape, dtype=_dtype(dtype))


def _dtype(name: str) -> Any:
    return pb.Dtype.Value(f"DTYPE_{name.upper()}")


# ----------------------------------------------------------------------------------------------------------- answers


def check(row: Row, answer: Answer) -> list[str]:
    """What is wrong with the answer; nothing if it conforms."""
    if row["verdict"] == "error":
        if answer.reply is not None:
            return [f"planned, but {row['expect_code']} was expected"]
        return (
            []
            if answer.code == row["expect_code"]
            else [f"{answer.code} instead of {row['expect_code']}: {answer.text}"]
        )
    if answer.reply is None:
        if row["verdict"] == "exact":
            return [f"refused with {answer.code}: {answer.text}"]
        return [] if answer.code not in ("", "INTERNAL", "UNKNOWN") else [f"{answer.code}: {answer.text}"]
    if row["verdict"] == "either":
        return broken_invariants(to_request(row), answer.reply)
    differences = compare(row, answer.reply)
    if not is_legacy(row):
        differences += [f"invariant: {broken}" for broken in broken_invariants(to_request(row), answer.reply)]
    return differences


def compare(row: Row, reply: pb.PlanResponse) -> list[str]:
    """The fields of an exact row that differ, as `path: ours, recorded`."""
    recorded, plan = row["output"], reply.plan
    found = _Differences(frozenset(row.get("ignore_fields") or ()))
    _compare_costs(found, row, reply)
    if "derived" in recorded:
        found.same(
            "derived.max_in_flight_tokens", plan.max_in_flight_tokens, recorded["derived"]["max_in_flight_tokens"]
        )
        lookahead = recorded["derived"]["num_prefill_lookahead_tokens"]
        found.same("derived.num_prefill_lookahead_tokens", plan.num_prefill_lookahead_tokens, lookahead)
    found.same("max_model_len", plan.max_model_len_tokens, recorded.get("max_model_len"))
    for name, field in (
        ("capacity_tokens", "capacity_tokens"),
        ("max_concurrency", "max_concurrency"),
        ("cache_config_block_size", "cache_block_size_tokens"),
        ("scheduler_block_size", "scheduler_block_size_tokens"),
        ("hash_block_size", "hash_block_size_tokens"),
    ):
        found.same(name, getattr(plan, field) if plan.HasField(field) else None, recorded.get(name))
    _compare_warnings(found, plan, recorded)
    found.same("workers", len(plan.ranks), len(recorded["workers"]))
    for rank, worker in zip(plan.ranks, recorded["workers"], strict=False):
        _compare_rank(found, plan, rank, worker, is_legacy(row))
    scheduler = [
        {
            "kind": group.kind,
            "block_size": group.block_size_tokens,
            "page_size_bytes": group.page_size_bytes,
            "num_layers": len(group.layer_names),
        }
        for group in plan.scheduler_groups
    ]
    found.same("scheduler_groups", scheduler, recorded["scheduler_groups"])
    return found.texts


class _Differences:
    def __init__(self, ignored: Ignored) -> None:
        self.texts: list[str] = []
        self._ignored = ignored

    def same(self, path: str, ours: object, recorded: object) -> None:
        if ours != recorded and path not in self._ignored:
            self.texts.append(f"{path}: {str(ours)[:120]}, recorded {str(recorded)[:120]}")


def _compare_costs(found: _Differences, row: Row, reply: pb.PlanResponse) -> None:
    recorded = list(row["output"].get("layer_costs", {}).items())
    found.same("layer_costs", len(reply.layer_costs), len(recorded))
    for cost, (spec_id, wanted) in zip(reply.layer_costs, recorded, strict=False):
        ours = {
            "kind": cost.kind,
            "page_size_bytes": cost.page_size_bytes,
            "max_memory_usage_bytes": cost.max_request_bytes,
            "max_pages": cost.max_request_blocks,
            "max_blocks_per_req": cost.table_row_blocks,
            "num_states": cost.num_states,
            "prefix_cacheable": cost.prefix_cacheable,
            "unpadded_page_size_bytes": cost.unpadded_page_size_bytes,
        }
        for name, value in wanted.items():
            found.same(f"layer_costs.{spec_id}.{name}", ours[name], value)


def _compare_warnings(found: _Differences, plan: pb.Plan, recorded: Row) -> None:
    wanted = Counter(
        next(kind for beginning, kind in _WARNING_BEGINNINGS.items() if text.startswith(beginning))
        for text in recorded.get("warnings", [])
    )
    ours = Counter(warning.type for warning in plan.warnings if warning.type in _WARNING_BEGINNINGS.values())
    found.same("warnings", dict(ours), dict(wanted))


def _compare_rank(found: _Differences, plan: pb.Plan, rank: pb.RankPlan, worker: Row, legacy: bool) -> None:
    ours: Row = {"num_blocks": rank.num_blocks}
    if not legacy and rank.groups:
        ours |= {
            "pool_bytes_per_block": rank.bytes_per_block,
            "needed_bytes": rank.needed_bytes,
            "needs_kv_cache_zeroing": rank.needs_zeroing,
        }
    for name, field in (
        ("draft_num_blocks", "draft_num_blocks"),
        ("hisparse_host_num_blocks", "host_num_blocks"),
        ("hisparse_host_block_stride", "host_block_stride_bytes"),
    ):
        if rank.HasField(field):
            ours[name] = getattr(rank, field)
    if rank.draft_layer_names:
        ours["draft_layer_names"] = list(rank.draft_layer_names)
    free = {"groups", "tensors", "logged_capacity_tokens"}
    for name in {*ours, *worker} - free:
        found.same(f"workers.{name}", ours.get(name), worker.get(name))
    found.same("workers.tensors", [_tensor(tensor, legacy) for tensor in rank.tensors], worker["tensors"])
    found.same("workers.groups", len(rank.groups), len(worker["groups"]))
    for group, wanted in zip(rank.groups, worker["groups"], strict=False):
        mine = _group(plan, group, legacy)
        for name in {*mine, *wanted} - {"spec_layers"}:
            found.same(f"workers.groups.{name}", mine.get(name), wanted.get(name))


def _tensor(tensor: pb.TensorPlacement, legacy: bool) -> Row:
    if legacy:
        return {"size": tensor.size_bytes, "shared_by": list(tensor.layer_names)}
    ours = {
        "size": tensor.size_bytes,
        "layers": list(tensor.layer_names),
        "layer_stride": tensor.layer_stride_bytes,
        "block_stride": tensor.block_stride_bytes,
        "offset": tensor.offset_bytes,
    }
    return ours | ({"host_resident": True} if tensor.host_resident else {})


def _group(plan: pb.Plan, group: pb.Group, legacy: bool) -> Row:
    ours: Row = {
        "layers": list(group.layer_names),
        "kind": group.kind,
        "block_size": group.block_size_tokens,
        "page_size_bytes": group.page_size_bytes,
        "max_memory_usage_bytes": group.max_request_bytes,
        "max_pages": group.max_request_blocks,
    }
    if not legacy:
        ours |= {
            "is_eagle_group": group.is_eagle_group,
            "host_resident": group.host_resident,
            "enable_kv_transfer": group.enable_kv_transfer,
            "role": next(name for name, role in _ROLES.items() if role == group.role),
            "prefix_cacheable": group.prefix_cacheable,
        }
    if group.kind == "uniform_type":
        ours["layer_page_size_bytes"] = list(group.member_page_size_bytes)
        ours["layer_kinds"] = sorted({_kind(plan.layer_specs[index]) for index in group.member_spec_indexes})
        return ours
    spec = plan.layer_specs[group.layer_spec_index]
    return ours | _spec_fields(spec, legacy)


def _kind(spec: pb.LayerSpec) -> str:
    return spec.WhichOneof("kind") or ""


def _spec_fields(spec: pb.LayerSpec, legacy: bool) -> Row:
    arm = getattr(spec, _kind(spec))
    has = {field.name for field in arm.DESCRIPTOR.fields}
    ours: Row = {}
    for name, field in (
        ("sliding_window", "sliding_window_tokens"),
        ("attention_chunk_size", "attention_chunk_size_tokens"),
    ):
        if field in has and getattr(arm, field):
            ours[name] = getattr(arm, field)
    holder = arm if _kind(spec) == "mamba" else spec.geometry
    if holder.DESCRIPTOR.fields_by_name.get("page_size_padded_bytes") and holder.HasField("page_size_padded_bytes"):
        ours["page_size_padded"] = holder.page_size_padded_bytes
    if "extra_retained_tokens" in has and not legacy:
        ours["extra_retained_tokens"] = arm.extra_retained_tokens
    return ours
