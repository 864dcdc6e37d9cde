"""The daemon is killed and started again: sessions go on by themselves, caches are warm, what is lost is said."""

import asyncio
import hashlib
import time
from collections.abc import Callable

import pytest

from kvhold_client.aio import AsyncClient
from kvhold_client.client import Client, Pool
from kvhold_client.errors import Unreachable
from kvhold_client.local_daemon import LocalDaemon
from kvhold_client.pools import PoolRequest
from kvhold_client.replay.stamps import Stamper
from kvhold_client.session import Session
from tests.e2e.conftest import tiny_plan

NUM_TOKENS = 165
HASHES = hashlib.shake_256(b"prompt").digest(10 * 32)
DIGESTS = [HASHES[i : i + 32] for i in range(0, len(HASHES), 32)]


@pytest.fixture
def own_daemon(tmp_path_factory: pytest.TempPathFactory) -> "LocalDaemon":
    pytest.importorskip("prometheus_client")
    return LocalDaemon("--grace-period-s", "8", directory=tmp_path_factory.mktemp("d"))


WAYS = {  # of steps: by name of `Session.transport`
    "local": {},
    "grpc": {"local_transport": False},
    "grpc-unary": {"local_transport": False, "step_stream": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_session_outlives_its_daemon(own_daemon: LocalDaemon, way: str) -> None:
    with own_daemon, Client(own_daemon.target) as client:
        pool = client.open_pool(PoolRequest(name="warm", plan=tiny_plan(64), model="tiny"))
        lost: list[list[int]] = []
        session = pool.open_session(on_lost=lost.append, **WAYS[way])
        assert session.transport == way
        memory = pool.map_rank(0, session=session, library="numpy")
        stamper = Stamper(memory)
        session.begin_step()
        first = session.table.new_sequence(1, HASHES)
        session.table.admit(first, num_tokens=NUM_TOKENS)
        (admission,) = session.table.flush().admitted
        assert admission.hit_tokens == 0
        stamper.write(0, first.tables[0][:10], DIGESTS)
        session.idle()
        epoch = session.epoch

        own_daemon.kill()
        own_daemon.start()

        session.begin_step()
        second = session.table.new_sequence(2, HASHES)
        session.table.admit(second, num_tokens=NUM_TOKENS)
        (admission,) = session.table.flush().admitted
        assert session.epoch > epoch and session.transport == way
        assert not lost
        assert admission.hit_tokens == 160, "what was published and complete is still cached"
        assert second.tables[0][:10] == first.tables[0][:10], "and it is the same blocks, which we still hold"
        assert stamper.wrong_blocks(0, second.tables[0][:10], DIGESTS) == []
        assert pool.status().counts.num_held_blocks == 12
        session.table.finish(first)
        session.table.finish(second)
        session.idle()
        assert pool.status().counts.num_held_blocks == 0
        session.close()
        del stamper
        memory.unmap()
        client.delete_pool("warm", force=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_under_way_when_the_daemon_is_killed_is_applied_once(own_daemon: LocalDaemon, way: str) -> None:
    """Sent, and the daemon is dead before the answer is read: the step is sent again to the next daemon."""
    with own_daemon, Client(own_daemon.target) as client:
        pool = client.open_pool(PoolRequest(name="under-way", plan=tiny_plan(64), model="tiny"))
        with pool.open_session(**WAYS[way]) as session:
            session.begin_step()
            session.table.admit(session.table.new_sequence(1, HASHES), num_tokens=NUM_TOKENS)
            session.table.flush()
            session.begin_step()
            second = session.table.new_sequence(2)
            session.table.admit(second, num_tokens=NUM_TOKENS)
            session.table.submit()
            own_daemon.kill()
            own_daemon.start()
            (admission,) = session.table.collect().admitted
            assert admission.sequence is second and len(second.tables[0]) == 11
            assert session.transport == way
            assert pool.status().counts.num_held_blocks == 22, "once each"
            session.idle()
        client.delete_pool("under-way", force=True)


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_of_the_former_daemon_is_not_taken_after_the_session_has_moved_on(
    own_daemon: LocalDaemon, way: str
) -> None:
    """Applied, answered, and not read yet when a resume in the background says what we hold: without that step."""
    with own_daemon, Client(own_daemon.target) as client:
        pool = client.open_pool(PoolRequest(name="answered", plan=tiny_plan(64), model="tiny"))
        with pool.open_session(**WAYS[way]) as session:
            session.begin_step()
            first = session.table.new_sequence(1, HASHES)
            session.table.admit(first, num_tokens=NUM_TOKENS)
            session.table.flush()
            epoch = session.epoch
            session.begin_step()
            second = session.table.new_sequence(2)
            session.table.admit(second, num_tokens=NUM_TOKENS)
            session.table.submit()
            _until(lambda: pool.status().counts.num_held_blocks == 22, "the daemon applied it")
            own_daemon.kill()
            own_daemon.start()
            _until(lambda: session.epoch > epoch, "the background resumed")
            (admission,) = session.table.collect().admitted
            assert admission.sequence is second and len(second.tables[0]) == 11
            assert pool.status().counts.num_held_blocks == 22, "once each"
            assert not set(first.tables[0]) & set(second.tables[0])
            session.idle()
        client.delete_pool("answered", force=True)


def _until(is_so: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.02)
    pytest.fail(f"not in 20 s: {what}")


def test_an_asyncio_session_outlives_its_daemon_too(own_daemon: LocalDaemon) -> None:
    async def scenario() -> "tuple[int, int]":
        async with AsyncClient(own_daemon.target) as client:
            pool = await client.open_pool(PoolRequest(name="warm-aio", plan=tiny_plan(64), model="tiny"))
            async with await pool.open_session() as session:
                session.begin_step()
                session.table.admit(session.table.new_sequence(1, HASHES), num_tokens=NUM_TOKENS)
                await session.flush()
                await session.idle()
                await asyncio.to_thread(own_daemon.kill)
                await asyncio.to_thread(own_daemon.start)
                session.begin_step()
                session.table.admit(session.table.new_sequence(2, HASHES), num_tokens=NUM_TOKENS)
                (admission,) = (await session.flush()).admitted
                return admission.hit_tokens, session.epoch

    with own_daemon:
        hit_tokens, epoch = asyncio.run(scenario())
        with Client(own_daemon.target) as client:
            client.delete_pool("warm-aio", force=True)
    assert hit_tokens == 160
    assert epoch > 1


def test_a_daemon_that_stays_away_is_reported_as_unreachable_not_as_lost_data(own_daemon: LocalDaemon) -> None:
    """Steps that cannot be sent say so; nothing of the mirror is thrown away."""
    own_daemon._flags = ("--grace-period-s", "1")
    with own_daemon:
        client = Client(own_daemon.target, timeout_s=2.0)
        pool = client.open_pool(PoolRequest(name="away", plan=tiny_plan(64), model="tiny"))
        session = pool.open_session()
        session.begin_step()
        sequence = session.table.new_sequence(1, HASHES)
        session.table.admit(sequence, num_tokens=NUM_TOKENS)
        session.table.flush()
        own_daemon.kill()
        session.begin_step()
        session.table.extend(sequence, slots_needed=200, processed_tokens=170)
        with pytest.raises(Unreachable):
            session.table.flush()
        assert len(sequence.tables[0]) == 11
        client.close()
        own_daemon.start()
        with Client(own_daemon.target) as again:
            again.delete_pool("away", force=True)


def opened_in_time(pool: Pool) -> Session:
    """A new session: unlike one that resumes, it is not tried again while the connection comes back."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return pool.open_session(client_name="another")
        except Unreachable:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_drawn_and_not_said_is_still_ours_after_a_restart(own_daemon: LocalDaemon, way: str) -> None:
    """The daemon dies without having heard of blocks that were written already; nobody else gets or hits them."""
    with own_daemon, Client(own_daemon.target) as client:
        pool = client.open_pool(PoolRequest(name="drawn", plan=tiny_plan(40), model="tiny"))
        lost: list[list[int]] = []
        with pool.open_session(on_lost=lost.append, **WAYS[way]) as session:
            table = session.table
            session.begin_step()
            cached, running = table.new_sequence(1, HASHES), table.new_sequence(2)
            for sequence, num_tokens in ((cached, NUM_TOKENS), (running, 448)):
                table.admit(sequence, num_tokens=num_tokens)
            assert len(table.flush().admitted) == 2
            table.finish(cached, computed_tokens=NUM_TOKENS)
            session.idle()  # nothing is free but blocks with hashes, and one without
            session.begin_step()
            table.extend(running, slots_needed=464, processed_tokens=448, publish_tokens=448)
            assert table.flush().sent, "nothing is allotted over a pause"
            session.begin_step()
            table.extend(running, slots_needed=496, processed_tokens=448, publish_tokens=448)
            outcome = table.flush()
            assert outcome.extended == [running] and not outcome.sent
            ours = set(running.tables[0])
            assert len(ours) == 31

            own_daemon.kill()
            own_daemon.start()

            with opened_in_time(pool) as other:
                other.begin_step()
                hitting = other.table.new_sequence(1, HASHES[: 8 * 32])
                other.table.admit(hitting, num_tokens=128)
                (admission,) = other.table.flush().admitted
                assert admission.hit_tokens == 0, "nobody knows which of the allotted blocks were written to"
                assert not set(hitting.tables[0]) & ours and len(hitting.tables[0]) == 8
                session.begin_step()
                table.flush(force=True)
                assert not lost and set(running.tables[0]) == ours
                assert pool.status().counts.num_held_blocks == 39
                other.table.finish(hitting)
                other.idle()
            table.finish(running)
            session.idle()
            assert pool.status().counts.num_held_blocks == 0
        client.delete_pool("drawn", force=True)
