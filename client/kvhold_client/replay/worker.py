"""One scheduler as a process of its own: `python -m kvhold_client.replay.worker JOB.json`.

Everything that it did is in the shared counters, so that the parent knows it even after SIGKILL. It ends with 0, or
writes why not to stderr. A daemon that is being replaced when it starts is waited for.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvhold_client.client import Client
from kvhold_client.errors import KvholdError, Unreachable
from kvhold_client.replay.counters import DONE, SKIPPED, SharedCounters
from kvhold_client.replay.forward import Forward
from kvhold_client.replay.scheduler import Scheduler, SchedulerLimits
from kvhold_client.replay.stamps import Stamper
from kvhold_client.replay.trace import TraceRow, read_trace

EXIT_FAILED = 1
EXIT_UNREACHABLE = 3
EXIT_MISMATCH = 5
START_WAIT_S = 30.0  # for a daemon that is away; less than what the parent takes for a standstill
START_PAUSE_S = 0.2
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one scheduler process is told."""

    target: str
    pool: str
    client_name: str
    trace: str
    num_rows: int  # of the trace, from its start
    first_row: int  # takes first_row, first_row + stride, … as far as they are not done
    stride: int
    counters: str
    slot: int
    num_slots: int
    limits: SchedulerLimits
    stamp: bool  # write and check bytes
    max_prompt_tokens: int = 0  # 0: any

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> "Job":
        """From JSON."""
        fields = json.loads(text)
        return cls(**{**fields, "limits": SchedulerLimits(**fields["limits"])})


def rows_of(job: Job, counters: SharedCounters) -> Iterator[tuple[int, TraceRow]]:
    """This scheduler's rows that nobody has finished: of a killed predecessor, those that it had begun come first."""
    for index, row in enumerate(read_trace(Path(job.trace), limit=job.num_rows)):
        if index % job.stride != job.first_row or counters.rows[index] in (DONE, SKIPPED):
            continue
        if not job.max_prompt_tokens or row.input_length <= job.max_prompt_tokens:
            yield index, row


def run(job: Job) -> int:
    """Connects, maps, replays."""
    counters = SharedCounters(Path(job.counters), job.num_slots, job.num_rows)
    with Client(job.target) as client:
        pool = once_there(lambda: client.get_pool(job.pool))
        with once_there(lambda: pool.open_session(client_name=job.client_name)) as session:
            memory = pool.map_rank(0, session=session, library="numpy") if job.stamp else None
            forward = None
            if memory is not None:
                forward = Forward(Stamper(memory), session.shape, counters, job.slot)
            scheduler = Scheduler(session, forward, job.limits, counters, job.slot)
            counters.put(job.slot, "ready", 1)
            scheduler.run(rows_of(job, counters))
            counters.put(job.slot, "ended", 1)
            mismatches = forward.mismatches if forward is not None else []
    for text in mismatches[:10]:
        sys.stderr.write(text + "\n")
    return EXIT_MISMATCH if mismatches else 0


def once_there(ask: Callable[[], Result]) -> Result:
    """Its answer, as soon as there is a daemon. Raises Unreachable if none comes in START_WAIT_S."""
    deadline = time.monotonic() + START_WAIT_S
    while True:
        try:
            return ask()
        except Unreachable:
            if time.monotonic() > deadline:
                raise
        time.sleep(START_PAUSE_S)


def main(path: str) -> int:
    """Runs the job in that file. What the daemon or the way to it refuses is one line, not a traceback."""
    try:
        return run(Job.load(Path(path).read_text()))
    except Unreachable as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNREACHABLE
    except KvholdError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
