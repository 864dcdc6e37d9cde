"""The fd channel: descriptors for tokens, proof of life, and peers that mean no good."""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvhold_client.fd_client import ReceivedRegion, fetch_region
from kvhold_client.mapping_errors import ChannelBroken, ChannelNotReachable, ChannelRefused
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import Region, RegionRequest
from kvhold_server.memory.cuda_vmm import CudaVmmBackend
from kvhold_server.memory.memfd import MemfdBackend
from kvhold_server.rpc.fd_channel import FdChannel, FdChannelOptions, OpenedRegion, PeerMapping
from kvhold_server.rpc.fd_peer import Peer, PeerNotAllowed, SocketInUse, check_peer
from kvhold_server.rpc.fd_tokens import FdGrant, TokenTable, TooManyTokens, UnknownToken
from tests.memory.fake_driver import FakeDriver

GRANT = FdGrant(owner="session-1", pool=PoolName("m"), rank=0)


class Daemon:
    """A channel over one memfd region, and what it reported."""

    def __init__(self, path: Path, options: FdChannelOptions | None = None) -> None:
        self.backend = MemfdBackend()
        self.region: Region = self.backend.reserve(RegionRequest(pool=PoolName("m"), rank=0, size_bytes=1 << 16))
        self.events: list[tuple[str, PeerMapping]] = []
        self.channel = FdChannel(
            path,
            open_region=self.open_region,
            on_peer_mapped=lambda mapping: self.events.append(("mapped", mapping)),
            on_peer_gone=lambda mapping: self.events.append(("gone", mapping)),
            options=options,
        )
        self.path = str(path)

    def open_region(self, grant: FdGrant) -> OpenedRegion:
        fds = self.backend.open_fds(self.region, read_only=grant.read_only)
        return OpenedRegion(exported=self.backend.export(self.region), fds=fds)

    async def fetch(self, token: bytes | None = None) -> ReceivedRegion:
        return await asyncio.to_thread(fetch_region, self.path, token or self.channel.issue(GRANT))

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "it never came true"
            await asyncio.sleep(0.005)

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


async def serving(daemon: Daemon) -> AsyncIterator[Daemon]:
    await daemon.channel.start()
    yield daemon
    await daemon.channel.close()
    daemon.backend.close()


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    async for daemon in serving(Daemon(tmp_path / "fd.sock", FdChannelOptions(max_tokens=16))):
        yield daemon


@pytest.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[Daemon]:
    """Gives silent peers one second, and serves eight at a time."""
    options = FdChannelOptions(request_timeout_s=1.0, max_connections=8)
    async for daemon in serving(Daemon(tmp_path / "fd.sock", options)):
        yield daemon


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_token_is_worth_one_region_once(daemon: Daemon) -> None:
    token = daemon.channel.issue(GRANT)
    received = await daemon.fetch(token)
    os.pwrite(received.fds[0], b"stamped", 100)
    assert received.size_bytes == daemon.region.size_bytes
    (own,) = daemon.backend.open_fds(daemon.region)
    assert os.pread(own, 7, 100) == b"stamped"
    os.close(own)
    with pytest.raises(ChannelRefused) as caught:
        await daemon.fetch(token)
    assert caught.value.refusal == "UNKNOWN_TOKEN"
    os.close(received.fds[0])
    await asyncio.to_thread(received.lease.unmapped)


async def test_the_mapping_is_reported_with_its_owner_and_process(daemon: Daemon) -> None:
    received = await daemon.fetch()
    assert daemon.names() == ["mapped"]
    mapping = daemon.events[0][1]
    assert (mapping.grant.owner, mapping.pid, mapping.uid) == ("session-1", os.getpid(), os.geteuid())
    assert daemon.channel.mappings == (mapping,)
    await asyncio.to_thread(received.lease.unmapped)
    await daemon.until(lambda: daemon.names() == ["mapped", "gone"])
    assert daemon.events[1][1] == mapping
    assert daemon.channel.mappings == ()
    os.close(received.fds[0])


