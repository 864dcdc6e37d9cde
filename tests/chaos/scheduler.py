"""One scheduler of the chaos run: `python -m tests.chaos.scheduler JOB.json`. SIGTERM lets it finish what it has begun.

It does what an engine must: a fatal error of its session ends the process, everything else is survived.
"""

import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvhold_client.client import Client, Pool
from kvhold_client.errors import KvholdError, Unavailable, Unreachable
from kvhold_client.mapping_errors import MappingError
from kvhold_client.replay.counters import SharedCounters
from kvhold_client.replay.forward import Forward
from kvhold_client.replay.scheduler import Scheduler, SchedulerLimits
from kvhold_client.replay.stamps import Stamper
from kvhold_client.replay.trace import TraceRow
from kvhold_client.session import Session
from tests.chaos.rows import NUM_ROWS, rows_of

EXIT_WRONG_BYTES = 5
EXIT_FATAL = 7  # fenced, or not resumed in time
EXIT_UNREACHABLE = 8
CONNECT_TIMEOUT_S = 30.0
LIMITS = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len_tokens=4096, step_s=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one scheduler is told."""

    target: str
    pool: str
    name: str
    counters: str
    slot: int
    num_slots: int

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def run(job: Job) -> int:
    """Connects, maps, schedules until told to stop."""
    counters = SharedCounters(Path(job.counters), job.num_slots, NUM_ROWS)
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)

    def rows() -> Iterator[tuple[int, TraceRow]]:
        for item in rows_of(job.slot, job.num_slots, counters):
            if stopping:
                return
            yield item

    with Client(job.target) as client:
        pool, opened = _connect(client, job)
        with opened as session:
            memory = pool.map_rank(0, session=session, library="numpy")
            forward = Forward(Stamper(memory), session.shape, counters, job.slot)
            scheduler = Scheduler(session, forward, LIMITS, counters, job.slot)
            counters.put(job.slot, "ready", 1)
            scheduler.run(rows())
    for text in forward.mismatches[:10]:
        print(text, file=sys.stderr)
    return EXIT_WRONG_BYTES if forward.mismatches else 0


def _connect(client: Client, job: Job) -> tuple[Pool, Session]:
    """As an engine does at its start: waits for a daemon that is away or going away. Every second uses gRPC alone."""
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            pool = client.get_pool(job.pool)
            return pool, pool.open_session(client_name=job.name, local_transport=job.slot % 2 == 0)
        except (Unreachable, Unavailable):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main(path: str) -> int:
    """Exit codes: see above."""
    try:
        return run(Job(**json.loads(Path(path).read_text())))
    except (Unreachable, MappingError) as error:  # the daemon was killed while it handed out the memory
        print(f"unreachable: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    except KvholdError as error:
        if error.is_fatal:
            print(f"fatal: {error}", file=sys.stderr)
            return EXIT_FATAL
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
