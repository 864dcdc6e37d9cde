"""The modern planner: group → project on ranks → fit → place → report.

    specs of all ranks ──merge──▶ one model ──group──▶ groups ──project──▶ each rank's groups ──▶ arrangement
    arrangement + memory ──fit──▶ length, blocks ──minimum over ranks──▶ place ──▶ RankPlan ──▶ Plan

`complete_plan` is everything behind grouping; other strategies bring their own groups.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kvhold_server.domain.fingerprint import fingerprint_of
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import LayerSpec, Limits, first_mismatch
from kvhold_server.domain.plan import Group, LayerCost, Plan, PlanWarning, RankPlan, WarningType
from kvhold_server.planner.arrangement import Arrangement, GenericArrangement, Placed
from kvhold_server.planner.arrangement_glm import GlmArrangement, GlmParts, recognise
from kvhold_server.planner.arrangement_hisparse import HisparseArrangement
from kvhold_server.planner.block_sizes import resolve_block_sizes
from kvhold_server.planner.capacity import (
    RankBudget,
    check_any_memory,
    check_one_request,
    distinct_budgets,
    fit_length,
)
from kvhold_server.planner.errors import (
    BlocksTooFew,
    HostPoolTooSmall,
    KindNotPlannable,
    LayerSpecMismatch,
    RanksDisagree,
    RankWithoutLayers,
)
from kvhold_server.planner.grouping import plan_groups
from kvhold_server.planner.groups import Grouping, LayerGroup, project, request_blocks
from kvhold_server.planner.request import Layer, PlannerConfig, PlanRequest, SpecMap


def plan_modern(request: PlanRequest) -> Plan:
    """The plan. Raises the typed refusals of planner/errors.py; changes nothing."""
    model = model_of(request)
    grouping = plan_groups(model, request.config)
    return complete_plan(request, model, grouping)


# ---------------------------------------------------------------------------------------------------------- the model


def model_of(request: PlanRequest) -> SpecMap:
    """All layers of all ranks, windows widened for drafts. Raises LayerSpecMismatch, KindNotPlannable, RankWithoutLayers."""
    merged: dict[LayerName, LayerSpec] = {}
    first_rank: dict[LayerName, int] = {}
    for rank in distinct_ranks(request):
        for name, spec in request.ranks[rank].layers:
            known = merged.setdefault(name, spec)
            first_rank.setdefault(name, rank)
            if known is not spec and known != spec:
                raise _mismatch(name, rank, first_rank[name], spec, known)
    for name, spec in merged.items():
        if not spec.plannable:
            raise KindNotPlannable(layer_name=name, kind=spec.kind)
    for rank, its in enumerate(request.ranks):
        if merged and not its.layers:
            raise RankWithoutLayers(rank=rank)
    return _retaining(merged, max(0, request.config.prefill_lookahead_tokens - 1))


def distinct_ranks(request: PlanRequest) -> list[int]:
    """The first rank of each different list of layers."""
    seen: list[tuple[Layer, ...]] = []
    ranks = []
    for index, rank in enumerate(request.ranks):
        if not any(layers is rank.layers or layers == rank.layers for layers in seen):
            seen.append(rank.layers)
            ranks.append(index)
    return ranks


def _retaining(specs: SpecMap, extra_tokens: int) -> SpecMap:
    widened: dict[int, LayerSpec] = {}
    for spec in specs.values():
        if id(spec) not in widened:
            widened[id(spec)] = spec.retaining(extra_tokens)
    return {name: widened[id(spec)] for name, spec in specs.items()}


def _mismatch(name: LayerName, rank: int, first_rank: int, spec: LayerSpec, known: LayerSpec) -> LayerSpecMismatch:
    difference = first_mismatch(known, spec)
    return LayerSpecMismatch(
        layer_name=name,
        rank=rank,
        first_rank=first_rank,
        field=difference.field,
        value=difference.second,
        first_value=difference.first,
    )


# ------------------------------------------------------------------------------------------------------ after grouping


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What was decided for all ranks together."""

    budgets: tuple[RankBudget, ...]
    limits: Limits  # with the final length
    num_blocks: int
    host_num_blocks: int | None
    warnings: tuple[PlanWarning, ...]