async def test_a_closed_connection_of_a_live_process_proves_nothing(daemon: Daemon) -> None:
    """R17: it may still have the region mapped; only its end, or its word, is proof."""
    worker = await _start_worker(daemon, "close-without-goodbye")
    await asyncio.sleep(0.1)
    assert daemon.names() == ["mapped"]
    os.kill(worker.pid, signal.SIGKILL)
    await daemon.until(lambda: daemon.names() == ["mapped", "gone"])
    await worker.wait()


async def test_a_killed_worker_is_noticed_at_once(daemon: Daemon) -> None:
    """DMN-01: liveness starts at the mapping, not at first use."""
    worker = await _start_worker(daemon, "wait")
    assert daemon.names() == ["mapped"]
    os.kill(worker.pid, signal.SIGKILL)
    started = asyncio.get_running_loop().time()
    await daemon.until(lambda: daemon.names() == ["mapped", "gone"])
    assert asyncio.get_running_loop().time() - started < 5
    await worker.wait()


async def test_a_paused_worker_is_not_dead(daemon: Daemon) -> None:
    worker = await _start_worker(daemon, "wait")
    os.kill(worker.pid, signal.SIGSTOP)
    await asyncio.sleep(0.2)
    assert daemon.names() == ["mapped"]
    os.kill(worker.pid, signal.SIGKILL)
    await worker.wait()


WORKER = """
import sys, time, mmap
from kvhold_client import fd_client
path, token, what = sys.argv[1:]
received = fd_client.fetch_region(path, bytes.fromhex(token))
mapping = mmap.mmap(received.fds[0], received.size_bytes)
if what == "close-without-goodbye":
    received.lease._connection.close()
print("mapped", flush=True)
time.sleep(60)
"""


async def _start_worker(daemon: Daemon, what: str) -> asyncio.subprocess.Process:
    repo = Path(__file__).resolve().parents[2]
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, daemon.path, daemon.channel.issue(GRANT).hex(), what,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(repo / "client")},
    )  # fmt: skip
    assert worker.stdout is not None
    assert (await asyncio.wait_for(worker.stdout.readline(), 30)).strip() == b"mapped"
    await daemon.until(lambda: bool(daemon.events))
    return worker


async def test_a_thousand_mappings_leak_nothing(daemon: Daemon) -> None:
    await daemon.fetch()  # warm up
    daemon.events.clear()
    fds = num_open_fds()
    for _ in range(1000):
        received = await daemon.fetch()
        os.close(received.fds[0])
        await asyncio.to_thread(received.lease.unmapped)
    await daemon.until(lambda: daemon.names().count("gone") == 1000)
    await daemon.until(lambda: daemon.channel.num_connections == 1)
    assert num_open_fds() <= fds


JUNK = {
    "nothing": b"",
    "half a length": b"\0\0",
    "zero length": struct.pack(">I", 0),
    "huge length": struct.pack(">I", 2**31) + b"x" * 100,
    "not JSON": struct.pack(">I", 4) + b"\xff\xfe{}",
    "not an object": struct.pack(">I", 2) + b"[]",
    "deep": struct.pack(">I", 4000) + b"[" * 4000,
    "no token": struct.pack(">I", 2) + b"{}",
    "token of a wrong type": struct.pack(">I", 11) + b'{"token":1}',
    "token that is not hex": struct.pack(">I", 14) + b'{"token":"zz"}',
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "grpc": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
async def test_junk_is_dropped_and_the_next_peer_served(impatient: Daemon, junk: bytes) -> None:
    daemon = impatient
    reader, writer = await asyncio.open_unix_connection(daemon.path)
    writer.write(junk)
    await writer.drain()
    with suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 5)  # ends: the server hangs up
        assert b'"ok"' not in answer
    writer.close()
    assert daemon.events == []
    await daemon.until(lambda: daemon.channel.num_refused == 1 and daemon.channel.num_connections == 0)
    received = await daemon.fetch()
    os.close(received.fds[0])
    await asyncio.to_thread(received.lease.unmapped)


