"""Two schedulers on one pool, one killed with SIGKILL: what is freed, what stays, and what the other one notices."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from kvhold_client.client import Client
from kvhold_client.leash import leashed
from kvhold_client.local_daemon import LocalDaemon
from kvhold_client.replay.stamps import Stamper
from kvhold_client.session import Session
from tests.e2e import victim
from tests.e2e.conftest import GRACE_PERIOD_S

NUM_PROMPTS = 4
MAX_STALL_S = 0.1
ATTEMPTS = 3  # a machine that does something else for 100 ms is not what is tested


def start_victim(daemon: LocalDaemon, pool: str) -> "tuple[subprocess.Popen[str], dict[str, object]]":
    process = subprocess.Popen(
        leashed(victim.__name__, daemon.target, pool, str(NUM_PROMPTS)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the victim did not get ready"
    return process, json.loads(line)


class Bystander(threading.Thread):
    """The other scheduler: allocates and frees in every step, and notes how long each takes."""

    def __init__(self, session: Session) -> None:
        super().__init__(daemon=True)
        self.session = session
        self.longest_s = 0.0
        self.num_steps = 0
        self.failure: BaseException | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                started = time.perf_counter()
                self.session.begin_step()
                sequence = self.session.table.new_sequence(self.num_steps + 1)
                self.session.table.admit(sequence, num_tokens=40)
                outcome = self.session.table.flush()
                assert outcome.admitted, outcome
                self.session.table.finish(sequence)
                self.longest_s = max(self.longest_s, time.perf_counter() - started)
                self.num_steps += 1
                time.sleep(0.005)
        except BaseException as error:
            self.failure = error


def wait_until_free(client: Client, pool: str, short_id: str) -> float:
    """Seconds until that session is gone: it is listed as long as a block of it waits."""
    started = time.monotonic()
    while True:
        if not any(s.short_id == short_id for s in client.list_sessions(pool)):
            return time.monotonic() - started
        assert time.monotonic() - started < GRACE_PERIOD_S + 10
        time.sleep(0.02)


def test_a_killed_scheduler_frees_its_blocks_in_time_and_nobody_else_stalls(
    daemon: LocalDaemon, client: Client, open_pool: Callable[..., str]
) -> None:
    for attempt in range(ATTEMPTS):
        pool = open_pool(f"crash-{attempt}")
        process, said = start_victim(daemon, pool)
        with client.get_pool(pool).open_session(client_name="bystander") as session:
            bystander = Bystander(session)
            bystander.start()
            time.sleep(0.2)
            held = client.get_pool(pool).status().counts.num_held_blocks
            assert held >= said["held"]  # type: ignore[operator]
            process.send_signal(signal.SIGKILL)
            process.wait()
            took_s = wait_until_free(client, pool, str(said["short_id"]))
            time.sleep(0.2)
            bystander.stop.set()
            bystander.join()
        assert bystander.failure is None
        assert took_s <= GRACE_PERIOD_S + 1.0
        assert bystander.num_steps > 20
        if bystander.longest_s <= MAX_STALL_S:
            return
    raise AssertionError(f"the other scheduler stalled for {bystander.longest_s:.3f} s in each of {ATTEMPTS} attempts")


def test_the_successor_hits_what_its_predecessor_would_have_and_reads_the_right_bytes(
    daemon: LocalDaemon, client: Client, open_pool: Callable[..., str]
) -> None:
    name = open_pool("successor")
    process, said = start_victim(daemon, name)
    process.send_signal(signal.SIGKILL)
    process.wait()
    pool = client.get_pool(name)
    with pool.open_session(client_name="successor") as session, pool.map_rank(0, library="numpy") as memory:
        admitted = victim.admit_prompts(session, list(range(NUM_PROMPTS)))
        assert [hit for _, hit in admitted] == said["would_hit"]
        assert all(hit == victim.PROMPT_BLOCKS * victim.BLOCK_TOKENS for _, hit in admitted)
        stamper = Stamper(memory)
        for number, (sequence, _) in enumerate(admitted):
            blocks = sequence.tables[0][: victim.PROMPT_BLOCKS]
            assert stamper.wrong_blocks(0, blocks, victim.digests(number)) == []
        # What was published by a step that never completed must not be found: its bytes were never written.
        ((_, torn_hit),) = victim.admit_prompts(session, [77])
        assert torn_hit == 4 * victim.BLOCK_TOKENS
        del stamper


def test_after_everybody_left_every_block_is_free_or_cached(
    daemon: LocalDaemon, client: Client, open_pool: Callable[..., str]
) -> None:
    name = open_pool("all-gone")
    process, said = start_victim(daemon, name)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until_free(client, name, str(said["short_id"]))
    counts = client.get_pool(name).status().counts
    assert counts.num_held_blocks == counts.num_quarantined_blocks == 0
    assert counts.num_free_blocks + counts.num_cached_blocks == counts.num_blocks - 1
    assert counts.num_cached_blocks == 4 + NUM_PROMPTS * (victim.PROMPT_BLOCKS - 4)


def test_what_a_dead_scheduler_drew_and_did_not_say_is_nobody_elses_until_its_workers_are_gone(
    client: Client, open_pool: Callable[..., str]
) -> None:
    pool = client.get_pool(open_pool("drawn", num_blocks=40))
    dead = pool.open_session(client_name="draws")
    dead.begin_step()
    sequence = dead.table.new_sequence(1)
    dead.table.admit(sequence, num_tokens=16)
    dead.table.flush()
    dead.begin_step()
    dead.table.extend(sequence, slots_needed=64, processed_tokens=16)
    assert not dead.table.flush().sent
    drawn, short_id = set(sequence.tables[0]), dead.short_id
    assert len(drawn) == 4
    dead.abandon()
    with pool.open_session(client_name="bystander") as other:
        other.begin_step()
        beside = other.table.new_sequence(1)
        other.table.admit(beside, num_tokens=16 * 10)
        assert other.table.flush().admitted
        assert not set(beside.tables[0]) & drawn
        wait_until_free(client, pool.name, short_id)
        other.begin_step()
        rest = other.table.new_sequence(2)
        other.table.admit(rest, num_tokens=16 * 29)
        assert other.table.flush().admitted, "all of it is free again"
        assert drawn <= set(rest.tables[0])


@pytest.mark.parametrize("end", ["close", "idle"])
def test_what_was_drawn_is_told_before_a_scheduler_closes_or_pauses(
    client: Client, open_pool: Callable[..., str], end: str
) -> None:
    """What it filled is hit by others, and what was left of its allotment keeps its hashes."""
    pool = client.get_pool(open_pool(f"told-{end}", num_blocks=34))
    session = pool.open_session(client_name="ends")
    digests = [bytes([number]) * session.shape.hash_size_bytes for number in range(1, 9)]
    first, second = (session.table.new_sequence(number, b"".join(digests[4 * number - 4 :][:4])) for number in (1, 2))
    session.begin_step()
    session.table.admit(first, num_tokens=65)
    session.table.admit(second, num_tokens=65, max_new_tokens=16)
    session.table.flush()
    session.table.finish(first, computed_tokens=64)
    session.begin_step()
    session.table.flush(force=True)
    session.begin_step()
    session.table.extend(second, slots_needed=17, processed_tokens=16)
    session.table.flush()
    session.begin_step()
    session.table.extend(second, slots_needed=64, processed_tokens=16, publish_tokens=64)
    assert not session.table.flush().sent
    session.begin_step()
    session.idle() if end == "idle" else session.close()
    with pool.open_session(client_name="next") as other:
        hits = [other.table.new_sequence(n, b"".join(digests[4 * n - 4 :][:4])) for n in (1, 2)]
        other.begin_step()
        for sequence in hits:
            other.table.admit(sequence, num_tokens=65, max_new_tokens=0)
        admitted = other.table.flush().admitted
        assert [admission.hit_tokens for admission in admitted] == [64, 64]
    session.close()
