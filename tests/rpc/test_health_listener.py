"""The listener for probes: health by name, nothing else, whatever the pools are doing."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvhold.v1 import pool_pb2, pool_pb2_grpc
from kvhold_server.app import Daemon
from kvhold_server.config import load_config
from tests.deploy.load import plan_request

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    flags = ["--socket", f"{tmp_path}/k.sock", "--state-dir", str(tmp_path), "--backend", "fake"]
    running = Daemon(load_config([*flags, "--health", "127.0.0.1:0"], {}))
    await running.start()
    yield running
    await running.close()


async def health(daemon: Daemon, service: str) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{daemon.health_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status)


@pytest.mark.parametrize("service", ["", "readiness", "liveness"])
async def test_probes_get_an_answer_by_name(daemon: Daemon, service: str) -> None:
    assert await health(daemon, service) == SERVING


async def test_draining_is_not_ready_but_alive(daemon: Daemon) -> None:
    await daemon.health.set_ready(False)
    assert await health(daemon, "readiness") == NOT_SERVING
    assert await health(daemon, "liveness") == SERVING


async def test_nothing_else_is_served_there(daemon: Daemon) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{daemon.health_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pool_pb2_grpc.PoolServiceStub(channel).ListPools(pool_pb2.ListPoolsRequest(), timeout=5)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_liveness_does_not_depend_on_memory(daemon: Daemon) -> None:
    """A restart would make no memory; it would cost every engine its session."""
    request = pool_pb2.OpenPoolRequest(name="p", plan=plan_request(1 << 30))
    request.plan.config.ClearField("num_blocks_override")
    request.plan.ranks[0].available_memory_bytes = 1 << 42
    async with grpc.aio.insecure_channel(f"unix:{daemon.config.socket}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pool_pb2_grpc.PoolServiceStub(channel).OpenPool(request, timeout=30)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await health(daemon, "liveness") == await health(daemon, "readiness") == SERVING
