"""A plan that explains itself: bytes by kind, waste by cause, what fits, what other memory would change.

    a longest request        = what its layers' pages hold + padding + narrow groups + alignment of blocks
    blocks × bytes of one                  by kind            └───────────── by cause ────────────┘

    memory offered           = blocks that can be used + null block + remainder + what another limit leaves

All numbers follow from the finished plan, so that they hold for every strategy. What other memory or another length
would give is asked of the planner itself, with the same groups.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvhold_server.domain.errors import InternalFault, KvholdError
from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec
from kvhold_server.domain.layer_spec import LayerSpec, SpecCount, count_specs
from kvhold_server.domain.plan import Group, Plan, RankPlan, Strategy
from kvhold_server.planner.compact import best_of, complete
from kvhold_server.planner.explanation import (
    BlockPool,
    Explanation,
    KindShare,
    MemoryStep,
    RankExplanation,
    Waste,
    WasteCause,
)
from kvhold_server.planner.feasibility import feasibility, pool_of
from kvhold_server.planner.model import model_of
from kvhold_server.planner.plan import plan as plan_of
from kvhold_server.planner.request import PlanRequest

GIB = 1 << 30
MEMORY_STEPS_BYTES = (-GIB, GIB)
LONGEST_TOKENS = 2**31 - 1  # no request is longer

Replan = Callable[[PlanRequest], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A plan with its explanation."""

    plan: Plan
    explanation: Explanation


def plan_explained(request: PlanRequest) -> Explained:
    """Plans and explains. Raises the typed refusals of planner/errors.py."""
    if request.config.strategy is not Strategy.COMPACT:
        plan = plan_of(request)
        return Explained(plan=plan, explanation=explain(request, plan, plan_of))
    model = model_of(request)
    solved = best_of(request, model)
    explanation = explain(request, solved.plan, lambda other: complete(other, model, solved.solution))
    return Explained(plan=solved.plan, explanation=explanation)


def explain(request: PlanRequest, plan: Plan, replan: Replan) -> Explanation:
    """Explains a plan of that request; `replan` plans another request with the same groups."""
    return Explanation(
        ranks=tuple(_ranks(request, plan)),
        checks=feasibility(request, plan),
        longest_request_tokens=longest_request(request, replan),
        memory_steps=tuple(_memory_step(request, replan, delta) for delta in MEMORY_STEPS_BYTES),
    )


# -------------------------------------------------------------------------------------------------- what would change


def longest_request(request: PlanRequest, replan: Replan) -> int | None:
    """The longest request that fits with these groups; None where no length is too long, or none fits."""
    config = dataclasses.replace(request.config, max_model_len_tokens=LONGEST_TOKENS, auto_fit_max_model_len=True)
    longest = _planned(dataclasses.replace(request, config=config), replan)
    if not isinstance(longest, Plan) or longest.max_model_len_tokens == LONGEST_TOKENS:
        return None
    return longest.max_model_len_tokens


def _memory_step(request: PlanRequest, replan: Replan, delta_bytes: int) -> MemoryStep:
    ranks = tuple(
        dataclasses.replace(rank, available_memory_bytes=rank.available_memory_bytes + delta_bytes)
        for rank in request.ranks
    )
    made = _planned(dataclasses.replace(request, ranks=ranks), replan)
    if not isinstance(made, Plan):
        return MemoryStep(delta_bytes=delta_bytes, refusal=str(made))
    return MemoryStep(
        delta_bytes=delta_bytes,
        num_blocks=made.num_blocks,
        capacity_tokens=made.capacity_tokens or 0,
        max_concurrency=made.max_concurrency or 0.0,
        max_model_len_tokens=made.max_model_len_tokens,
    )


def _planned(request: PlanRequest, replan: Replan) -> Plan | KvholdError:
    try:
        return replan(request)
    except InternalFault:
        raise
    except KvholdError as refusal:
        return refusal


# ------------------------------------------------------------------------------------------------------- rank by rank