async def test_a_flood_of_silent_peers_is_bounded_and_passes(impatient: Daemon) -> None:
    daemon = impatient
    connections = []
    for _ in range(20):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        await asyncio.to_thread(connection.connect, daemon.path)
        connections.append(connection)
    await asyncio.sleep(0.05)
    assert daemon.channel.num_connections <= 8
    await daemon.until(lambda: daemon.channel.num_connections == 0)  # their time is up
    received = await daemon.fetch()
    assert daemon.names() == ["mapped"]
    os.close(received.fds[0])
    await asyncio.to_thread(received.lease.unmapped)
    for connection in connections:
        connection.close()


async def test_a_chatty_peer_with_a_mapping_does_not_hurt(daemon: Daemon) -> None:
    received = await daemon.fetch()
    connection = received.lease._connection
    assert connection is not None
    connection.sendall(b"\xff" * 100_000)
    await asyncio.sleep(0.05)
    other = await daemon.fetch()
    for each in (received, other):
        os.close(each.fds[0])


async def test_tokens_are_bounded_and_expire(daemon: Daemon) -> None:
    for _ in range(16):
        daemon.channel.issue(GRANT)
    with pytest.raises(TooManyTokens):
        daemon.channel.issue(GRANT)


def test_a_token_is_dead_after_its_time_or_with_its_pool() -> None:
    table = TokenTable(max_tokens=2, ttl_s=10)
    old = table.issue(GRANT, now_s=100)
    with pytest.raises(UnknownToken):
        table.redeem(old, now_s=110)
    assert len(table) == 0
    token = table.issue(GRANT, now_s=100)
    assert table.redeem(token, now_s=109.9) == GRANT
    token = table.issue(GRANT, now_s=200)
    table.drop_pool(PoolName("other"))
    assert len(table) == 1
    table.drop_pool(GRANT.pool)
    with pytest.raises(UnknownToken):
        table.redeem(token, now_s=200)


async def test_a_region_that_is_gone_when_the_token_is_redeemed_is_a_typed_refusal(daemon: Daemon) -> None:
    token = daemon.channel.issue(GRANT)
    daemon.backend.release(daemon.region)
    with pytest.raises(ChannelRefused) as caught:
        await daemon.fetch(token)
    assert caught.value.refusal == "UNKNOWN_REGION"


async def test_a_read_only_grant_gives_a_read_only_descriptor(daemon: Daemon) -> None:
    grant = FdGrant(owner="", pool=PoolName("m"), rank=0, read_only=True)
    received = await daemon.fetch(daemon.channel.issue(grant))
    assert received.read_only
    with pytest.raises(OSError):
        os.pwrite(received.fds[0], b"x", 0)
    os.close(received.fds[0])
    await asyncio.to_thread(received.lease.unmapped)


async def test_a_region_of_many_chunks_arrives_in_order(tmp_path: Path) -> None:
    backend = CudaVmmBackend(FakeDriver(device_bytes=1 << 30), chunk_bytes=1 << 16)
    region = backend.reserve(RegionRequest(pool=PoolName("m"), rank=0, size_bytes=300 << 16))
    for index, fd in enumerate(backend.open_fds(region)):
        os.pwrite(fd, struct.pack("I", index), 0)
        os.close(fd)
    channel = FdChannel(
        tmp_path / "fd.sock",
        open_region=lambda grant: OpenedRegion(exported=backend.export(region), fds=backend.open_fds(region)),
        on_peer_mapped=lambda mapping: None,
        on_peer_gone=lambda mapping: None,
    )
    await channel.start()
    received = await asyncio.to_thread(fetch_region, str(channel.path), channel.issue(GRANT))
    assert [struct.unpack("I", os.pread(fd, 4, 0))[0] for fd in received.fds] == list(range(300))
    assert received.chunk_sizes_bytes == (1 << 16,) * 300
    for fd in received.fds:
        os.close(fd)
    await asyncio.to_thread(received.lease.unmapped)
    await channel.close()
    backend.close()


