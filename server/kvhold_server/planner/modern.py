"""The modern planner: group → project on ranks → fit → place → report.

    specs of all ranks ──merge──▶ one model ──group──▶ groups ──project──▶ each rank's groups ──▶ arrangement
    arrangement + memory ──fit──▶ length, blocks ──minimum over ranks──▶ place ──▶ RankPlan ──▶ Plan

`complete_plan` is everything behind grouping; other strategies bring their own groups.
"""

from kvhold_server.domain.plan import Plan
from kvhold_server.planner.capacity import check_any_memory
from kvhold_server.planner.fit import arrange, budgets_of, check_specs, fit, place_all
from kvhold_server.planner.grouping import plan_groups
from kvhold_server.planner.groups import Grouping
from kvhold_server.planner.model import model_of
from kvhold_server.planner.report import empty_plan, report
from kvhold_server.planner.request import PlanRequest, SpecMap


def plan_modern(request: PlanRequest) -> Plan:
    """The plan. Raises the typed refusals of planner/errors.py; changes nothing."""
    model = model_of(request)
    grouping = plan_groups(model, request.config, request.drafter_layers)
    return complete_plan(request, model, grouping)


def complete_plan(request: PlanRequest, model: SpecMap, grouping: Grouping) -> Plan:
    """The plan with those groups, which cover the model. Raises typed refusals."""
    if not model:
        return empty_plan(request)
    limits = request.config.limits
    arrangements, warnings = arrange(request, grouping.groups)
    budgets = budgets_of(request, arrangements)
    if not request.config.auto_fit_max_model_len:
        check_any_memory(budgets[:1], limits)  # a rank without memory is said before what its layers have against them
    check_specs(grouping.groups, limits)
    fitted = fit(request, budgets, limits)
    placed = place_all(fitted)
    return report(request, fitted, placed, (*grouping.warnings, *warnings, *fitted.warnings))