def complete_plan(request: PlanRequest, model: SpecMap, grouping: Grouping) -> Plan:
    """The plan with those groups, which cover the model. Raises typed refusals."""
    if not model:
        return _empty_plan(request)
    limits = request.config.limits
    arrangements, warnings = arrange(request, grouping.groups)
    budgets = budgets_of(request, arrangements)
    if not request.config.auto_fit_max_model_len:
        check_any_memory(budgets, limits)
    check_specs(grouping.groups, limits)
    fitted = fit(request, budgets, limits)
    placed = _place_all(fitted)
    return _report(request, fitted, placed, (*grouping.warnings, *warnings, *fitted.warnings))


def check_specs(groups: Sequence[LayerGroup], limits: Limits) -> None:
    """Raises a refusal that names the first layer whose spec contradicts itself or the limits."""
    for group in groups:
        seen: set[int] = set()
        for name, spec in group.layers():
            if id(spec) not in seen:
                seen.add(id(spec))
                spec.check(name, limits)


def arrange(
    request: PlanRequest, groups: Sequence[LayerGroup]
) -> tuple[tuple[Arrangement, ...], tuple[PlanWarning, ...]]:
    """One arrangement per rank; ranks with the same layers share it. Raises RanksDisagree."""
    by_layers: list[tuple[tuple[Layer, ...], Arrangement]] = []
    arrangements: list[Arrangement] = []
    reasons: dict[int, str] = {}
    for rank, its in enumerate(request.ranks):
        known = next((a for layers, a in by_layers if layers is its.layers or layers == its.layers), None)
        if known is None:
            projected = project(groups, frozenset(layer.name for layer in its.layers))
            known, reason = _arrangement_of(projected, request.config)
            by_layers.append((its.layers, known))
            if reason:
                reasons[rank] = reason
        arrangements.append(known)
    _check_agreement(arrangements, reasons)
    return tuple(arrangements), tuple(_glm_warning(rank, reason) for rank, reason in reasons.items())


def _arrangement_of(groups: tuple[LayerGroup, ...], config: PlannerConfig) -> tuple[Arrangement, str]:
    """The arrangement, and why the aliasing one was not taken where it nearly applied."""
    if config.hisparse is not None:
        return HisparseArrangement(groups, config), ""
    parts = recognise(groups)
    if isinstance(parts, GlmParts):
        return GlmArrangement(groups, config, parts), ""
    return GenericArrangement(groups, config), parts


def _check_agreement(arrangements: Sequence[Arrangement], reasons: dict[int, str]) -> None:
    pooled = next((rank for rank, arrangement in enumerate(arrangements) if arrangement.pooled_groups()), None)
    if pooled is not None and reasons:
        rank, reason = next(iter(reasons.items()))
        raise RanksDisagree(rank=rank, other_rank=pooled, reason=reason)


def _glm_warning(rank: int, reason: str) -> PlanWarning:
    return PlanWarning(
        type=WarningType.GLM_LAYOUT_NOT_USED,
        message=f"rank {rank} uses the ordinary layout: {reason}",
        args=(("rank", str(rank)), ("reason", reason)),
    )


def budgets_of(request: PlanRequest, arrangements: Sequence[Arrangement]) -> tuple[RankBudget, ...]:
    """Each rank's memory; with host-resident rows that of the smallest rank for all."""
    config = request.config
    memories = [rank.available_memory_bytes for rank in request.ranks]
    if config.hisparse is not None:
        memories = [min(memories)] * len(memories)
    return tuple(
        RankBudget(
            rank=rank,
            arrangement=arrangement,
            available_bytes=memory,
            num_blocks_override=config.num_blocks_override,
        )
        for rank, (arrangement, memory) in enumerate(zip(arrangements, memories, strict=True))
    )


