"""Who an administrator was, as the kernel says it; and that gRPC's own socket is nobody's but ours."""

import asyncio
import logging
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvhold.v1 import admin_pb2 as pb
from kvhold.v1 import admin_pb2_grpc
from kvhold_server.rpc import admin_door
from kvhold_server.rpc.admin_door import MAX_CONNECTIONS
from kvhold_server.rpc.fd_peer import Peer
from kvhold_server.rpc.server import SocketPathUnusable
from tests.rpc.harness import RunningDaemon, running

RESET = """
import grpc, os, sys
from kvhold.v1 import admin_pb2 as pb, admin_pb2_grpc
with grpc.insecure_channel("unix:" + sys.argv[1]) as channel:
    admin_pb2_grpc.AdminServiceStub(channel).ResetPrefixCache(pb.ResetPrefixCacheRequest(pool="p"))
print(os.getpid())
"""


@pytest.fixture
async def daemon(short_dir: Path) -> AsyncIterator[RunningDaemon]:
    async with running(short_dir, admin_socket=str(short_dir / "a.sock")) as started:
        await started.open_pool()
        yield started
        started.check()


def admin_path(daemon: RunningDaemon) -> str:
    return daemon.daemon.config.admin_socket


async def test_the_audit_log_names_the_process_that_called(
    daemon: RunningDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Two at once, each with its own line."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with caplog.at_level(logging.INFO, "kvhold.audit"):
        command = [sys.executable, "-c", RESET, admin_path(daemon)]
        pipe = asyncio.subprocess.PIPE
        others = [await asyncio.create_subprocess_exec(*command, stdout=pipe, env=environment) for _ in range(2)]
        async with grpc.aio.insecure_channel(f"unix:{admin_path(daemon)}") as channel:
            await admin_pb2_grpc.AdminServiceStub(channel).EvictBlocks(pb.EvictBlocksRequest(pool="p"))
        outputs = [await other.communicate() for other in others]
    pids = [int(output) for output, _ in outputs]
    assert all(other.returncode == 0 for other in others)
    for pid, action in [(os.getpid(), "evict_blocks"), *((pid, "reset_prefix_cache") for pid in pids)]:
        line = f"action={action} caller=uid={os.getuid()} gid={os.getgid()} pid={pid} "
        assert sum(line in record.message for record in caplog.records) == 1, caplog.text


async def test_grpc_itself_listens_where_only_our_user_can_connect(daemon: RunningDaemon) -> None:
    outer, inner = Path(admin_path(daemon)), Path(f"{admin_path(daemon)}.in")
    assert stat.S_IMODE(outer.stat().st_mode) == 0o660
    assert stat.S_IMODE(inner.stat().st_mode) == 0o600


async def test_who_is_not_let_in_is_in_the_log_once_in_a_while(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stranger(connection: socket.socket) -> Peer:
        return Peer(pid=4711, uid=4242, gid=4243, groups=frozenset())

    async def knock() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            await loop.sock_connect(client, admin_path(daemon))
            assert await asyncio.wait_for(loop.sock_recv(client, 1), 5) == b""

    def lines() -> list[str]:
        return [record.message for record in caplog.records if "refused an administrator" in record.message]

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(admin_door, "peer_of", stranger)
    for _ in range(5):
        await knock()
    assert len(lines()) == 1 and "uid 4242 gid 4243" in lines()[0]
    monkeypatch.setattr(admin_door, "REFUSAL_LOG_INTERVAL_S", 0.0)
    await knock()
    assert len(lines()) == 2 and "4 more" in lines()[1]


async def test_drain_tells_its_last_word_through_the_door(short_dir: Path) -> None:
    """The answer of the call that stops the daemon arrives, although everything is taken down meanwhile."""
    async with running(short_dir, admin_socket=str(short_dir / "a.sock")) as daemon:
        stopped = asyncio.create_task(daemon.daemon.run_until_stopped())
        async with grpc.aio.insecure_channel(f"unix:{admin_path(daemon)}") as channel:
            answers = [answer async for answer in admin_pb2_grpc.AdminServiceStub(channel).Drain(pb.DrainRequest())]
        assert answers[-1].done
        await asyncio.wait_for(stopped, 10)
        assert not Path(admin_path(daemon)).exists() and not Path(f"{admin_path(daemon)}.in").exists()


async def test_connections_are_bounded_and_come_back(daemon: RunningDaemon) -> None:
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(MAX_CONNECTIONS + 1):
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        await loop.sock_connect(client, admin_path(daemon))
        clients.append(client)
    assert await asyncio.wait_for(loop.sock_recv(clients[-1], 1), 5) == b"", "one too many"
    for client in clients:
        client.close()
    await asyncio.sleep(0.3)
    async with grpc.aio.insecure_channel(f"unix:{admin_path(daemon)}") as channel:
        await admin_pb2_grpc.AdminServiceStub(channel).EvictBlocks(pb.EvictBlocksRequest(pool="p"))


async def test_a_path_that_leaves_no_room_for_the_inner_one_is_named(short_dir: Path) -> None:
    path = str(short_dir / "a").ljust(106, "a")
    with pytest.raises(SocketPathUnusable, match="at most 107"):
        async with running(short_dir, admin_socket=path):
            pass


async def test_whoever_hangs_up_at_once_is_named_all_the_same(
    daemon: RunningDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection ends while its call is being carried out, at one moment or another."""
    with caplog.at_level(logging.INFO, "kvhold.audit"):
        for i in range(50):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(admin_path(daemon))
                client.sendall(http2_call("EvictBlocks", pb.EvictBlocksRequest(pool="p").SerializeToString()))
                await asyncio.sleep(i * 1e-4)
            await asyncio.sleep(0.01)
    lines = [record.message for record in caplog.records if "action=evict_blocks" in record.message]
    assert lines and all(f"caller=uid={os.getuid()} gid={os.getgid()} pid={os.getpid()} " in line for line in lines)


def http2_call(method: str, message: bytes) -> bytes:
    """All that a client must say for one call of AdminService: preface, settings, headers, data."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/kvhold.v1.AdminService/{method}",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    data = b"\0" + len(message).to_bytes(4, "big") + message
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, data)
