"""How the daemon listens, and how it goes: sockets, locks, health, reflection, drain."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvhold.v1 import event_pb2, plan_pb2, session_pb2
from kvhold_client.leash import leashed
from kvhold_server.app import Daemon
from kvhold_server.config import ServerConfig
from kvhold_server.rpc.server import AddressInUse, SocketClaim, SocketInUse, SocketPathTaken, SocketPathUnusable
from tests.rpc.harness import RunningDaemon, refused, running

REPO = Path(__file__).resolve().parents[2]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_socket_is_for_owner_and_group(daemon: RunningDaemon) -> None:
    mode = os.stat(daemon.daemon.config.socket).st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o660


async def test_second_daemon_on_the_same_path_is_refused_with_the_pid_of_the_first(daemon: RunningDaemon) -> None:
    with pytest.raises(SocketInUse) as caught:
        Daemon(daemon.daemon.config)
    assert caught.value.pid == os.getpid()
    await daemon.plans.GetCapabilities(plan_pb2.GetCapabilitiesRequest())


async def test_a_dead_daemons_socket_is_replaced(short_dir: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(short_dir / "k.sock"))
    left.close()
    async with running(short_dir) as daemon:
        await daemon.plans.GetCapabilities(plan_pb2.GetCapabilitiesRequest())
    assert not list(short_dir.glob("k.sock*")), "nothing is left behind"


def test_a_file_at_the_path_is_not_ours_to_delete(short_dir: Path) -> None:
    (short_dir / "k.sock").write_text("precious")
    with pytest.raises(SocketPathTaken):
        SocketClaim.take(short_dir / "k.sock")
    assert (short_dir / "k.sock").read_text() == "precious" and not (short_dir / "k.sock.lock").exists()


def test_paths_that_cannot_hold_a_socket(short_dir: Path) -> None:
    with pytest.raises(SocketPathUnusable, match="at most 107"):
        SocketClaim.take(short_dir / ("s" * 108))
    (short_dir / "file").touch()
    with pytest.raises(SocketPathUnusable):
        SocketClaim.take(short_dir / "file" / "k.sock")


async def test_tcp_ports_are_not_shared(short_dir: Path) -> None:
    (short_dir / "second").mkdir()
    async with running(short_dir, tcp="127.0.0.1:0") as daemon:
        port = daemon.daemon.tcp_port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == SERVING
        with pytest.raises(AddressInUse):
            async with running(short_dir / "second", tcp=f"127.0.0.1:{port}"):
                pass
    assert not list((short_dir / "second").glob("*.sock*"))


async def test_health_has_liveness_and_readiness(daemon: RunningDaemon) -> None:
    health = health_pb2_grpc.HealthStub(daemon.channel)

    async def check(name: str) -> int:
        return int((await health.Check(health_pb2.HealthCheckRequest(service=name))).status)

    assert [await check(name) for name in ("", "liveness", "readiness")] == [SERVING] * 3
    await daemon.daemon.health.set_ready(False)
    assert [await check(name) for name in ("", "liveness", "readiness")] == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_reflection_lists_the_services(daemon: RunningDaemon) -> None:
    async def ask() -> object:  # type: ignore[misc]
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(daemon.channel)
    answer = await stub.ServerReflectionInfo(ask()).read()
    names = {service.name for service in answer.list_services_response.service}
    assert {f"kvhold.v1.{name}Service" for name in ("Plan", "Pool", "Session", "Block")} <= names


async def test_admin_services_can_have_a_listener_of_their_own(short_dir: Path) -> None:
    async with running(short_dir, admin_socket=str(short_dir / "a.sock")) as daemon:
        raw = daemon.channel.unary_unary("/kvhold.v1.AdminService/ResetPrefixCache")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(b"")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(f"unix:{short_dir}/a.sock") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING


async def test_bugs_are_internal_logged_once_and_tell_nothing(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(daemon.node, "close_session", broken)
    refusal = await refused(daemon.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id="x", epoch=1)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "UNEXPECTED_FAULT")
    assert "secret" not in refusal.message and len(caplog.records) == 1
    assert daemon.node.telemetry.num_unexpected_errors == 1


async def test_draining_refuses_new_sessions_and_lets_running_ones_finish(daemon: RunningDaemon) -> None:
    await daemon.open_pool()
    session = await daemon.open_session()
    await session.keep_alive()
    daemon.node.begin_drain(30.0)
    watch = daemon.events.WatchEvents(event_pb2.WatchEventsRequest(pool="p"))
    for call in (daemon.open_session(), daemon.open_pool("q"), watch.read()):
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert float(refusal.metadata["retry_after_s"]) > 0
    await session.admit(1, 40, 1, 2)
    assert (await session.close()).num_released_sequences == 1
    session.break_stream()


def start_daemon(directory: Path, *flags: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": ":".join(str(REPO / part) for part in ("proto", "server", "client"))}
    command = leashed("kvhold_server", "serve", "--socket", str(directory / "k.sock"), *flags)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 20
    while not (directory / "k.sock").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


async def test_sigterm_drains_then_exits_zero_and_leaves_nothing(short_dir: Path) -> None:
    process = await asyncio.to_thread(start_daemon, short_dir, "--drain-deadline-s", "20", "--backend", "fake")
    try:
        async with grpc.aio.insecure_channel(f"unix:{short_dir}/k.sock") as channel:
            client = _Client(channel)
            await client.open_pool()
            session = await client.open_session()
            await session.keep_alive()
            process.send_signal(signal.SIGTERM)
            await client.until_draining()
            await session.admit(1, 40, 1, 2)
            await session.close()
            assert await asyncio.to_thread(process.wait, 10) == 0
            session.break_stream()
        assert not list(short_dir.glob("k.sock*"))
    finally:
        process.kill()
        process.communicate()


async def test_a_signal_that_comes_before_or_after_its_time_stops_the_daemon_in_order(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket answers long before the start is over, and another one may come while all is taken down."""
    ours: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ours.append(number))  # instead of being ended
    try:
        daemon = Daemon(ServerConfig(socket=str(short_dir / "k.sock"), metrics="127.0.0.1:0", keep_pools=False))
        take_down = daemon.close

        async def start_metrics() -> None:
            assert (short_dir / "k.sock").exists()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)

        async def close() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            await take_down()

        monkeypatch.setattr(daemon, "_start_metrics", start_metrics)
        monkeypatch.setattr(daemon, "close", close)
        await asyncio.wait_for(daemon.run(), 10)
        assert not ours, "nobody else heard of one"
        assert not list(short_dir.glob("k.sock*"))
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_sigkill_leaves_a_path_that_the_next_daemon_takes(short_dir: Path) -> None:
    process = await asyncio.to_thread(start_daemon, short_dir, "--backend", "fake")
    process.kill()
    process.communicate()
    assert (short_dir / "k.sock").exists()
    async with running(short_dir) as daemon:
        await daemon.plans.GetCapabilities(plan_pb2.GetCapabilitiesRequest())


def test_bad_flags_and_used_paths_have_exit_codes_and_one_line(short_dir: Path) -> None:
    process = start_daemon(short_dir, "--lease-ttl-s", "soon")
    assert process.wait(20) == 2
    assert "lease_ttl_s" in process.communicate()[1]
    (short_dir / "k.sock").write_text("")
    process = start_daemon(short_dir)
    process.wait(20)  # first: `communicate` lets go of its leash
    output = process.communicate(timeout=20)[1]
    assert process.returncode == 1 and "SOCKET_PATH_TAKEN" in output and "Traceback" not in output


class _Client(RunningDaemon):
    """A client of a daemon in another process."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._health = health_pb2_grpc.HealthStub(channel)
        RunningDaemon.connect(self, channel)

    async def until_draining(self) -> None:
        request = health_pb2.HealthCheckRequest(service="readiness")
        while (await self._health.Check(request)).status == SERVING:
            await asyncio.sleep(0.01)
