"""The planner's one entrance: a request in, a plan or a typed refusal out."""

from collections.abc import Callable, Mapping

from kvhold_server.domain.plan import Plan, Strategy
from kvhold_server.planner.compact import plan_compact
from kvhold_server.planner.legacy import plan_legacy
from kvhold_server.planner.modern import plan_modern
from kvhold_server.planner.request import PlanRequest

STRATEGIES: Mapping[Strategy, Callable[[PlanRequest], Plan]] = {
    Strategy.MODERN: plan_modern,
    Strategy.LEGACY: plan_legacy,
    Strategy.COMPACT: plan_compact,
}


def plan(request: PlanRequest) -> Plan:
    """Plan with the strategy asked for. Pure. Raises the typed refusals of planner/errors.py."""
    return STRATEGIES[request.config.strategy](request)
