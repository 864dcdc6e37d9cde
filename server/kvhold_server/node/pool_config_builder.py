"""Plan + options → PoolConfig: what the block pool must know of a plan.

A uniform_type group is managed like its first layer (`Plan.scheduler_groups` has it reduced to that). Values that the
caller overrides (cross-checks, simulation) replace the plan's one by one.
"""

from dataclasses import replace

from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.plan import Group, Plan
from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig, resolve_block_sizes
from kvhold_server.node.errors import KindNotPooled
from kvhold_server.node.identity import ContentIdentity, PoolOptions

# Layer kinds whose blocks behave like those of another kind.
SAME_BLOCKS_AS = {
    "hidden_state": GroupKind.MLA,
    "sink_full": GroupKind.SINK_FULL,
    "chunked_local": GroupKind.CHUNKED_LOCAL,
    "draft_sliding_window": GroupKind.SLIDING_WINDOW,
}

RESIDENCY_SAMPLE_EVERY = 64  # blocks: enough for histograms, a small share of the work of handing out

WINDOWS = frozenset({GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA, GroupKind.RSWA, GroupKind.KPOOL_TAIL})
CHUNKS = frozenset({GroupKind.CHUNKED_LOCAL})
STATES = frozenset({GroupKind.MAMBA})


def build_pool_config(plan: Plan | None, options: PoolOptions, content: ContentIdentity) -> PoolConfig:
    """Raises InvalidField, KindNotPooled."""
    overrides = options.overrides
    groups = overrides.groups or tuple(group_config(i, g) for i, g in enumerate(plan.scheduler_groups if plan else ()))
    groups = _with_eagle(groups, options)
    scheduler_block, hash_unit = _block_sizes(plan, groups, options, content)
    num_blocks = overrides.num_blocks or (plan.num_blocks if plan else 0)
    max_model_len = overrides.max_model_len_tokens or (plan.max_model_len_tokens if plan else 0)
    if not num_blocks or not max_model_len:
        missing = "num_blocks" if not num_blocks else "max_model_len_tokens"
        raise InvalidField(f"options.overrides.{missing}", 0, "must be set where there is no plan")
    in_flight = overrides.max_in_flight_tokens or (plan.max_in_flight_tokens if plan else 0)
    return PoolConfig(
        groups=groups,
        num_blocks=num_blocks,
        hash_unit_tokens=hash_unit,
        scheduler_block_tokens=scheduler_block,
        max_model_len=max_model_len,
        max_in_flight_tokens=in_flight or None,
        enable_caching=options.enable_prefix_caching,
        use_eagle=options.eagle_drop,
        num_prefill_lookahead_tokens=options.num_prefill_lookahead_tokens
        or (plan.num_prefill_lookahead_tokens if plan else 0),
        retention_interval_tokens=options.retention_interval_tokens,
        num_retained_boundary_units=overrides.num_retained_boundary_units,
        keep_shared_prefix_checkpoints=options.shared_prefix_checkpoint,
        num_reserved_low_blocks=options.num_reserved_low_blocks,
        needs_zeroing=plan is not None and any(rank.needs_zeroing for rank in plan.ranks),
        residency_sample_every=RESIDENCY_SAMPLE_EVERY,
        report_completed=True,  # event readers and recovery records live on it
    )


def group_config(index: int, group: Group) -> GroupConfig:
    """How blocks of one planned group are used. A spec has the fields that matter for its kind, and no others."""
    kind = SAME_BLOCKS_AS.get(group.kind) or _kind(index, group.kind)
    spec = group.spec

    def of_spec(name: str, kinds: frozenset[GroupKind]) -> int:
        return (getattr(spec, name, 0) or 0) if kind in kinds else 0

    state_mode = getattr(spec, "state_cache_mode", None)
    return GroupConfig(
        kind=kind,
        block_size_tokens=group.block_size_tokens,
        window_tokens=of_spec("sliding_window_tokens", WINDOWS) or of_spec("rswa_window_tokens", WINDOWS),
        extra_retained_tokens=of_spec("extra_retained_tokens", WINDOWS),
        chunk_tokens=of_spec("attention_chunk_size_tokens", CHUNKS),
        mamba_mode=MambaMode(state_mode.value) if state_mode else MambaMode.NONE,
        num_speculative_blocks=of_spec("num_speculative_blocks", STATES),
        num_checkpoint_blocks=of_spec("num_prefill_checkpoint_blocks", STATES),
        checkpoint_alignment_tokens=of_spec("prefill_checkpoint_alignment_tokens", STATES),
        is_eagle=group.is_eagle_group,
    )


def _kind(index: int, name: str) -> GroupKind:
    try:
        return GroupKind(name)
    except ValueError:
        raise KindNotPooled(index, name) from None


def _with_eagle(groups: tuple[GroupConfig, ...], options: PoolOptions) -> tuple[GroupConfig, ...]:
    """Marks the groups that the caller named; none named: as planned."""
    named = set(options.eagle_group_ids)
    if not named:
        return groups
    unknown = [g for g in named if not 0 <= g < len(groups)]
    if unknown:
        raise InvalidField("options.eagle_group_ids", unknown[0], f"must be 0..{len(groups) - 1}")
    return tuple(replace(group, is_eagle=i in named) for i, group in enumerate(groups))


def _block_sizes(
    plan: Plan | None, groups: tuple[GroupConfig, ...], options: PoolOptions, content: ContentIdentity
) -> tuple[int, int]:
    """(scheduler block, hash unit) in tokens: overridden, else the plan's, else what the groups give."""
    overrides = options.overrides
    scheduler_block = overrides.scheduler_block_size_tokens
    hash_unit = overrides.hash_block_size_tokens or content.hash_block_size_tokens
    if plan and not overrides.groups:
        scheduler_block = scheduler_block or plan.scheduler_block_size_tokens or 0
        hash_unit = hash_unit or plan.hash_block_size_tokens or 0
    if scheduler_block and hash_unit:
        return scheduler_block, hash_unit
    if not groups:
        return scheduler_block or 1, hash_unit or 1
    found_block, found_unit = resolve_block_sizes(groups, enable_caching=options.enable_prefix_caching)
    return scheduler_block or found_block, hash_unit or found_unit
