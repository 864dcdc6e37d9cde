"""What was fitted and placed, as a Plan: costs, capacities, block grids, warnings, identity."""

import dataclasses
from collections.abc import Sequence

from kvhold_server.domain.fingerprint import fingerprint_of
from kvhold_server.domain.layer_spec import Limits
from kvhold_server.domain.plan import Group, LayerCost, Plan, PlanWarning, RankPlan, WarningType
from kvhold_server.planner.arrangement import Arrangement, Placed
from kvhold_server.planner.block_sizes import resolve_block_sizes
from kvhold_server.planner.errors import BlocksTooFew, HostPoolTooSmall
from kvhold_server.planner.fit import Fitted
from kvhold_server.planner.groups import LayerGroup, request_blocks
from kvhold_server.planner.request import PlannerConfig, PlanRequest


def report(request: PlanRequest, fitted: Fitted, placed: dict[int, Placed], warnings: tuple[PlanWarning, ...]) -> Plan:
    """The plan. Raises MatchUnitDoesNotDivide, HostPoolTooSmall, BlocksTooFew."""
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
        scheduler_groups=_sized(scheduler, limits, pooled),
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
        warnings=(
            *warnings,
            *fitted.budgets[0].arrangement.warnings(),
            *seats_warning(config, ranks[0].num_blocks, floor),
        ),
        fingerprint="",
    )
    return dataclasses.replace(plan, fingerprint=fingerprint_of(plan))


def _rank_plan(arrangement: Arrangement, placed: Placed, fitted: Fitted) -> RankPlan:
    return RankPlan(
        num_blocks=fitted.num_blocks,
        bytes_per_block=arrangement.block_bytes,
        needed_bytes=arrangement.need_bytes(fitted.limits),
        groups=_sized(placed.groups, fitted.limits, arrangement.pooled_groups()),
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


def _sized(groups: Sequence[LayerGroup], limits: Limits, pooled: frozenset[int]) -> tuple[Group, ...]:
    return tuple(_group(group, limits, index in pooled) for index, group in enumerate(groups))


def _group(group: LayerGroup, limits: Limits, uses_draft_pool: bool) -> Group:
    return Group(
        layer_names=group.layer_names,
        spec=group.spec,
        max_request_blocks=group.spec.max_request_blocks(limits),
        is_eagle_group=group.is_eagle_group,
        host_resident=group.host_resident,
        enable_kv_transfer=group.enable_kv_transfer,
        role=group.role,
        uses_draft_pool=uses_draft_pool,
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


def empty_plan(request: PlanRequest) -> Plan:
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