def _ranks(request: PlanRequest, plan: Plan) -> Iterator[RankExplanation]:
    """Each different (plan, memory) once."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, (rank, offered) in enumerate(zip(plan.ranks, request.ranks, strict=True)):
        alike.setdefault((id(rank), offered.available_memory_bytes), []).append(number)
    for (_, available), numbers in alike.items():
        yield _rank(plan.ranks[numbers[0]], numbers, available)


def _rank(rank: RankPlan, numbers: Sequence[int], available: int) -> RankExplanation:
    device = [(index, group) for index, group in enumerate(rank.groups) if pool_of(group) is BlockPool.DEVICE]
    request_bytes = rank.bytes_per_block * sum(group.max_request_blocks for _, group in device)
    return RankExplanation(
        ranks=tuple(numbers),
        kinds=tuple(_kinds(rank)),
        request_bytes=request_bytes,
        request_waste=tuple(waste for waste in _request_waste(rank, device, request_bytes) if waste.size_bytes),
        memory_waste=tuple(waste for waste in _memory_waste(rank, available) if waste.size_bytes),
        available_bytes=available,
    )


def _kinds(rank: RankPlan) -> Iterator[KindShare]:
    totals: dict[tuple[str, BlockPool], list[int]] = {}
    for group in rank.groups:
        for entry in specs_present(group):
            held = entry.count * entry.spec.unpadded_page_size_bytes
            total = totals.setdefault((entry.spec.kind, pool_of(group)), [0, 0, 0])
            total[0] += entry.count
            total[1] += held
            total[2] += held * group.max_request_blocks
    for (kind, pool), (layers, block_bytes, request_bytes) in totals.items():
        yield KindShare(kind=kind, num_layers=layers, block_bytes=block_bytes, request_bytes=request_bytes, pool=pool)


def specs_present(group: Group) -> list[SpecCount]:
    """The specs of the layers present, with their numbers."""
    spec = group.spec
    if not isinstance(spec, UniformTypeSpec):
        return [SpecCount(spec=spec, count=len(group.layer_names))] if group.layer_names else []
    if spec.layer_names == group.layer_names:
        return list(spec.counts)
    own: dict[str, LayerSpec] = dict(zip(spec.layer_names, spec.layer_specs, strict=True))
    return count_specs(own[name] for name in group.layer_names)


def _request_waste(rank: RankPlan, device: Sequence[tuple[int, Group]], whole: int) -> Iterator[Waste]:
    """Page padding, then what is missing to the widest group, then what rounds a block up."""
    widths = {index: sum(e.count * e.spec.page_size_bytes for e in specs_present(group)) for index, group in device}
    widest = max(widths.values(), default=0)
    padding = {
        index: group.max_request_blocks * sum(e.count * _padding(e.spec) for e in specs_present(group))
        for index, group in device
    }
    narrow = {index: group.max_request_blocks * (widest - widths[index]) for index, group in device}
    rounding = {index: group.max_request_blocks * (rank.bytes_per_block - widest) for index, group in device}
    for cause, sizes in (
        (WasteCause.PAGE_PADDING, padding),
        (WasteCause.NARROW_GROUP, narrow),
        (WasteCause.BLOCK_ALIGNMENT, rounding),
    ):
        groups = tuple(index for index, size in sizes.items() if size)
        yield Waste(cause=cause, size_bytes=sum(sizes.values()), whole_bytes=whole, groups=groups)


def _padding(spec: LayerSpec) -> int:
    return spec.page_size_bytes - spec.unpadded_page_size_bytes


def _memory_waste(rank: RankPlan, available: int) -> Iterator[Waste]:
    block = rank.bytes_per_block
    yield Waste(cause=WasteCause.NULL_BLOCK, size_bytes=block, whole_bytes=available)
    left = max(0, available - rank.region_size_bytes)
    whole_blocks = left // block * block if block else 0
    yield Waste(cause=WasteCause.REMAINDER, size_bytes=left - whole_blocks, whole_bytes=available)
    yield Waste(cause=WasteCause.OTHER_LIMIT, size_bytes=whole_blocks, whole_bytes=available)
