"""Runs scheduler processes over a trace, kills one if asked, and gathers what they did.

rows 0 2 4 …  ─▶ scheduler 0 ──╳ SIGKILL        daemon: grace period, then its blocks are free;
                               └▶ successor      what it had published and completed stays: the successor hits it
rows 1 3 5 …  ─▶ scheduler 1 ─────────────────▶
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvhold_client.client import Client, PoolStatus
from kvhold_client.errors import Unreachable
from kvhold_client.leash import leashed
from kvhold_client.local_daemon import daemon_environment
from kvhold_client.replay.counters import DONE, LIVE, SKIPPED, SharedCounters
from kvhold_client.replay.metrics_page import MetricsPage, fetch_metrics
from kvhold_client.replay.scheduler import MAX_HEADS, SchedulerLimits
from kvhold_client.replay.worker import EXIT_UNREACHABLE, Job

POLL_S = 0.05
SETTLE_S = 3.0  # the metrics page may be a moment behind
STALL_S = 60.0  # nobody computed a token for so long: something is stuck
RELEASE_S = 30.0  # how long a dead session's blocks are waited for once everything else is over


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What to run."""

    target: str
    pool: str
    trace: Path
    num_rows: int
    num_schedulers: int
    limits: SchedulerLimits
    stamp: bool
    directory: Path  # for counters and jobs
    kill_one_after_s: float | None = None
    metrics_url: str = ""
    max_prompt_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class KillReport:
    """What became of the killed scheduler."""

    name: str
    at_s: float
    num_rows_begun: int  # that it had begun and not finished
    held_blocks: int  # when it was killed
    was_in_call: bool
    freed_after_s: float | None = None  # its session was gone, and its blocks free


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartReport:
    """The daemon was replaced in the middle: what its successor began with, and what that cost."""

    num_restarts: int  # that one scheduler met; several at once may have looked like one
    outcome: str  # of the pool in the daemon of now: recovered or fresh
    reason: str  # why it was fresh
    num_recovered_blocks: int
    num_lost_sequences: int  # admitted and computed again


@dataclass(slots=True, kw_only=True)
class ReplayResult:
    """What happened."""

    seconds: float
    counters: SharedCounters
    before: PoolStatus
    after: PoolStatus
    page_before: MetricsPage | None
    page_after: MetricsPage | None
    num_rows: int
    num_left_out: int
    max_call_tokens: int  # of the prompts that one call may admit
    kill: KillReport | None
    kill_was_asked: bool
    restarts: RestartReport | None
    failures: list[str] = field(default_factory=list)


class _StallWatch:
    """Notices that no work is done any more."""

    def __init__(self) -> None:
        self._last_tokens = -1
        self._since_s = 0.0

    def is_stalled(self, counters: SharedCounters, now_s: float) -> bool:
        tokens = counters.total("prefill_tokens") + counters.total("generated_tokens") + counters.total("ready")
        if tokens != self._last_tokens:
            self._last_tokens, self._since_s = tokens, now_s
        return now_s - self._since_s > STALL_S


