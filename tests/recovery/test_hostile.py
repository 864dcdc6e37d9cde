"""Clients that misbehave, and machines that run out: bounded, typed, and nobody else notices."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import patch

import grpc
import pytest

from kvhold.v1 import block_pb2, pool_pb2, session_pb2
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.memory.errors import SystemCallFailed
from kvhold_server.memory.segment_names import instance_digest
from tests.rpc.harness import digest, llama, refused, running


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for a socket's path."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    for left in Path("/dev/shm").glob(f"kvhold.{instance_digest(path)}.*"):
        left.unlink()
    shutil.rmtree(path, ignore_errors=True)


async def test_nobody_frees_anothers_sequence(directory: Path) -> None:
    async with running(directory) as daemon:
        await daemon.open_pool()
        owner, stranger = await daemon.open_session(), await daemon.open_session()
        await owner.admit(1, 33, 1, 2)
        answer = await stranger.free(1)
        assert list(answer.num_freed_blocks) == [0]
        assert answer.counts.num_held_blocks == 3
        daemon.check()


async def test_guessed_sessions_are_unknown_and_errors_repeat_no_secret(directory: Path) -> None:
    async with running(directory) as daemon:
        await daemon.open_pool()
        session = await daemon.open_session()
        real = session.opened.session_id
        for guess in ("", "x", real[:-1], real + "A", real.swapcase(), "\N{SNOWMAN}" * 100):
            refusal = await refused(daemon.blocks.Step(block_pb2.StepRequest(session_id=guess, epoch=1, step=1)))
            assert refusal.code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT), guess
            assert real not in refusal.message and real not in str(refusal.metadata)
        request = session_pb2.OpenSessionRequest(pool="p", resume_token=real)
        assert (await refused(daemon.sessions.OpenSession(request))).reason == "RESUME_REFUSED"


async def test_a_flood_of_sessions_is_bounded_and_passes(directory: Path) -> None:
    limits = ServiceLimits(max_sessions=50, max_sessions_per_pool=40)
    async with running(directory, limits=limits, grace_period_s=2.0) as daemon:
        await daemon.open_pool()
        engine = await daemon.open_session()
        await engine.keep_alive()
        opens = [daemon.sessions.OpenSession(session_pb2.OpenSessionRequest(pool="p")) for _ in range(200)]
        answers = await asyncio.gather(*opens, return_exceptions=True)
        refusals = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert 100 < len(refusals) <= 200 - 39, "fewer only where the machine is so slow that some expire meanwhile"
        assert len(daemon.node.sessions.sessions()) <= 50
        assert {error.code() for error in refusals} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        answer = await engine.admit(1, 33, 1, 2)
        assert list(answer.admit.statuses) == [block_pb2.ITEM_STATUS_OK], "who is there works on"
        await daemon.until(lambda: len(daemon.node.sessions.sessions()) == 1, timeout_s=20.0)
        await daemon.open_session()
        daemon.check()


async def test_a_half_open_connection_is_noticed_by_its_silence(directory: Path) -> None:
    async with running(directory, lease_ttl_s=0.3, grace_period_s=0.2) as daemon:
        await daemon.open_pool()
        session = await daemon.open_session()
        await session.admit(1, 33, 1, 2)
        silent = asyncio.Event()

        async def messages() -> AsyncIterator[session_pb2.KeepAliveRequest]:
            yield session_pb2.KeepAliveRequest(**session.head)
            await silent.wait()  # connected, and never heard of again

        stream = daemon.sessions.KeepAlive(messages())
        await stream.read()
        await daemon.until(lambda: not daemon.node.sessions.sessions())
        assert daemon.node.pools["p"].pool.counts().held == 0  # type: ignore[index]
        silent.set()
        stream.cancel()


async def test_a_full_disk_under_the_state_directory_refuses_the_pool_and_leaves_nothing(directory: Path) -> None:
    async with running(directory, backend="posix_shm", keep_pools=True) as daemon:
        request = pool_pb2.OpenPoolRequest(
            name="p", plan=llama(), options=pool_pb2.PoolOptions(enable_prefix_caching=True)
        )
        full = SystemCallFailed("write", "pools/p.json", 28, "ENOSPC", "No space left on device")
        with patch("kvhold_server.memory.pool_manifest.ManifestDirectory.save", side_effect=full):
            refusal = await refused(daemon.pools.OpenPool(request))
        assert "No space left" in refusal.message
        found = Path("/dev/shm").glob(f"kvhold.{instance_digest(directory)}.*")
        assert [path.name for path in found if path.suffix != ".lock"] == []
        opened = await daemon.pools.OpenPool(request)
        assert opened.outcome == pool_pb2.OPEN_POOL_OUTCOME_FRESH


async def test_lookups_by_the_thousand_do_not_keep_a_scheduler_waiting(directory: Path) -> None:
    async with running(directory) as daemon:
        await daemon.open_pool()
        engine = await daemon.open_session()
        await engine.keep_alive()
        items = block_pb2.LookupItems(num_tokens=[17], num_hashes=[1], hashes=digest(1))
        flood = [daemon.blocks.Lookup(block_pb2.LookupRequest(pool="p", lookup=items)) for _ in range(1000)]
        answer = await asyncio.wait_for(engine.admit(1, 33, 1, 2), timeout=20)
        assert list(answer.admit.statuses) == [block_pb2.ITEM_STATUS_OK]
        assert len(await asyncio.gather(*flood)) == 1000
