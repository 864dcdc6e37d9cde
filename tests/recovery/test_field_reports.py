"""What went wrong in other daemons of this kind (field reports DMN-*), against ours, over real sockets."""

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvhold.v1 import block_pb2, pool_pb2, session_pb2
from kvhold_client.leash import leashed
from kvhold_server.domain.pool_config import GroupConfig, GroupKind, PoolConfig
from kvhold_server.memory.errors import DriverCallFailed
from kvhold_server.memory.segment_names import instance_digest
from kvhold_server.pool.restore import RecordedBlocks, restore_cached, restore_order
from tests.model.by_hand import HandPool
from tests.rpc.harness import RunningDaemon, llama, refused, running

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for a socket's path."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
    for left in segments(path):
        left.unlink()


def segments(directory: Path) -> list[Path]:
    """Memory and lock of the daemons of one directory; others may be running beside this test."""
    return sorted(Path("/dev/shm").glob(f"kvhold.{instance_digest(directory)}.*"))


def pool_request(name: str = "p", **fields: Any) -> pool_pb2.OpenPoolRequest:
    options = pool_pb2.PoolOptions(enable_prefix_caching=True)
    return pool_pb2.OpenPoolRequest(**{"name": name, "plan": llama(), "options": options} | fields)


class Blocked:
    """A backend's call that takes as long as the test wants."""

    def __init__(self, daemon: RunningDaemon, call: str) -> None:
        self._backend = daemon.daemon.backends["fake"]
        self._call = call
        self._original = getattr(self._backend, call)
        self.entered = threading.Event()
        self.may_go_on = threading.Event()
        setattr(self._backend, call, self._wait)

    def _wait(self, *arguments: Any) -> Any:
        self.entered.set()
        assert self.may_go_on.wait(timeout=30)
        return self._original(*arguments)

    def end(self) -> None:
        """Lets the call and later ones through."""
        setattr(self._backend, self._call, self._original)
        self.may_go_on.set()


async def test_dmn_01_a_client_that_dies_before_its_first_request_is_cleaned_up(directory: Path) -> None:
    async with running(directory, grace_period_s=0.2) as daemon:
        await daemon.open_pool()
        await daemon.open_session(client_name="engine")  # and never anything again
        await daemon.until(lambda: not daemon.node.sessions.sessions())
        await daemon.open_session(client_name="engine")


async def test_dmn_03_giving_memory_back_for_a_minute_holds_up_nobody(directory: Path) -> None:
    async with running(directory) as daemon:
        await daemon.pools.OpenPool(pool_request("slow"))
        await daemon.open_pool()
        release = Blocked(daemon, "release")
        deletion = asyncio.ensure_future(daemon.pools.DeletePool(pool_pb2.DeletePoolRequest(name="slow")))
        await daemon.until(release.entered.is_set)
        session = await daemon.open_session()
        latencies = []
        for number in range(1, 51):
            started = time.perf_counter()
            await session.admit(number, 17, number)
            latencies.append(time.perf_counter() - started)
        assert sorted(latencies)[45] < 0.25, "milliseconds on an idle machine, while the other call still waits"
        assert (await refused(daemon.pools.OpenPool(pool_request("slow")))).reason == "POOL_BUSY"
        release.end()
        await deletion
        daemon.check()


async def test_dmn_04_a_newcomer_does_not_wait_for_old_memory(directory: Path) -> None:
    async with running(directory) as daemon:
        await daemon.pools.OpenPool(pool_request("old"))
        release = Blocked(daemon, "release")
        deletion = asyncio.ensure_future(daemon.pools.DeletePool(pool_pb2.DeletePoolRequest(name="old")))
        await daemon.until(release.entered.is_set)
        opened = await asyncio.wait_for(daemon.pools.OpenPool(pool_request("standby")), timeout=5)
        assert opened.outcome == pool_pb2.OPEN_POOL_OUTCOME_FRESH
        release.end()
        assert (await deletion).freed_bytes > 0


def test_dmn_05_cleaning_up_costs_what_the_client_held_not_what_the_pool_holds() -> None:
    """A hundred blocks of one client in a pool that caches 200 000 of others."""
    num_blocks = 200_000
    config = PoolConfig(
        groups=(GroupConfig(kind=GroupKind.FULL, block_size_tokens=16),),
        num_blocks=num_blocks,
        hash_unit_tokens=16,
        scheduler_block_tokens=16,
        max_model_len=100_000,
    )
    pool = HandPool(config)
    cached = list(range(1000, num_blocks))
    hashes = [block.to_bytes(16, "big") for block in cached]
    tokens = array("i", [16]) * len(cached)
    columns = RecordedBlocks(blocks=cached, groups=[0] * len(cached), hashes=hashes, key_tokens=tokens)
    restore_cached(pool, columns)
    restore_order(pool, cached)
    session = pool.open_session()
    pool.admit(session, 1, num_tokens=1600, token_budget=1600, hashes=[b"own %12d" % i for i in range(100)])
    started = time.process_time()
    pool.kill_session(session)
    assert pool.reap(session, 10_000)
    assert pool.release_quarantine(session, 10_000)
    assert time.process_time() - started < 0.05
    assert pool.counts().held == 0


