"""Puts the services on a server."""

from collections.abc import Callable
from typing import Any

import grpc

from kvhold.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    block_pb2,
    block_pb2_grpc,
    event_pb2,
    event_pb2_grpc,
    plan_pb2,
    plan_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from kvhold_server.node.node import Node
from kvhold_server.rpc.fd_channel import FdChannel
from kvhold_server.rpc.local_transport import LocalTransport
from kvhold_server.rpc.regions import RegionKeeper
from kvhold_server.rpc.server import HealthBoard, add_reflection
from kvhold_server.rpc.services.admin import AdminService
from kvhold_server.rpc.services.blocks import BlockService
from kvhold_server.rpc.services.events import EventService
from kvhold_server.rpc.services.plans import PlanService
from kvhold_server.rpc.services.pools import PoolService
from kvhold_server.rpc.services.sessions import SessionService

ENGINE_FILES = (plan_pb2, pool_pb2, session_pb2, block_pb2, event_pb2)


def add_engine_services(
    server: grpc.aio.Server,
    node: Node,
    keeper: RegionKeeper,
    health: HealthBoard,
    *,
    fd_channel: FdChannel | None = None,
    local: LocalTransport | None = None,
) -> None:
    """Everything that engines and workers call."""
    plan_pb2_grpc.add_PlanServiceServicer_to_server(PlanService(node), server)
    pool_pb2_grpc.add_PoolServiceServicer_to_server(PoolService(node, keeper, fd_channel), server)
    session_pb2_grpc.add_SessionServiceServicer_to_server(SessionService(node, local), server)
    block_pb2_grpc.add_BlockServiceServicer_to_server(BlockService(node), server)
    event_pb2_grpc.add_EventServiceServicer_to_server(EventService(node), server)
    services = [service for file in ENGINE_FILES for service in file.DESCRIPTOR.services_by_name.values()]
    _mention(node, services)
    health.add_to(server)
    add_reflection(server, services)


def add_admin_services(
    server: grpc.aio.Server,
    node: Node,
    request_stop: Callable[[float | None], None],
    caller_of: Callable[[str], str] | None = None,
) -> None:
    """Everything that administrators call. `caller_of`: who a peer of gRPC's is, where somebody knows."""
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(node, request_stop, caller_of), server)
    _mention(node, list(admin_pb2.DESCRIPTOR.services_by_name.values()))


def _mention(node: Node, services: list[Any]) -> None:
    """Counters exist from the start."""
    for service in services:
        for method in service.methods:
            node.telemetry.method(f"{service.name}/{method.name}")