async def test_the_socket_has_its_mode_and_group(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "fd.sock", FdChannelOptions(group_gid=os.getegid(), mode=0o660))
    await daemon.channel.start()
    status = os.stat(daemon.path)
    assert (status.st_mode & 0o777, status.st_gid) == (0o660, os.getegid())
    await daemon.channel.close()
    assert not Path(daemon.path).exists()


def test_a_stranger_is_told_who_may_come() -> None:
    """K8S-02."""
    path = Path("/run/kvhold/fd.sock")
    stranger = Peer(pid=1, uid=65534, gid=65534, groups=frozenset())
    with pytest.raises(PeerNotAllowed) as caught:
        check_peer(stranger, path, group_gid=10001)
    assert "65534" in str(caught.value)
    assert str(path) in str(caught.value)
    check_peer(Peer(pid=1, uid=65534, gid=10001, groups=frozenset()), path, group_gid=10001)
    check_peer(Peer(pid=1, uid=65534, gid=65534, groups=frozenset({5, 10001})), path, group_gid=10001)
    check_peer(Peer(pid=0, uid=os.geteuid(), gid=65534, groups=frozenset()), path, group_gid=10001)


def _fetch_as_nobody(path: str, token: bytes, groups: list[int]) -> str:
    """What a process of uid 65534 sees. Forks, because nobody cannot read every interpreter that root runs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups(groups)
        os.setgid(65534)
        os.setuid(65534)
        try:
            answer = f"mapped {fetch_region(path, token).size_bytes}"
        except BaseException as error:
            answer = f"{type(error).__name__} {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize("groups", [[], [10001]])
async def test_another_user_needs_the_sockets_group(groups: list[int]) -> None:
    """K8S-02: a worker that runs as nobody maps if it is in the group, and else reads path, uids and mode."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        daemon = Daemon(Path(directory) / "fd.sock", FdChannelOptions(group_gid=10001))
        await daemon.channel.start()
        answer = await asyncio.to_thread(_fetch_as_nobody, daemon.path, daemon.channel.issue(GRANT), groups)
        await daemon.channel.close()
        if groups:
            assert answer == f"mapped {daemon.region.size_bytes}"
        else:
            assert answer.startswith("ChannelNotReachable"), answer
            assert daemon.path in answer
            assert "uid 65534" in answer
            assert "mode 660" in answer
        daemon.backend.close()


async def test_a_dead_daemons_socket_is_replaced_and_a_live_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "fd.sock"
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(path))
    dead.close()
    daemon = Daemon(path)
    await daemon.channel.start()
    with pytest.raises(SocketInUse):
        await Daemon(path).channel.start()
    received = await daemon.fetch()  # the failed start did not take the socket away
    os.close(received.fds[0])
    await daemon.channel.close()
    path.write_text("not a socket")
    with pytest.raises(SocketInUse):
        await Daemon(path).channel.start()
    assert path.read_text() == "not a socket"


async def test_closing_the_channel_reports_nobody_gone(daemon: Daemon) -> None:
    received = await daemon.fetch()
    await daemon.channel.close()
    assert daemon.names() == ["mapped"]
    await asyncio.to_thread(received.lease.unmapped)  # nobody to tell, and no error
    os.close(received.fds[0])


def test_no_socket_and_a_server_that_is_none_are_typed(tmp_path: Path) -> None:
    with pytest.raises(ChannelNotReachable) as caught:
        fetch_region(str(tmp_path / "none.sock"), b"x" * 16)
    assert caught.value.uid == os.geteuid()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "other.sock"))
    listener.listen(1)
    with pytest.raises(ChannelBroken):
        fetch_region(str(tmp_path / "other.sock"), b"x" * 16, timeout_s=0.2)
    listener.close()