async def test_dmn_06_what_a_dead_writer_had_begun_can_be_written_by_the_next_one(directory: Path) -> None:
    async with running(directory, grace_period_s=0.5) as daemon:
        await daemon.open_pool()
        writer = await daemon.open_session()
        await writer.keep_alive()
        await writer.admit(1, 33, 1, 2)
        writer.break_stream()
        second = await daemon.open_session()
        await second.keep_alive()
        answer = await second.admit(1, 33, 1, 2)
        assert list(answer.admit.statuses) == [block_pb2.ITEM_STATUS_OK], "at once: nobody waits for the dead"
        assert list(answer.admit.hit_tokens) == [0], "and what was not complete is not seen"
        await daemon.until(lambda: len(daemon.node.sessions.sessions()) == 1)
        daemon.check()


def _serve(directory: Path) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ, PYTHONPATH=":".join(str(REPO / part) for part in ("proto", "server", "client")))
    command = leashed("kvhold_server", "serve", "--socket", str(directory / "k.sock"))
    log = (directory / "log").open("ab")
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)


def _open_pool_when_up(directory: Path, request: pool_pb2.OpenPoolRequest) -> pool_pb2.OpenPoolResponse:
    from kvhold.v1 import pool_pb2_grpc

    options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 500)]
    with grpc.insecure_channel(f"unix:{directory / 'k.sock'}", options=options) as channel:
        return pool_pb2_grpc.PoolServiceStub(channel).OpenPool(request, wait_for_ready=True, timeout=60)


@pytest.mark.slow
def test_dmn_08_five_kills_leave_the_memory_of_one_instance_and_the_next_start_works(directory: Path) -> None:
    outcomes = []
    for _ in range(5):
        daemon = _serve(directory)
        try:
            outcomes.append(_open_pool_when_up(directory, pool_request()).outcome)
        finally:
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
    left = [path for path in segments(directory) if path.suffix != ".lock"]
    assert len(left) == 1 and left[0].stat().st_size <= 9 << 20
    assert outcomes == [pool_pb2.OPEN_POOL_OUTCOME_FRESH, *[pool_pb2.OPEN_POOL_OUTCOME_RECOVERED] * 4]


@pytest.mark.slow
def test_a_second_daemon_on_one_directory_refuses_with_the_pid_of_the_first(directory: Path) -> None:
    first = _serve(directory)
    try:
        _open_pool_when_up(directory, pool_request())
        second = _serve(directory)
        assert second.wait(timeout=20) == 1
        assert f"pid {first.pid}" in (directory / "log").read_text()
        _open_pool_when_up(directory, pool_request())
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()


async def test_dmn_09_a_segment_that_vanishes_under_a_running_engine_hurts_nobody(directory: Path) -> None:
    async with running(directory, backend="posix_shm", keep_pools=False) as daemon:
        await daemon.pools.OpenPool(pool_request())
        export = await daemon.pools.ExportMemory(pool_pb2.ExportMemoryRequest(pool="p", rank=0))
        Path("/dev/shm", export.regions[0].shm_name).unlink()
        session = await daemon.open_session()
        answer = await session.admit(1, 33, 1, 2)
        assert list(answer.admit.statuses) == [block_pb2.ITEM_STATUS_OK]
        again = await daemon.pools.ExportMemory(pool_pb2.ExportMemoryRequest(pool="p", rank=0))
        assert again.regions[0].fd_token and not again.regions[0].shm_name, "served by descriptor from now on"