class Replay:
    """One run. `execute` returns when every scheduler has ended."""

    def __init__(self, plan: ReplayPlan, client: Client, on_progress: Callable[[SharedCounters, float], None]) -> None:
        self._plan = plan
        self._client = client
        self._on_progress = on_progress
        self._num_slots = plan.num_schedulers + (plan.kill_one_after_s is not None)
        self._counters = SharedCounters(plan.directory / "counters", self._num_slots, plan.num_rows)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, Path] = {}
        self._kill: KillReport | None = None
        self._victim_session = ""

    def execute(self) -> ReplayResult:
        """Starts, watches, kills, waits, gathers. Raises KvholdError if the daemon goes away."""
        plan = self._plan
        pool = self._client.get_pool(plan.pool)
        before, page_before = pool.status(), self._page()
        started = time.monotonic()
        with self._ending_all():
            for slot in range(plan.num_schedulers):
                self._start(slot, first_row=slot, name=f"scheduler-{slot}")
            failures = self._watch(started)
        seconds = time.monotonic() - started
        after, restarts = pool.status(), self._restarts()
        return ReplayResult(
            seconds=seconds,
            counters=self._counters,
            before=before,
            after=after,
            page_before=page_before,
            page_after=self._settled_page(page_before) if restarts is None else None,
            num_rows=plan.num_rows,
            num_left_out=sum(state not in (DONE, SKIPPED) for state in self._counters.rows[: plan.num_rows]),
            max_call_tokens=MAX_HEADS * plan.limits.max_model_len_tokens,
            kill=self._kill,
            kill_was_asked=plan.kill_one_after_s is not None,
            restarts=restarts,
            failures=failures,
        )

    def _restarts(self) -> RestartReport | None:
        counters = self._counters
        num_met = max(counters.get(slot, "daemon_restarts") for slot in range(counters.num_slots))
        if not num_met:
            return None
        info = self._client.get_pool(self._plan.pool).info
        return RestartReport(
            num_restarts=num_met,
            outcome=info.outcome,
            reason=info.recovery_reason,
            num_recovered_blocks=info.num_recovered_blocks,
            num_lost_sequences=counters.total("lost_sequences"),
        )

    # ------------------------------------------------------------------------------------------------- processes
    def _start(self, slot: int, *, first_row: int, name: str) -> None:
        plan = self._plan
        job = Job(
            target=plan.target,
            pool=plan.pool,
            client_name=name,
            trace=str(plan.trace.resolve()),
            num_rows=plan.num_rows,
            first_row=first_row,
            stride=plan.num_schedulers,
            counters=str(plan.directory / "counters"),
            slot=slot,
            num_slots=self._num_slots,
            limits=plan.limits,
            stamp=plan.stamp,
            max_prompt_tokens=plan.max_prompt_tokens,
        )
        path = plan.directory / f"job-{slot}.json"
        path.write_text(job.dump())
        self._logs[slot] = plan.directory / f"scheduler-{slot}.log"
        with self._logs[slot].open("wb") as log:
            self._processes[slot] = subprocess.Popen(
                leashed("kvhold_client.replay.worker", str(path)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=daemon_environment(),
            )

    def _watch(self, started: float) -> list[str]:
        """Until all have ended. Returns what those said that failed."""
        failures: list[str] = []
        running = dict(self._processes)
        ready_at: float | None = None
        watch = _StallWatch()
        while running or self._is_waiting_for_release(time.monotonic() - started):
            now = time.monotonic()
            if running and watch.is_stalled(self._counters, now):
                return [*failures, f"no scheduler computed a token for {STALL_S:g} s: given up"]
            if ready_at is None and all(self._counters.get(slot, "ready") for slot in range(self._plan.num_schedulers)):
                ready_at = now
            if ready_at is not None and self._kill is None and self._is_time_to_kill(now - ready_at):
                victim = self._busiest(running)
                if victim is not None:
                    del running[victim]
                    self._kill_and_replace(victim, now - started)
                    running[self._num_slots - 1] = self._processes[self._num_slots - 1]
            for slot, process in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    if process.returncode == EXIT_UNREACHABLE:
                        raise Unreachable(self._failure(slot, process.returncode))
                    if process.returncode:
                        failures.append(self._failure(slot, process.returncode))
            self._look_for_release(now - started)
            self._on_progress(self._counters, now - started)
            time.sleep(POLL_S)
        return failures

    def _failure(self, slot: int, code: int) -> str:
        tail = self._logs[slot].read_text(errors="replace").strip().splitlines()[-8:]
        return f"scheduler {slot} ended with {code}: " + "\n  ".join(tail)

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        try:
            yield
        finally:
            for process in self._processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
                assert process.stdin is not None
                process.stdin.close()

    # --------------------------------------------------------------------------------------------------- the kill
    def _is_time_to_kill(self, elapsed_s: float) -> bool:
        after_s = self._plan.kill_one_after_s
        return after_s is not None and elapsed_s >= after_s

    def _rows_begun(self, slot: int) -> int:
        rows = range(slot, self._plan.num_rows, self._plan.num_schedulers)
        return sum(self._counters.rows[row] == LIVE for row in rows)

    def _busiest(self, running: Iterable[int]) -> int | None:
        """The scheduler with the most requests under way; None if all are between requests."""
        slot = max(running, key=self._rows_begun, default=0)
        return slot if self._rows_begun(slot) else None

    def _kill_and_replace(self, victim: int, at_s: float) -> None:
        """SIGKILL, and a successor for its rows at once."""
        name, held = f"scheduler-{victim}", 0
        for session in self._client.list_sessions(self._plan.pool):
            if session.client_name == name:
                self._victim_session, held = session.short_id, session.num_held_blocks
        self._processes[victim].send_signal(signal.SIGKILL)
        self._processes[victim].wait()
        self._kill = KillReport(
            name=name,
            at_s=at_s,
            num_rows_begun=self._rows_begun(victim),
            held_blocks=held,
            was_in_call=bool(self._counters.get(victim, "in_call")),
        )
        self._start(self._num_slots - 1, first_row=victim, name="successor")

    def _is_waiting_for_release(self, now_s: float) -> bool:
        kill = self._kill
        return kill is not None and kill.freed_after_s is None and now_s - kill.at_s < RELEASE_S

    def _look_for_release(self, now_s: float) -> None:
        """Has the victim's session gone, and with it everything it held?"""
        kill = self._kill
        if kill is None or kill.freed_after_s is not None:
            return
        try:
            listed = self._client.list_sessions(self._plan.pool)
        except Unreachable:
            return  # between two daemons
        if any(session.short_id == self._victim_session for session in listed):
            return  # it is listed as long as a block waits
        kill.freed_after_s = now_s - kill.at_s

    # ----------------------------------------------------------------------------------------------------- metrics
    def _page(self) -> MetricsPage | None:
        return fetch_metrics(self._plan.metrics_url) if self._plan.metrics_url else None

    def _settled_page(self, before: MetricsPage | None) -> MetricsPage | None:
        """The page once it shows what our own counters say, or the last look."""
        if before is None:
            return None
        wanted = self._counters.total("query_tokens")
        deadline = time.monotonic() + SETTLE_S
        while True:
            page = self._page()
            if page is None or time.monotonic() > deadline:
                return page
            name = "kvhold_prefix_query_tokens_total"
            if page.total(name, pool=self._plan.pool) - before.total(name, pool=self._plan.pool) >= wanted:
                return page
            time.sleep(0.2)
