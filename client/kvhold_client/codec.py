"""Generated messages → the client's own values. Steps have their own, quicker codec in `step.py`."""

from dataclasses import replace
from typing import Any

from kvhold.v1 import plan_pb2, pool_pb2, session_pb2
from kvhold_client.enum_words import enum_word
from kvhold_client.explanation_codec import decode_choice, decode_explanation
from kvhold_client.layout import Placement
from kvhold_client.plan import Plan, PlannedGroup, PlannedRank, PlanWarning
from kvhold_client.rank_layout import rank_layout_from_message
from kvhold_client.results import Bound, Capabilities, PrefixStats, SessionInfo
from kvhold_client.shape import NEVER, GroupShape, PoolShape
from kvhold_client.step_reply import decode_counts

__all__ = [
    "decode_capabilities",
    "decode_counts",
    "decode_plan",
    "decode_plan_response",
    "decode_prefix_stats",
    "decode_session_info",
    "decode_shape",
    "enum_word",
]


def decode_capabilities(m: plan_pb2.GetCapabilitiesResponse) -> Capabilities:
    """What the daemon can do."""
    return Capabilities(
        server_version=m.server_version,
        boot_id=m.boot_id,
        layer_kinds=tuple(m.layer_kinds),
        strategies=tuple(enum_word(plan_pb2.Strategy, value, "STRATEGY_") for value in m.strategies),
        layouts=tuple(enum_word(plan_pb2.Layout, value, "LAYOUT_").upper() for value in m.layouts),
        dtypes=tuple(enum_word(plan_pb2.Dtype, value, "DTYPE_") for value in m.dtypes),
        memory_backends=tuple(m.memory_backends),
        hash_algorithms=tuple(m.hash_algorithms),
        bounds=tuple(Bound(name=bound.name, max_value=bound.max_value) for bound in m.bounds),
    )


def decode_plan_response(m: plan_pb2.PlanResponse) -> Plan:
    """The plan, with what it says about itself where that was asked for."""
    return replace(
        decode_plan(m.plan),
        choice=decode_choice(m.choice) if m.HasField("choice") else None,
        explanation=decode_explanation(m.explanation) if m.HasField("explanation") else None,
    )


def decode_plan(m: plan_pb2.Plan) -> Plan:
    """The whole plan; a rank that equals an earlier one repeats its value."""
    return Plan(
        fingerprint=m.fingerprint,
        strategy=enum_word(plan_pb2.Strategy, m.strategy, "STRATEGY_"),
        layout=enum_word(plan_pb2.Layout, m.layout, "LAYOUT_").upper(),
        num_blocks=m.num_blocks,
        max_model_len_tokens=m.max_model_len_tokens,
        capacity_tokens=m.capacity_tokens,
        max_concurrency=m.max_concurrency,
        cache_block_size_tokens=m.cache_block_size_tokens,
        scheduler_block_size_tokens=m.scheduler_block_size_tokens,
        hash_block_size_tokens=m.hash_block_size_tokens,
        max_in_flight_tokens=m.max_in_flight_tokens,
        min_request_blocks=m.min_request_blocks,
        groups=tuple(_group(group, m) for group in m.scheduler_groups),
        ranks=tuple(_rank(m, rank) for rank in range(len(m.ranks))),
        warnings=tuple(
            PlanWarning(
                kind=enum_word(plan_pb2.WarningType, warning.type, "WARNING_TYPE_"),
                message=warning.message,
                args=dict(warning.args),
            )
            for warning in m.warnings
        ),
    )


def _rank(plan: plan_pb2.Plan, rank: int) -> PlannedRank:
    m = plan.ranks[rank]
    while m.HasField("same_as_rank"):
        m = plan.ranks[m.same_as_rank]
    return PlannedRank(
        num_blocks=m.num_blocks,
        bytes_per_block=m.bytes_per_block,
        needed_bytes=m.needed_bytes,
        region_size_bytes=m.region_size_bytes,
        host_region_size_bytes=m.host_region_size_bytes,
        groups=tuple(_group(group, plan) for group in m.groups),
        placements=_placements(plan, rank),
        draft_layer_names=tuple(m.draft_layer_names),
    )


def _placements(plan: plan_pb2.Plan, rank: int) -> tuple[Placement, ...]:
    return rank_layout_from_message(plan, rank).placements


def _group(m: plan_pb2.Group, plan: plan_pb2.Plan) -> PlannedGroup:
    window = _window_of(m, plan)
    return PlannedGroup(
        kind=m.kind,
        layer_names=tuple(m.layer_names),
        block_size_tokens=m.block_size_tokens,
        page_size_bytes=m.page_size_bytes,
        max_request_blocks=m.max_request_blocks,
        max_request_bytes=m.max_request_bytes,
        prefix_cacheable=m.prefix_cacheable,
        is_eagle_group=m.is_eagle_group,
        host_resident=m.host_resident,
        member_kinds=_member_kinds(m, plan),
        **window,
    )


