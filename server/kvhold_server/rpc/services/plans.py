"""PlanService: pure questions."""

from dataclasses import fields
from typing import Any

from kvhold.v1 import plan_pb2 as pb
from kvhold.v1 import plan_pb2_grpc
from kvhold_server.domain.service_limits import WIRE_NAMES, ServiceLimits
from kvhold_server.node.node import Node
from kvhold_server.rpc.plan_codec import DTYPES, LAYOUTS, REQUEST_KINDS, STRATEGIES_BUILT
from kvhold_server.rpc.planning import answer_plan, in_thread
from kvhold_server.rpc.pool_codec import HASH_ALGORITHM_BYTES


class PlanService(plan_pb2_grpc.PlanServiceServicer):
    """See the proto."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        return await in_thread(lambda: answer_plan(request, self._node.limits))

    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Any) -> pb.GetCapabilitiesResponse:
        return pb.GetCapabilitiesResponse(
            server_version=server_version(),
            boot_id=self._node.boot_id,
            layer_kinds=REQUEST_KINDS,
            strategies=STRATEGIES_BUILT,
            layouts=LAYOUTS,
            dtypes=DTYPES,
            memory_backends=list(self._node.backends),
            hash_algorithms=list(HASH_ALGORITHM_BYTES),
            bounds=encode_bounds(self._node.limits),
        )


def server_version() -> str:
    """Of the installed distribution; "0" where it runs from a bare checkout."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and not needed to serve

    try:
        return version("kvhold")
    except PackageNotFoundError:
        return "0"


def encode_bounds(limits: ServiceLimits) -> list[pb.Bound]:
    """Every bound under its wire name."""
    return [pb.Bound(name=WIRE_NAMES[f.name], max_value=int(getattr(limits, f.name))) for f in fields(limits)]
