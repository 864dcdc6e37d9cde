"""Processes that may still write to a pool when its daemon dies: its successor waits for the same ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvhold.v1 import pool_pb2, session_pb2
from kvhold_server.domain.ids import PoolName, SessionId
from kvhold_server.memory.record_slots import RecordSlots, _read_all
from kvhold_server.sessions.quarantine import Evidence
from tests.recovery.test_warm_restart import directory, fill, pool_request, posix
from tests.rpc.harness import RunningDaemon

__all__ = ["directory"]  # the fixture
POOL = PoolName("p")


def export(daemon: RunningDaemon, session_id: str, **fields: bool) -> object:
    return daemon.pools.ExportMemory(pool_pb2.ExportMemoryRequest(pool="p", session_id=session_id, **fields))


def running(daemon: RunningDaemon, session_id: str) -> list[int]:
    found = daemon.node.watch.witnesses(POOL, SessionId(session_id), died_at_s=daemon.node.now_s)
    return [witness.pid for witness in found if witness.evidence is Evidence.RUNNING]


def unwatched(daemon: RunningDaemon, session_id: str) -> list[str]:
    found = daemon.node.watch.witnesses(POOL, SessionId(session_id), died_at_s=daemon.node.now_s)
    return [witness.what for witness in found if witness.evidence is Evidence.UNWATCHED and witness.what != "client"]


@pytest.mark.parametrize("named", [True, False])
async def test_a_worker_that_took_the_memory_by_name_is_waited_for_after_restarts(directory: Path, named: bool) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        session_id = session.opened.session_id
        for _ in range(2):
            await export(daemon, session_id if named else "")
    for _ in range(2):
        async with posix(directory) as daemon:
            assert unwatched(daemon, session_id) == [
                "worker of rank 0" if named else "worker of rank 0 that named no session"
            ]


async def test_at_no_moment_of_a_restart_is_such_a_worker_forgotten(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may be killed again between any two stores."""
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        await export(daemon, session.opened.session_id)
    void = RecordSlots._void
    num_left: list[int] = []

    def watched(records: RecordSlots, slot: int) -> None:
        void(records, slot)
        if records._file.path.name == "workers":
            num_left.append(len(_read_all(records._file, records._slot_bytes)))

    monkeypatch.setattr(RecordSlots, "_void", watched)
    async with posix(directory) as daemon:
        assert unwatched(daemon, session.opened.session_id) == ["worker of rank 0"]
        assert num_left and all(num_left), num_left


async def test_readers_and_workers_that_are_watched_since_are_not_waited_for(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        session_id = session.opened.session_id
        await export(daemon, session_id, read_only=True)
        await export(daemon, session_id)
        daemon.node.worker_mapped(POOL, 0, session_id, 0, is_watched=True)  # the same one, over the fd channel
    async with posix(directory) as daemon:
        assert unwatched(daemon, session_id) == []


async def test_they_are_forgotten_with_their_session_and_with_their_pool(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        await export(daemon, session.opened.session_id)
        await session.step()
        request = session_pb2.CloseSessionRequest(**session.head, completed_step=session.next_step - 1)
        await daemon.sessions.CloseSession(request)
        await daemon.until(lambda: not daemon.node.sessions.sessions())
        await export(daemon, "")
        await daemon.pools.DeletePool(pool_pb2.DeletePoolRequest(name="p", force=True))
        await daemon.pools.OpenPool(pool_request())
    async with posix(directory) as daemon:
        assert unwatched(daemon, session.opened.session_id) == []
        assert daemon.node.warm.former_workers == []


async def test_a_process_that_was_watched_is_watched_again_until_it_ends(directory: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        async with posix(directory) as daemon:
            await daemon.pools.OpenPool(pool_request())
            session = await fill(daemon)
            session_id = session.opened.session_id
            daemon.node.worker_mapped(POOL, 0, session_id, worker.pid, is_watched=True)
        async with posix(directory) as daemon:
            assert running(daemon, session_id) == [worker.pid]
            worker.kill()
            await daemon.until(lambda: running(daemon, session_id) == [])
        async with posix(directory) as daemon:
            assert running(daemon, session_id) == []
    finally:
        worker.kill()
        worker.wait()