def _member_kinds(m: plan_pb2.Group, plan: plan_pb2.Plan) -> tuple[str, ...]:
    different = dict.fromkeys(m.member_spec_indexes)
    return tuple(dict.fromkeys(plan.layer_specs[index].WhichOneof("kind") or "" for index in different))


def _spec_of(m: plan_pb2.Group, plan: plan_pb2.Plan) -> plan_pb2.LayerSpec | None:
    """The spec that decides which blocks the group keeps."""
    if m.HasField("layer_spec_index"):
        return plan.layer_specs[m.layer_spec_index]
    return plan.layer_specs[m.member_spec_indexes[0]] if m.member_spec_indexes else None


def _window_of(m: plan_pb2.Group, plan: plan_pb2.Plan) -> dict[str, int]:
    """What of the spec decides when blocks leave: only of kinds that do let blocks go."""
    spec = _spec_of(m, plan)
    kind = spec.WhichOneof("kind") if spec is not None else None
    arm: Any = getattr(spec, kind) if kind else None
    if kind in ("sliding_window", "sliding_window_mla", "draft_sliding_window"):
        return {
            "sliding_window_tokens": arm.sliding_window_tokens,
            "extra_retained_tokens": arm.extra_retained_tokens,
        }
    return {"attention_chunk_size_tokens": arm.attention_chunk_size_tokens} if kind == "chunked_local" else {}


def decode_shape(m: pool_pb2.Pool) -> PoolShape:
    """The scheduler's view of a pool: overridden groups if it has them, else the plan's, else (listed) what is told."""
    overrides = m.options.overrides.groups or (() if m.HasField("plan") else m.groups)
    if overrides:
        groups = tuple(
            GroupShape(
                kind=group.kind,
                block_size_tokens=group.block_size_tokens,
                sliding_window_tokens=group.sliding_window_tokens,
                extra_retained_tokens=group.extra_retained_tokens,
                attention_chunk_size_tokens=group.attention_chunk_size_tokens,
            )
            for group in overrides
        )
    else:
        groups = tuple(_group_shape(group, m.plan) for group in m.plan.scheduler_groups)
    return PoolShape(
        groups=groups,
        hash_size_bytes=m.hash_size_bytes,
        hash_block_size_tokens=m.hash_block_size_tokens,
        max_model_len_tokens=m.max_model_len_tokens or NEVER,
    )


def _group_shape(m: plan_pb2.Group, plan: plan_pb2.Plan) -> GroupShape:
    spec = _spec_of(m, plan)
    kind = spec.WhichOneof("kind") if spec is not None else None
    return GroupShape(kind=kind or m.kind, block_size_tokens=m.block_size_tokens, **_window_of(m, plan))


def decode_prefix_stats(m: pool_pb2.PrefixStats) -> PrefixStats:
    """Queried tokens, attributed."""
    return PrefixStats(
        query_tokens=m.query_tokens,
        hit_own_tokens=m.hit_own_tokens,
        hit_shared_tokens=m.hit_shared_tokens,
        miss_never_seen_tokens=m.miss_never_seen_tokens,
        miss_evicted_tokens=m.miss_evicted_tokens,
        miss_rule_tokens=m.miss_rule_tokens,
        miss_other_tokens=m.miss_other_tokens,
        miss_evicted_by_age_tokens=tuple(m.miss_evicted_by_age_tokens),
        miss_evicted_by_growth_tokens=tuple(m.miss_evicted_by_growth_tokens),
        growth_percents=tuple(m.growth_percents),
        num_requests=m.num_requests,
        preempted_query_tokens=m.preempted_query_tokens,
        preempted_hit_tokens=m.preempted_hit_tokens,
    )


def decode_session_info(m: session_pb2.SessionInfo) -> SessionInfo:
    """One session."""
    return SessionInfo(
        short_id=m.short_id,
        pool=m.pool,
        client_name=m.client_name,
        tenant=m.tenant,
        state=enum_word(session_pb2.SessionState, m.state, "SESSION_STATE_"),
        epoch=m.epoch,
        num_sequences=m.num_sequences,
        num_held_blocks=m.num_held_blocks,
        num_quarantined_blocks=m.num_quarantined_blocks,
        last_step=m.last_step,
        completed_step=m.completed_step,
        age_s=m.age.seconds + m.age.nanos / 1e9,
        grace_left_s=m.grace_left.seconds + m.grace_left.nanos / 1e9,
        pid=m.pid,
        quarantine_reason=m.quarantine_reason,
        prefix_stats=decode_prefix_stats(m.prefix_stats),
    )