def fit(request: PlanRequest, budgets: tuple[RankBudget, ...], limits: Limits) -> Fitted:
    """Length and number of blocks that all ranks can hold. Raises NoMemory, InsufficientMemory, CannotAutoFit."""
    config = request.config
    warnings: list[PlanWarning] = []
    if config.auto_fit_max_model_len:
        fitted = fit_length(budgets, limits)
        if fitted.max_model_len_tokens < limits.max_model_len_tokens:
            warnings.append(_length_warning(limits.max_model_len_tokens, fitted.max_model_len_tokens, fitted.rank))
        limits = limits.with_len(fitted.max_model_len_tokens)
    check_any_memory(budgets, limits)
    check_one_request(budgets, limits)
    distinct = distinct_budgets(budgets)
    warnings += [warning for budget in distinct if (warning := _override_warning(budget, limits)) is not None]
    host_counts = [count for b in distinct if (count := b.arrangement.host_num_blocks()) is not None]
    return Fitted(
        budgets=budgets,
        limits=limits,
        num_blocks=min(budget.num_blocks(limits) for budget in distinct),
        host_num_blocks=min(host_counts) if host_counts else None,
        warnings=tuple(warnings),
    )


def _length_warning(asked: int, fitted: int, rank: int) -> PlanWarning:
    return PlanWarning(
        type=WarningType.LENGTH_REDUCED,
        message=f"max_model_len_tokens is reduced from {asked} to {fitted}, which is what rank {rank} can hold",
        args=(("asked_tokens", str(asked)), ("fitted_tokens", str(fitted)), ("rank", str(rank))),
    )


def _override_warning(budget: RankBudget, limits: Limits) -> PlanWarning | None:
    needed = budget.memory_bytes(limits)
    if budget.num_blocks_override is None or needed <= budget.available_bytes:
        return None
    return PlanWarning(
        type=WarningType.OVERRIDE_EXCEEDS_MEMORY,
        message=f"num_blocks_override {budget.num_blocks_override} takes {needed} bytes on rank {budget.rank}, "
        f"{budget.available_bytes} are available",
        args=(
            ("rank", str(budget.rank)),
            ("needed_bytes", str(needed)),
            ("available_bytes", str(budget.available_bytes)),
        ),
    )


def _place_all(fitted: Fitted) -> dict[int, Placed]:
    """Layouts by arrangement: with the blocks equal, ranks of one arrangement are equal."""
    placed: dict[int, Placed] = {}
    for budget in fitted.budgets:
        key = id(budget.arrangement)
        if key not in placed:
            placed[key] = budget.arrangement.place(fitted.num_blocks, fitted.limits, fitted.host_num_blocks)
    return placed


# ----------------------------------------------------------------------------------------------------------- reporting


