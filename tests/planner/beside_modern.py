"""The compact strategy beside the modern one: what must hold for every request."""

import dataclasses

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.plan import Plan, Strategy
from kvhold_server.planner.plan import plan
from kvhold_server.planner.request import PlanRequest


def never_worse(asked: PlanRequest) -> Plan | None:
    """Plans with both strategies and compares; the compact plan."""
    try:
        before = plan(dataclasses.replace(asked, config=dataclasses.replace(asked.config, strategy=Strategy.MODERN)))
    except KvholdError:
        before = None
    try:
        made = plan(dataclasses.replace(asked, config=dataclasses.replace(asked.config, strategy=Strategy.COMPACT)))
    except KvholdError:
        assert before is None, "compact refuses what modern plans"
        return None
    if before is not None:
        assert made.max_model_len_tokens >= before.max_model_len_tokens
        assert (made.capacity_tokens or 0) >= (before.capacity_tokens or 0)
        if made.max_model_len_tokens == before.max_model_len_tokens:
            assert (made.max_concurrency or 0) >= (before.max_concurrency or 0)
    return made
