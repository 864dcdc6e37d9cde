"""Planning off the event loop: a plan of a million layers must not hold up a step."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvhold.v1 import plan_pb2
from kvhold_server.domain.plan import Plan
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.planner.explain import plan_explained
from kvhold_server.planner.plan import plan
from kvhold_server.rpc.explanation_codec import encode_explanation
from kvhold_server.rpc.plan_codec import decode_plan_request, encode_plan_response

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result]) -> Result:
    """Runs pure work in a thread; raises what it raises."""
    return await asyncio.to_thread(work)


def make_plan(request: plan_pb2.PlanRequest, limits: ServiceLimits) -> Plan:
    """Decodes and plans. Raises InvalidField and the planner's refusals."""
    return plan(decode_plan_request(request, limits))


def answer_plan(request: plan_pb2.PlanRequest, limits: ServiceLimits) -> plan_pb2.PlanResponse:
    """Decodes, plans, encodes; explains where asked to."""
    fold = request.fold_identical_ranks
    if not request.explain:
        return encode_plan_response(make_plan(request, limits), fold_identical_ranks=fold)
    explained = plan_explained(decode_plan_request(request, limits))
    response = encode_plan_response(explained.plan, fold_identical_ranks=fold)
    response.explanation.CopyFrom(encode_explanation(explained.explanation))
    return response
