"""Planning off the event loop: a plan of a million layers must not hold up a step."""

import asyncio

from kvhold.v1 import plan_pb2
from kvhold_server.domain.plan import Plan
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.planner.plan import plan
from kvhold_server.rpc.plan_codec import decode_plan_request


async def plan_in_thread(request: plan_pb2.PlanRequest, limits: ServiceLimits) -> Plan:
    """Decodes and plans in a thread; raises what the planner raises."""
    return await asyncio.to_thread(lambda: plan(decode_plan_request(request)))