def _report(request: PlanRequest, fitted: Fitted, placed: dict[int, Placed], warnings: tuple[PlanWarning, ...]) -> Plan:
    config, limits = request.config, fitted.limits
    by_arrangement = {
        id(budget.arrangement): _rank_plan(budget.arrangement, placed[id(budget.arrangement)], fitted)
        for budget in fitted.budgets
    }
    ranks = tuple(by_arrangement[id(budget.arrangement)] for budget in fitted.budgets)
    first = placed[id(fitted.budgets[0].arrangement)]
    scheduler = tuple(_scheduler_group(group) for group in first.groups)
    pooled = frozenset[int]().union(*(budget.arrangement.pooled_groups() for budget in fitted.budgets))
    concurrency = _concurrency(config, fitted, scheduler, pooled)
    cached = [group for group in scheduler if group.spec.prefix_cacheable] or scheduler
    cache_block = min(group.spec.block_size_tokens for group in cached)
    sizes = resolve_block_sizes(
        [group.spec for group in scheduler],
        cache_block_size_tokens=cache_block,
        context_parallel_size=config.decode_context_parallel_size,
        needs_hashes=config.enable_prefix_caching or config.kv_connector_enabled,
        prefix_match_unit_tokens=config.prefix_match_unit_tokens,
    )
    floor = min_request_blocks(scheduler, limits, pooled)
    plan = Plan(
        strategy=config.strategy,
        layout=config.layout,
        ranks=ranks,
        scheduler_groups=tuple(_group(group, limits) for group in scheduler),
        max_model_len_tokens=limits.max_model_len_tokens,
        cache_block_size_tokens=cache_block,
        scheduler_block_size_tokens=sizes.scheduler_tokens,
        hash_block_size_tokens=sizes.hash_tokens,
        capacity_tokens=None if concurrency is None else int(concurrency * limits.max_model_len_tokens),
        max_concurrency=concurrency,
        max_in_flight_tokens=config.max_in_flight_tokens,
        num_prefill_lookahead_tokens=config.prefill_lookahead_tokens,
        min_request_blocks=floor,
        layer_costs=layer_costs(request),
        warnings=(*warnings, *_first_warnings(fitted), *seats_warning(config, ranks[0].num_blocks, floor)),
        fingerprint="",
    )
    return dataclasses.replace(plan, fingerprint=fingerprint_of(plan))


def _first_warnings(fitted: Fitted) -> tuple[PlanWarning, ...]:
    arrangement = fitted.budgets[0].arrangement
    return arrangement.warnings() if isinstance(arrangement, HisparseArrangement) else ()


def _rank_plan(arrangement: Arrangement, placed: Placed, fitted: Fitted) -> RankPlan:
    return RankPlan(
        num_blocks=fitted.num_blocks,
        bytes_per_block=arrangement.block_bytes,
        needed_bytes=arrangement.need_bytes(fitted.limits),
        groups=tuple(_group(group, fitted.limits) for group in placed.groups),
        tensors=placed.tensors,
        region_size_bytes=placed.region_size_bytes,
        needs_zeroing=needs_zeroing(placed.groups),
        draft_num_blocks=placed.draft_num_blocks,
        draft_layer_names=placed.draft_layer_names,
        host_num_blocks=placed.host_num_blocks,
        host_block_stride_bytes=placed.host_block_stride_bytes,
        host_region_size_bytes=placed.host_region_size_bytes,
        shared_host_pool=placed.shared_host_pool,
    )


def _group(group: LayerGroup, limits: Limits) -> Group:
    return Group(
        layer_names=group.layer_names,
        spec=group.spec,
        max_request_blocks=group.spec.max_request_blocks(limits),
        is_eagle_group=group.is_eagle_group,
        host_resident=group.host_resident,
        enable_kv_transfer=group.enable_kv_transfer,
        role=group.role,
    )


def _scheduler_group(group: LayerGroup) -> LayerGroup:
    return dataclasses.replace(group, spec=group.first_layer_spec)


def needs_zeroing(groups: Sequence[LayerGroup]) -> bool:
    """Recurrent states start from zero, and bytes of one format must not be read as another's."""
    specs = [spec for group in groups for spec in group.spec.each()]
    device = [spec for group in groups if not group.host_resident for spec in group.spec.each()]
    formats = {spec.storage_format for spec in device if spec.storage_format is not None}
    return any(spec.needs_zeroing for spec in specs) or len(formats) > 1


def _concurrency(
    config: PlannerConfig, fitted: Fitted, groups: Sequence[LayerGroup], pooled: frozenset[int]
) -> float | None:
    """Requests of the final length at once, null block included in the blocks; None if requests need no blocks."""
    needed = request_blocks(groups, fitted.limits, pooled)
    if config.hisparse is not None:
        _check_one_request(config, fitted, needed.device, needed.host)
    if needed.device == 0:
        return None
    concurrency = fitted.num_blocks / needed.device
    if fitted.host_num_blocks is not None and needed.host > 0:
        concurrency = min(concurrency, fitted.host_num_blocks / needed.host)
    return concurrency


