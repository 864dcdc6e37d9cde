"""The compact strategy: of all groupings and layouts worth comparing, the one that wastes least.

    options by formula ──shortlist──▶ planned in full, beside modern's ──at least as good as modern──▶ best by value

Every block id costs what its widest group's block costs, so waste is what narrow groups leave of it: the capacity in
requests of the longest length measures all of it at once, padding included. Three things have a price besides, so that
a hair of capacity is not bought with them:

    a doubling of the grid (lcm of all blocks: prefix hits end there)   1 % of capacity
    L and B exchanged (views stride differently)                        1 %
    a further group (a block table to fill in each step)                decides between equals only

The number of groups is bounded. A bound that is asked for holds; the default gives way where modern's own grouping has
more groups and nothing within the bound holds as much. Where the rules leave no choice (one group, host-resident rows,
the aliasing layout) the plan is modern's.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from kvhold_server.domain.errors import InternalFault, KvholdError, Unsupported
from kvhold_server.domain.layer_spec import Family
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import GroupingChoice, GroupingOption, Plan
from kvhold_server.planner.compact_options import Model, Option, bound_of, options_of
from kvhold_server.planner.glm_groups import glm_groups
from kvhold_server.planner.grouping import plan_groups
from kvhold_server.planner.groups import Grouping
from kvhold_server.planner.model import model_of
from kvhold_server.planner.modern import complete_plan
from kvhold_server.planner.promotion import without_hybrid
from kvhold_server.planner.request import PlannerConfig, PlanRequest, SpecMap
from kvhold_server.planner.uniform import uniform_spec, uniform_type

PRICE_OF_GRID_DOUBLING = 0.01
PRICE_OF_GROUP = 0.00001
PRICE_OF_OTHER_LAYOUT = 0.01
MODERN = "as the modern strategy groups"

_MOST_PLANNED = 5
_MANY_LAYERS = 2000  # beyond that, planning in full costs more than it decides
_MOST_PLANNED_OF_MANY = 2
_RUNNERS_UP = 3


@dataclass(eq=False)
class NoGroupingWithinBound(Unsupported):
    """More block tables are needed than were allowed."""

    template = (
        "compact.max_num_groups is {max_num_groups}: no grouping with so few block tables holds the model; "
        "allow more, or leave the bound out"
    )
    max_num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """A grouping with its layout: what a plan is completed from, at any length and with any memory."""

    description: str
    layout: Layout
    grouping: Grouping


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Made:
    solution: Solution
    plan: Plan
    value: float


def plan_compact(request: PlanRequest) -> Plan:
    """The plan. Raises the refusal of the modern strategy where no option can be planned."""
    model = model_of(request)
    return best_of(request, model).plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """The plan and what it was made from."""

    solution: Solution
    plan: Plan


def best_of(request: PlanRequest, model: SpecMap) -> Solved:
    """The best plan. Raises the refusal of the modern strategy where no option can be planned."""
    config = request.config
    modern = _modern(request, model)
    free = _free_layers(model, config)
    if not free:
        if isinstance(modern, KvholdError):
            raise modern
        return Solved(solution=modern.solution, plan=modern.plan)
    options = list(options_of(Model(layers=free, config=config, drafters=request.drafter_layers)))
    most = _MOST_PLANNED if len(free) <= _MANY_LAYERS else _MOST_PLANNED_OF_MANY
    found = [_try(request, model, option) for option in _shortlist(options, config, most)]
    made = _eligible(modern, [each for each in found if each is not None], config)
    # Stable: of equals, modern's and then the earlier option. Beyond the bound only what nothing within it holds.
    made.sort(key=lambda each: (len(each.plan.scheduler_groups) > bound_of(config), -each.value))
    plan = made[0].plan
    if plan.capacity_tokens is not None:  # requests that hold no block at all leave nothing to compare
        plan = dataclasses.replace(plan, choice=_choice(made, len(options) + 1))
    return Solved(solution=made[0].solution, plan=plan)


def _eligible(modern: _Made | KvholdError, found: Sequence[_Made], config: PlannerConfig) -> list[_Made]:
    """Modern's and those that hold no less, each shape once. Raises modern's refusal, NoGroupingWithinBound."""
    bound = config.compact.max_num_groups
    made: list[_Made] = []
    if isinstance(modern, KvholdError):
        if not found:
            raise modern
    elif bound is None or len(modern.plan.scheduler_groups) <= bound:
        made = [modern]
        found = [each for each in found if _not_worse(each.plan, modern.plan, config)]
    elif not found:
        raise NoGroupingWithinBound(max_num_groups=bound)
    shapes = {_shape_of(each.plan) for each in made}
    for each in found:
        shape = _shape_of(each.plan)
        if shape not in shapes:
            shapes.add(shape)
            made.append(each)
    return made


def complete(request: PlanRequest, model: SpecMap, solution: Solution) -> Plan:
    """The plan of a solution, at the request's length and memory. Raises typed refusals."""
    config = dataclasses.replace(request.config, layout=solution.layout)
    return complete_plan(dataclasses.replace(request, config=config), model, solution.grouping)


