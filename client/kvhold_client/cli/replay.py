"""`kvhold replay TRACE`: scheduler processes replay a request trace through a daemon, with real bytes.

kvhold replay trace.jsonl --schedulers 2 --kill-one-after 5     the main job, with a crash in it
kvhold replay trace.jsonl --rule sequential                     published hit totals, to the token
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import FAILED, OK, CommandFailed, UsageError
from kvhold_client.cli.replay_sequential import run_sequentially
from kvhold_client.cli.units import format_bytes, format_count, format_seconds, parse_bytes
from kvhold_client.client import Client
from kvhold_client.local_daemon import DaemonFailed, LocalDaemon
from kvhold_client.models import GIB, LAYOUTS, MODELS, model_plan_request
from kvhold_client.pools import BACKENDS, PoolRequest
from kvhold_client.replay.counters import SharedCounters, percentile_s
from kvhold_client.replay.progress import ProgressLine
from kvhold_client.replay.runner import Replay, ReplayPlan
from kvhold_client.replay.scheduler import SchedulerLimits
from kvhold_client.replay.summary import Summary, print_summary, summarize
from kvhold_client.replay.trace import MAX_TOKENS, TraceError, read_trace

RULES = ("schedulers", "sequential")
SHM = "/dev/shm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, the model, the schedulers."""
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="JSON lines: timestamp, input_length, output_length, hash_ids"
    )
    parser.add_argument("--rule", choices=RULES, default="schedulers", help="how requests run (default schedulers)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="llama-3.1-8b", help="whose cache (default llama-3.1-8b)"
    )
    parser.add_argument(
        "--memory", type=parse_bytes, metavar="SIZE", help="of the pool (default: half of what is free, at most 4GiB)"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="LBNHC", help="order of the axes (default LBNHC)")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="default", help="memory backend; fake: count blocks, write no bytes"
    )
    parser.add_argument("--schedulers", type=int, default=2, metavar="N", help="processes (default 2)")
    parser.add_argument("--live", type=int, default=16, metavar="N", help="requests at once on each (default 16)")
    parser.add_argument(
        "--batched-tokens", type=int, default=8192, metavar="N", help="token budget of a step (default 8192)"
    )
    parser.add_argument("--max-prompt-tokens", type=int, default=0, metavar="N", help="leave longer requests out")
    parser.add_argument("--max-output-tokens", type=int, default=0, metavar="N", help="generate at most so many")
    parser.add_argument(
        "--step-ms", type=float, default=0.0, metavar="MS", help="simulated time on the device (default 0)"
    )
    parser.add_argument(
        "--kill-one-after", type=float, metavar="S", help="SIGKILL one scheduler, and start a successor"
    )
    parser.add_argument(
        "--grace-period", type=float, default=5.0, metavar="S", help="of a daemon started here (default 5)"
    )
    parser.add_argument("--metrics-url", default="", metavar="URL", help="/metrics of the daemon named by --target")
    parser.add_argument(
        "--pool", default="", metavar="NAME", help="of the pool (default: a new one, deleted afterwards)"
    )
    parser.add_argument(
        "--blocks", type=int, metavar="N", help="sequential: one pool size instead of the standard ones"
    )
    parser.add_argument(
        "--conc", type=int, default=1, metavar="N", help="sequential, with --blocks: requests alive (default 1)"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Either rule."""
    check_usage(args)
    rows = count_rows(args.trace, args.limit)
    try:
        with daemon_for(args, console) as (target, metrics_url):
            if args.rule == "sequential":
                return run_sequentially(args, console, target)
            summary = run_schedulers(args, console, target, metrics_url, rows)
    except DaemonFailed as error:
        raise CommandFailed(str(error)) from None
    if args.output == "json":
        console.json(summary)
    else:
        print_summary(console, summary)
    return OK if summary.is_good else FAILED


def check_usage(args: argparse.Namespace) -> None:
    """Raises UsageError for numbers that make no sense."""
    for name, low in (("schedulers", 1), ("live", 1), ("batched_tokens", 1), ("conc", 1)):
        if getattr(args, name) < low:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {low}")
    if args.schedulers > 64:
        raise UsageError("--schedulers must be at most 64")
    if args.kill_one_after is not None and args.kill_one_after < 0:
        raise UsageError("--kill-one-after must be a number of seconds")


def count_rows(trace: Path, limit: int | None) -> int:
    """Reads the whole trace once, so that a broken line is found before anything starts."""
    try:
        rows = sum(1 for _ in read_trace(trace, limit=limit))
    except TraceError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{trace}: {error.strerror}") from None
    if not rows:
        raise UsageError(f"{trace}: no requests in it")
    return rows


@contextlib.contextmanager
def daemon_for(args: argparse.Namespace, console: Console) -> Iterator[tuple[str, str]]:
    """Target and metrics URL: of the daemon that was named, else of one that lives as long as this command."""
    if args.target_given:
        yield args.target, args.metrics_url
        return
    with LocalDaemon("--grace-period-s", str(args.grace_period)) as daemon:
        console.note(f"daemon started, pid {daemon.pid}, {daemon.metrics_url}")
        yield daemon.target, daemon.metrics_url


# ------------------------------------------------------------------------------------------------------- schedulers
def run_schedulers(args: argparse.Namespace, console: Console, target: str, metrics_url: str, num_rows: int) -> Summary:
    """Opens the pool, runs the processes, takes the sum."""
    memory = args.memory or default_memory_bytes()
    name = args.pool or f"replay-{os.getpid()}"
    request = PoolRequest(
        name=name,
        plan=model_plan_request(
            args.model,
            memory_bytes=memory,
            layout=args.layout,
            max_num_batched_tokens=args.batched_tokens,
            max_num_seqs=args.live * args.schedulers,
            auto_fit=True,
        ),
        backend=args.backend,
        model=args.model,
    )
    with Client(target, timeout_s=max(args.timeout, 60.0)) as client, tempfile.TemporaryDirectory() as directory:
        pool = client.open_pool(request)
        info, length = pool.info, pool.plan.max_model_len_tokens
        console.note(
            f"pool {info.name}: {MODELS[args.model].title}, {format_count(info.counts.num_blocks - 1)} blocks of "
            f"{format_bytes(info.block_size_bytes)} in {info.backend}, requests up to {format_count(length)} tokens"
        )
        plan = ReplayPlan(
            target=target,
            pool=name,
            trace=args.trace,
            num_rows=num_rows,
            num_schedulers=args.schedulers,
            limits=SchedulerLimits(
                max_num_seqs=args.live,
                max_num_batched_tokens=args.batched_tokens,
                max_model_len_tokens=length,
                max_output_tokens=args.max_output_tokens,
                step_s=args.step_ms / 1e3,
            ),
            stamp=info.backend != "fake",
            directory=Path(directory),
            kill_one_after_s=args.kill_one_after,
            metrics_url=metrics_url,
            max_prompt_tokens=args.max_prompt_tokens,
        )
        progress = ProgressLine(console.err, _num_wanted(args))
        try:
            result = Replay(plan, client, _progress_into(progress)).execute()
        finally:
            progress.finish()
            if not args.pool:
                client.delete_pool(name, force=True)
        return summarize(result, name)


def _num_wanted(args: argparse.Namespace) -> int:
    """Requests that are not left out."""
    longest = args.max_prompt_tokens or MAX_TOKENS
    return sum(row.input_length <= longest for row in read_trace(args.trace, limit=args.limit))


def _progress_into(progress: ProgressLine) -> Callable[[SharedCounters, float], None]:
    def show(counters: SharedCounters, seconds: float) -> None:
        done = counters.total("finished") + counters.total("skipped")
        query, hit = counters.total("query_tokens"), counters.total("hit_tokens")
        p99 = percentile_s(counters.histogram(), 99)
        rate = counters.total("steps") / max(seconds, 1e-9)
        hits = f"{100 * hit / query:.1f} % hits" if query else "no hits yet"
        progress.update(done, f"{format_count(done)} requests, {hits}, {rate:,.0f} steps/s, p99 {format_seconds(p99)}")

    return show


def default_memory_bytes() -> int:
    """Half of what shared memory has left, at most 4 GiB. Raises CommandFailed where that is too little."""
    free = os.statvfs(SHM)
    memory = min(4 * GIB, free.f_bavail * free.f_frsize // 2)
    if memory < 64 << 20:
        raise CommandFailed(
            f"{SHM} has {format_bytes(2 * memory)} free: give it more, choose --memory, or use --backend memfd or fake"
        )
    return memory