def _check_one_request(config: PlannerConfig, fitted: Fitted, needed: int, needed_host: int) -> None:
    assert config.hisparse is not None
    if fitted.host_num_blocks is not None and fitted.host_num_blocks < needed_host:
        raise HostPoolTooSmall(
            host_pool_bytes=config.hisparse.host_pool_bytes,
            host_num_blocks=fitted.host_num_blocks,
            needed_host_blocks=needed_host,
            max_model_len_tokens=fitted.limits.max_model_len_tokens,
        )
    if fitted.num_blocks < needed:
        raise BlocksTooFew(
            num_blocks=fitted.num_blocks,
            needed_blocks=needed,
            max_model_len_tokens=fitted.limits.max_model_len_tokens,
        )


def min_request_blocks(groups: Sequence[LayerGroup], limits: Limits, pooled: frozenset[int]) -> int:
    """Blocks that the shortest request holds: the floor of every request's footprint."""
    return sum(
        group.spec.min_request_blocks(limits)
        for index, group in enumerate(groups)
        if not group.host_resident and index not in pooled
    )


def seats_warning(config: PlannerConfig, num_blocks: int, floor: int) -> tuple[PlanWarning, ...]:
    """Said where fewer of the shortest requests fit than may be scheduled."""
    seats = (num_blocks - 1) // floor if floor else config.max_num_seqs
    if seats >= config.max_num_seqs:
        return ()
    return (
        PlanWarning(
            type=WarningType.MAX_NUM_SEQS_UNREACHABLE,
            message=f"every request holds at least {floor} of {num_blocks - 1} blocks, so that at most {seats} run at "
            f"once, not max_num_seqs {config.max_num_seqs}",
            args=(
                ("max_num_seqs", str(config.max_num_seqs)),
                ("suggested_max_num_seqs", str(seats)),
                ("min_request_blocks", str(floor)),
            ),
        ),
    )


def layer_costs(request: PlanRequest) -> tuple[LayerCost, ...]:
    """What each requested spec costs by itself at the length asked for."""
    limits = request.config.limits
    return tuple(
        LayerCost(
            kind=spec.kind,
            page_size_bytes=spec.page_size_bytes,
            unpadded_page_size_bytes=spec.unpadded_page_size_bytes,
            max_request_blocks=spec.max_request_blocks(limits),
            table_row_blocks=spec.table_row_blocks(limits, limits.max_model_len_tokens),
            num_states=spec.num_states,
            prefix_cacheable=spec.prefix_cacheable,
        )
        for spec in request.layer_specs
    )


def _empty_plan(request: PlanRequest) -> Plan:
    """A model without a cache: one block of nothing, so that schedulers find a pool."""
    config = request.config
    sizes = resolve_block_sizes(
        (),
        cache_block_size_tokens=config.cache_block_size_tokens,
        context_parallel_size=config.decode_context_parallel_size,
    )
    nothing = RankPlan(
        num_blocks=1,
        bytes_per_block=0,
        needed_bytes=0,
        groups=(),
        tensors=(),
        region_size_bytes=0,
        needs_zeroing=False,
    )
    plan = Plan(
        strategy=config.strategy,
        layout=config.layout,
        ranks=(nothing,) * len(request.ranks),
        scheduler_groups=(),
        max_model_len_tokens=config.max_model_len_tokens,
        cache_block_size_tokens=None,
        scheduler_block_size_tokens=sizes.scheduler_tokens,
        hash_block_size_tokens=sizes.hash_tokens,
        capacity_tokens=None,
        max_concurrency=None,
        max_in_flight_tokens=config.max_in_flight_tokens,
        num_prefill_lookahead_tokens=config.prefill_lookahead_tokens,
        min_request_blocks=0,
        layer_costs=layer_costs(request),
        warnings=(),
        fingerprint="",
    )
    return dataclasses.replace(plan, fingerprint=fingerprint_of(plan))