def _free_layers(model: SpecMap, config: PlannerConfig) -> SpecMap:
    """The layers, promoted where asked for; none where the rules leave no choice. Raises nothing."""
    try:
        specs = without_hybrid(model)[0] if config.disable_hybrid_kv_cache and model else model
        if not specs or uniform_spec(specs) is not None or uniform_type(specs) is not None:
            return {}
        if config.hisparse is not None and any(spec.family & Family.MLA for spec in specs.values()):
            return {}
        return {} if glm_groups(specs, config) is not None else _with_free_part(specs)
    except KvholdError:
        return {}  # the modern strategy says why


def _with_free_part(specs: SpecMap) -> SpecMap:
    return specs if any(spec.hidden_token_bytes is None for spec in specs.values()) else {}


def _modern(request: PlanRequest, model: SpecMap) -> _Made | KvholdError:
    """Modern's plan, or its refusal."""
    try:
        grouping = plan_groups(model, request.config, request.drafter_layers)
        solution = Solution(description=MODERN, layout=request.config.layout, grouping=grouping)
        plan = complete(request, model, solution)
    except InternalFault:
        raise
    except KvholdError as refusal:
        return refusal
    return _Made(solution=solution, plan=plan, value=_value_of(plan, request.config))


def _try(request: PlanRequest, model: SpecMap, option: Option) -> _Made | None:
    try:
        solution = Solution(description=option.description, layout=option.layout, grouping=option.build())
        plan = complete(request, model, solution)
    except InternalFault:
        raise
    except KvholdError:
        return None  # another option may do
    return _Made(solution=solution, plan=plan, value=_value_of(plan, request.config))


def _shape_of(plan: Plan) -> Hashable:
    """Plans of the same shape are the same to whoever uses them."""
    groups = tuple((group.block_size_tokens, group.layer_names) for group in plan.scheduler_groups)
    return plan.layout, groups, tuple(rank.bytes_per_block for rank in plan.ranks)


def _not_worse(plan: Plan, modern: Plan, config: PlannerConfig) -> bool:
    """As long, as many tokens, as many requests; with an override of blocks, in no more memory."""
    if plan.capacity_tokens is None or modern.capacity_tokens is None:
        return False
    assert plan.max_concurrency is not None and modern.max_concurrency is not None
    if config.num_blocks_override is not None and _largest_region(plan) > _largest_region(modern):
        return False
    as_long = plan.max_model_len_tokens >= modern.max_model_len_tokens
    longer = plan.max_model_len_tokens > modern.max_model_len_tokens
    as_many = longer or plan.max_concurrency >= modern.max_concurrency
    return as_long and as_many and plan.capacity_tokens >= modern.capacity_tokens


def _largest_region(plan: Plan) -> int:
    return max(rank.region_size_bytes for rank in plan.ranks)


# -------------------------------------------------------------------------------------------------------------- value


