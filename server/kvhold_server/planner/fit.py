"""One number of blocks and one length for all ranks: each rank's arrangement and memory, and the smallest of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvhold_server.domain.layer_spec import Limits
from kvhold_server.domain.plan import PlanWarning, WarningType
from kvhold_server.planner.arrangement import Arrangement, GenericArrangement, Placed
from kvhold_server.planner.arrangement_glm import GlmArrangement, GlmParts, recognise
from kvhold_server.planner.arrangement_hisparse import HisparseArrangement
from kvhold_server.planner.capacity import (
    RankBudget,
    check_any_memory,
    check_one_request,
    distinct_budgets,
    fit_length,
)
from kvhold_server.planner.errors import GroupsDisagree, RanksDisagree
from kvhold_server.planner.groups import LayerGroup, project
from kvhold_server.planner.request import Layer, PlannerConfig, PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What was decided for all ranks together."""

    budgets: tuple[RankBudget, ...]
    limits: Limits  # with the final length
    num_blocks: int
    host_num_blocks: int | None
    warnings: tuple[PlanWarning, ...]


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
        raise RanksDisagree(rank=rank, other_rank=pooled, cause=reason)


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


def place_all(fitted: Fitted) -> dict[int, Placed]:
    """Layouts by arrangement: with the blocks equal, ranks of one arrangement are equal. Raises GroupsDisagree."""
    placed: dict[int, Placed] = {}
    for budget in fitted.budgets:
        key = id(budget.arrangement)
        if key not in placed:
            placed[key] = budget.arrangement.place(fitted.num_blocks, fitted.limits, fitted.host_num_blocks)
    first = placed[id(fitted.budgets[0].arrangement)]
    for budget in distinct_budgets(fitted.budgets):
        own = placed[id(budget.arrangement)]
        if _tables(own) != _tables(first):
            raise GroupsDisagree(rank=budget.rank, num_groups=len(own.groups), first_num_groups=len(first.groups))
    return placed


def _tables(placed: Placed) -> list[tuple[str, int]]:
    """What a block table must agree in on all ranks."""
    return [(group.spec.kind, group.spec.block_size_tokens) for group in placed.groups]
