"""Can what was asked for ever be admitted? A request that never fits waits for ever, and nothing says so.

Two questions per pool of blocks: one request of the longest length, and `max_num_seqs` of the shortest at once. The
bound on blocks is the one that admission uses, so a plan that passes has no request that it could not serve alone. The
null block is not counted among what can be used.
"""

from collections.abc import Iterator

from kvhold_server.domain.layer_spec import Limits
from kvhold_server.domain.plan import Group, Plan
from kvhold_server.planner.explanation import BlockPool, FeasibilityCheck
from kvhold_server.planner.request import PlanRequest


def feasibility(request: PlanRequest, plan: Plan) -> tuple[FeasibilityCheck, ...]:
    """The checks, per pool of blocks that the plan has."""
    limits = request.config.limits.with_len(plan.max_model_len_tokens)
    groups = _groups_of_all_ranks(plan)
    checks: list[FeasibilityCheck] = []
    for pool in BlockPool:
        total = _num_blocks(plan, pool)
        members = [group for group in groups if pool_of(group) is pool]
        if total is not None and members:
            floor = plan.min_request_blocks if pool is BlockPool.DEVICE else _floor(members, limits)
            checks += _checks_of(request, plan, pool, members, floor, total - 1)
    return tuple(checks)


def pool_of(group: Group) -> BlockPool:
    """Whose block ids a group uses."""
    if group.host_resident:
        return BlockPool.HOST
    return BlockPool.DRAFT if group.uses_draft_pool else BlockPool.DEVICE


def _groups_of_all_ranks(plan: Plan) -> list[Group]:
    """Each group once: a drafter's pool may be known on one pipeline stage only."""
    ranks = list({id(rank): rank for rank in plan.ranks}.values())
    by_position = zip(*(rank.groups for rank in ranks), strict=True)
    return [next((group for group in same if group.uses_draft_pool), same[0]) for same in by_position]


def _num_blocks(plan: Plan, pool: BlockPool) -> int | None:
    if pool is BlockPool.DEVICE:
        return plan.num_blocks
    counts = [rank.draft_num_blocks if pool is BlockPool.DRAFT else rank.host_num_blocks for rank in plan.ranks]
    return min((count for count in counts if count is not None), default=None)


def _floor(groups: list[Group], limits: Limits) -> int:
    return sum(group.spec.min_request_blocks(limits) for group in groups)


def _checks_of(
    request: PlanRequest, plan: Plan, pool: BlockPool, groups: list[Group], floor: int, usable: int
) -> Iterator[FeasibilityCheck]:
    yield FeasibilityCheck(
        description=f"one request of {plan.max_model_len_tokens} tokens",
        pool=pool,
        needed_blocks=sum(group.max_request_blocks for group in groups),
        usable_blocks=usable,
    )
    if request.config.max_num_seqs:
        yield FeasibilityCheck(
            description=f"{request.config.max_num_seqs} of the shortest requests at once",
            pool=pool,
            needed_blocks=request.config.max_num_seqs * floor,
            usable_blocks=usable,
        )
