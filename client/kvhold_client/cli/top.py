"""`kvhold top`: pools and sessions, live. Rates are over the last interval. On a pipe it prints one screen and ends."""

import argparse
import contextlib
import time
from dataclasses import dataclass

from kvhold_client.cli.console import Console, table_lines
from kvhold_client.cli.exits import OK
from kvhold_client.cli.sessions import HEADERS as SESSION_HEADERS
from kvhold_client.cli.sessions import session_row
from kvhold_client.cli.units import format_bytes, format_count, format_share, parse_seconds
from kvhold_client.client import Client
from kvhold_client.pools import PoolInfo
from kvhold_client.results import SessionInfo

HEADERS = ("pool", "memory", "blocks", "used", "cached", "", "hit rate", "tokens/s", "sessions")
BAR_WIDTH = 24
MAX_SESSIONS_SHOWN = 20
CLEAR = "\x1b[H\x1b[J"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one look saw."""

    at_s: float
    pools: list[PoolInfo]
    sessions: list[SessionInfo]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--interval, --once."""
    parser.add_argument(
        "--interval", type=parse_seconds, default=1.0, metavar="S", help="seconds between screens (default 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one screen and end")


def run(args: argparse.Namespace, console: Console) -> int:
    """Until interrupted."""
    with contextlib.suppress(KeyboardInterrupt), Client(args.target, timeout_s=args.timeout) as client:
        _watch(client, args, console)
    return OK


def _watch(client: Client, args: argparse.Namespace, console: Console) -> None:
    once = args.once or not console.is_live
    before: Sample | None = None
    while True:
        now = Sample(at_s=time.monotonic(), pools=client.list_pools(), sessions=client.list_sessions())
        if args.output == "json":
            console.json({"pools": now.pools, "sessions": now.sessions})
        else:
            lines = screen(before, now, args.target, console)
            console.print(("" if once else CLEAR) + "\n".join(lines))
        if once:
            return
        before = now
        time.sleep(max(args.interval, 0.1))


def screen(before: Sample | None, now: Sample, target: str, console: Console) -> list[str]:
    """The lines of one screen."""
    lines = [console.styled(f"kvhold top  {target}", "bold"), ""]
    earlier = {pool.name: pool for pool in before.pools} if before else {}
    seconds = now.at_s - before.at_s if before else 0.0
    lines += table_lines(HEADERS, [_pool_row(pool, earlier.get(pool.name), seconds) for pool in now.pools])
    lines += ["", *table_lines(SESSION_HEADERS, [session_row(s) for s in now.sessions[:MAX_SESSIONS_SHOWN]])]
    if len(now.sessions) > MAX_SESSIONS_SHOWN:
        lines.append(f"… and {len(now.sessions) - MAX_SESSIONS_SHOWN} more")
    return lines


def _pool_row(pool: PoolInfo, before: PoolInfo | None, seconds: float) -> tuple[str, ...]:
    """Hit rate and token rate are of the interval if there is one, else since the daemon's start."""
    counts, stats = pool.counts, pool.prefix_stats
    queried, hit = stats.query_tokens, stats.hit_tokens
    if before is not None:
        queried -= before.prefix_stats.query_tokens
        hit -= before.prefix_stats.hit_tokens
    usable = max(1, counts.num_blocks - 1)
    held = counts.num_held_blocks + counts.num_quarantined_blocks
    return (
        pool.name,
        format_bytes(pool.size_bytes),
        format_count(counts.num_blocks - 1),
        format_share(held, usable),
        format_share(counts.num_cached_blocks, usable),
        bar(held / usable, counts.num_cached_blocks / usable),
        format_share(hit, queried),
        format_count(queried / seconds) if seconds else "-",
        str(pool.num_sessions),
    )


def bar(held: float, cached: float) -> str:
    """█ held, ▒ cached, · free."""
    num_held = round(held * BAR_WIDTH)
    num_cached = min(round(cached * BAR_WIDTH), BAR_WIDTH - num_held)
    return "█" * num_held + "▒" * num_cached + "·" * (BAR_WIDTH - num_held - num_cached)