async def test_dmn_10_a_caller_of_a_stuck_mapping_gets_its_deadline_and_the_daemon_goes_on(directory: Path) -> None:
    async with running(directory) as daemon:
        reserve = Blocked(daemon, "reserve")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await daemon.pools.OpenPool(pool_request(), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await daemon.open_pool("other")
        reserve.end()
        for _ in range(100):
            try:
                opened = await daemon.pools.OpenPool(pool_request())
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.ABORTED, "busy, until the abandoned call is undone"
                await asyncio.sleep(0.05)
        # The abandoned call may have made it after all; either way it is there once.
        assert opened.outcome in (pool_pb2.OPEN_POOL_OUTCOME_FRESH, pool_pb2.OPEN_POOL_OUTCOME_ATTACHED)
        assert len(daemon.daemon.backends["fake"].usage().holdings) == 1


@pytest.mark.parametrize("fail_at", [1, 2, 3])
async def test_dmn_11_a_rank_that_fails_gives_back_the_ones_before_it(directory: Path, fail_at: int) -> None:
    async with running(directory) as daemon:
        backend: Any = daemon.daemon.backends["fake"]
        backend.inject("reserve", DriverCallFailed("create", 999, "UNKNOWN", "injected"), after=fail_at - 1)
        request = pool_request(plan=llama(num_ranks=3))
        assert (await refused(daemon.pools.OpenPool(request))).code is grpc.StatusCode.INTERNAL
        assert not backend.usage().holdings
        await daemon.pools.OpenPool(request)
        assert len(backend.usage().holdings) == 3


async def test_dmn_14_the_binder_chooses_the_port_and_a_taken_one_fails_at_once(directory: Path) -> None:
    async with running(directory, socket="", tcp="127.0.0.1:0", state_dir=str(directory / "0")) as first:
        ports = {first.daemon.tcp_port}
        for number in range(1, 8):
            settings = {"socket": "", "tcp": "127.0.0.1:0", "state_dir": str(directory / str(number))}
            async with running(directory, **settings) as other:
                assert other.daemon.tcp_port not in (0, first.daemon.tcp_port)
                ports.add(other.daemon.tcp_port)
        started = time.monotonic()
        with pytest.raises(Exception, match=str(first.daemon.tcp_port)):
            async with running(
                directory, socket="", tcp=f"127.0.0.1:{first.daemon.tcp_port}", state_dir=str(directory / "x")
            ):
                pass
        assert time.monotonic() - started < 1.0
        assert len(ports) >= 2


async def test_dmn_15_the_former_owner_is_fenced_in_every_mutating_call(directory: Path) -> None:
    async with running(directory) as daemon:
        await daemon.open_pool()
        old = await daemon.open_session()
        await old.admit(1, 33, 1, 2)
        request = session_pb2.OpenSessionRequest(pool="p", resume_token=old.opened.resume_token)
        await daemon.sessions.OpenSession(request)
        head = old.head
        calls = [
            daemon.blocks.Step(block_pb2.StepRequest(**head, step=2)),
            daemon.blocks.Allocate(block_pb2.AllocateRequest(**head, step=2)),
            daemon.blocks.Publish(block_pb2.PublishRequest(**head, step=2)),
            daemon.blocks.Free(block_pb2.FreeRequest(**head, step=2)),
            daemon.sessions.CloseSession(session_pb2.CloseSessionRequest(**head)),
        ]
        for call in calls:
            refusal = await refused(call)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_FENCED")
        assert daemon.node.pools["p"].pool.counts().held == 3  # type: ignore[index]


async def test_dmn_16_a_second_engine_gets_what_it_asks_for_not_what_the_first_left(directory: Path) -> None:
    async with running(directory) as daemon:
        first = await daemon.pools.OpenPool(pool_request("first"))
        second = await daemon.pools.OpenPool(pool_request("second"))
        assert second.pool.counts.num_blocks == first.pool.counts.num_blocks > 0


async def test_a_holder_of_100_000_blocks_dies_and_others_step_on(directory: Path) -> None:
    """Liveness, point 3 of the issue: the work is sliced, and other sessions' steps wait for one slice at most."""
    async with running(directory, grace_period_s=0.1) as daemon:
        await daemon.open_pool(num_blocks=100_200)
        holder = await daemon.open_session()
        await holder.keep_alive()
        for number in range(1, 25):
            hashes = range(number * 10_000, number * 10_000 + 4095)
            await holder.admit(number, 65_530, *hashes)
        await holder.step()
        live = daemon.node.pools["p"]  # type: ignore[index]
        assert live.pool.counts().held > 98_000
        other = await daemon.open_session()
        await other.keep_alive()
        holder.break_stream()
        worst = 0.0
        while len(daemon.node.sessions.sessions()) > 1:
            started = time.thread_time()
            daemon.node.tick()  # what a step can have in front of it
            worst = max(worst, time.thread_time() - started)
            await asyncio.sleep(0)
        counts = live.pool.counts()
        assert counts.held == counts.quarantined == 0 and counts.cached > 98_000
        assert worst < 0.02, f"a slice took {worst * 1000:.1f} ms"
