"""`kvhold replay --rule sequential`: hit totals that depend on nothing but the pool, for several pool sizes.

Each size is a pool and a session of its own; they run side by side, because a request must wait for the one before it
and a daemon would idle meanwhile.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock

from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import OK
from kvhold_client.cli.units import format_count, format_seconds
from kvhold_client.client import Client
from kvhold_client.models import GIB, model_plan_request
from kvhold_client.pools import PoolRequest
from kvhold_client.replay.progress import ProgressLine
from kvhold_client.replay.sequential import DIGEST_BYTES, STANDARD_CASES, SequentialTotals, replay_sequentially
from kvhold_client.replay.trace import UNIT_TOKENS, TraceRow, read_trace
from kvhold_client.shape import GroupShape

REPORT_EVERY = 100
HEADERS = ("blocks", "live", "requests", "skipped", "prompt tokens", "hit tokens", "hit rate", "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialCase:
    """One pool size."""

    num_blocks: int
    num_live: int


def run_sequentially(args: argparse.Namespace, console: Console, target: str) -> int:
    """All standard sizes, or the one asked for."""
    cases = [SequentialCase(num_blocks=blocks, num_live=live) for blocks, live in STANDARD_CASES]
    if args.blocks:
        cases = [SequentialCase(num_blocks=args.blocks, num_live=args.conc)]
    rows = list(read_trace(args.trace, limit=args.limit))
    progress = _SharedProgress(ProgressLine(console.err, len(rows) * len(cases)), len(cases))
    with Client(target, timeout_s=max(args.timeout, 60.0)) as client, ThreadPoolExecutor(len(cases)) as threads:
        found = list(threads.map(lambda case: _run_case(client, args.model, case, rows, progress), cases))
    progress.line.finish()
    if args.output == "json":
        console.json(found)
    else:
        console.table(HEADERS, [_table_row(totals) for totals in found])
    return OK


class _SharedProgress:
    """Sums what the threads have done."""

    def __init__(self, line: ProgressLine, num_cases: int) -> None:
        self.line = line
        self._num_cases = num_cases
        self._lock = Lock()
        self._done = 0

    def add(self) -> None:
        with self._lock:
            self._done += REPORT_EVERY
            self.line.update(self._done, f"{format_count(self._done)} requests in {self._num_cases} pools")


def _run_case(
    client: Client, model: str, case: SequentialCase, rows: list[TraceRow], progress: _SharedProgress
) -> SequentialTotals:
    """A pool of blocks without bytes: one full-attention group of 512-token blocks."""
    name = f"sequential-{os.getpid()}-{case.num_blocks}-{case.num_live}"
    request = PoolRequest(
        name=name,
        plan=model_plan_request(model, memory_bytes=64 * GIB),
        backend="fake",
        hash_size_bytes=DIGEST_BYTES,
        simulated_groups=(GroupShape(kind="full", block_size_tokens=UNIT_TOKENS),),
        simulated_num_blocks=case.num_blocks,
    )
    pool = client.open_pool(request)
    started = time.monotonic()
    try:
        with pool.open_session(client_name="sequential") as session:
            totals = replay_sequentially(
                session,
                rows,
                num_blocks=case.num_blocks,
                num_live=case.num_live,
                report_every=REPORT_EVERY,
                on_progress=progress.add,
            )
    finally:
        client.delete_pool(name, force=True)
    return replace(totals, seconds=time.monotonic() - started)


def _table_row(totals: SequentialTotals) -> tuple[object, ...]:
    return (
        format_count(totals.num_blocks),
        totals.num_live,
        format_count(totals.num_requests),
        totals.num_skipped,
        format_count(totals.query_tokens),
        format_count(totals.hit_tokens),
        f"{100 * totals.hit_rate:.4f} %",
        format_seconds(totals.seconds),
    )