def _price(grid_tokens: int, num_groups: int, same_layout: bool) -> float:
    price = PRICE_OF_GRID_DOUBLING * math.log2(grid_tokens) + PRICE_OF_GROUP * num_groups
    return price + (0.0 if same_layout else PRICE_OF_OTHER_LAYOUT)


def _value_of(plan: Plan, config: PlannerConfig) -> float:
    """Logarithm of the capacity less the prices; where the length was fitted, a longer one counts as well."""
    capacity = math.log(max(plan.capacity_tokens or 0, 1))
    if config.auto_fit_max_model_len:
        capacity += math.log(plan.max_model_len_tokens)
    price = _price(_grid_of(plan), len(plan.scheduler_groups), plan.layout is config.layout)
    return round(capacity - price, 9)


def _formula_value(option: Option, config: PlannerConfig) -> float:
    price = _price(option.grid_tokens, option.num_groups, option.layout is config.layout)
    return round(-math.log(max(option.request_bytes, 1)) - price, 9)


def _grid_of(plan: Plan) -> int:
    return math.lcm(*(group.block_size_tokens for group in plan.scheduler_groups))


def _shortlist(options: Sequence[Option], config: PlannerConfig, most: int) -> list[Option]:
    """The best by formula, among them the best in the layout asked for and the best of unchanged blocks."""
    ranked = sorted(options, key=lambda option: -_formula_value(option, config))
    asked = [option for option in ranked if option.layout is config.layout]
    smallest = min((option.grid_tokens for option in asked), default=0)
    plain = [option for option in asked if option.grid_tokens == smallest]
    leaner = sorted(ranked, key=lambda option: option.request_bytes)
    picked = {option.key: option for option in (*ranked[:2], *leaner[:1], *asked[:1], *plain[:1], *ranked)}
    return list(picked.values())[:most]


# -------------------------------------------------------------------------------------------------------- explanation


def _choice(made: Sequence[_Made], num_considered: int) -> GroupingChoice:
    chosen = made[0]
    others = made[1 : 1 + _RUNNERS_UP]
    if not others:
        verdict = "the only one that can be planned without holding less than another"
    elif chosen.solution.description == MODERN:
        verdict = "nothing holds more by as much as its larger blocks, further groups or other layout would cost"
    else:
        verdict = "holds most for its blocks, groups and layout"
    return GroupingChoice(
        chosen=_described(chosen, verdict),
        runners_up=tuple(_described(each, _why_not(each, chosen)) for each in others),
        num_considered=num_considered,
    )


def _described(made: _Made, verdict: str) -> GroupingOption:
    plan = made.plan
    assert plan.capacity_tokens is not None and plan.max_concurrency is not None
    return GroupingOption(
        description=made.solution.description,
        layout=plan.layout,
        num_groups=len(plan.scheduler_groups),
        grid_tokens=_grid_of(plan),
        request_bytes=max(rank.needed_bytes for rank in plan.ranks),
        max_model_len_tokens=plan.max_model_len_tokens,
        capacity_tokens=plan.capacity_tokens,
        max_concurrency=plan.max_concurrency,
        verdict=verdict,
    )


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.1f} %" if share >= 0.1 else "less than 0.1 %"


def _why_not(made: _Made, chosen: _Made) -> str:
    mine, best = made.plan, chosen.plan
    reasons = list(_differences(mine, best))
    return "; ".join(reasons) if reasons else "equally good, considered later"


def _differences(mine: Plan, best: Plan) -> Iterable[str]:
    held, most = mine.capacity_tokens or 0, best.capacity_tokens or 0
    if held < most:
        yield f"holds {_percent(most - held, most)} less"
    if held > most:
        yield f"holds {_percent(held - most, most)} more, which is not worth the rest"
    if _grid_of(mine) > _grid_of(best):
        yield f"prefix hits end at multiples of {_grid_of(mine)} tokens instead of {_grid_of(best)}"
    if len(mine.scheduler_groups) > len(best.scheduler_groups):
        yield f"{len(mine.scheduler_groups)} groups instead of {len(best.scheduler_groups)}"
    if mine.layout is not best.layout:
        yield f"layout {mine.layout.value} instead of {best.layout.value}"
