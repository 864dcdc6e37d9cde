"""`kvhold pools`: every pool, its memory, its blocks by state, its hit rate."""

import argparse

from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import OK
from kvhold_client.cli.units import format_bytes, format_count, format_share
from kvhold_client.client import Client
from kvhold_client.pools import PoolInfo

HEADERS = (
    "pool",
    "backend",
    "memory",
    "blocks",
    "free",
    "cached",
    "held",
    "quarantined",
    "used",
    "hit rate",
    "sessions",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Only the common ones."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Lists."""
    with Client(args.target, timeout_s=args.timeout) as client:
        pools = client.list_pools()
    if args.output == "json":
        console.json(pools)
    elif pools:
        console.table(HEADERS, [pool_row(pool) for pool in pools])
    else:
        console.note("no pools")
    return OK


def pool_row(pool: PoolInfo) -> tuple[str, ...]:
    """One line of the table; the null block is no usable one."""
    counts, stats = pool.counts, pool.prefix_stats
    return (
        pool.name,
        pool.backend,
        format_bytes(pool.size_bytes),
        format_count(max(0, counts.num_blocks - 1)),
        format_count(counts.num_free_blocks),
        format_count(counts.num_cached_blocks),
        format_count(counts.num_held_blocks),
        format_count(counts.num_quarantined_blocks),
        f"{100 * counts.usage:.1f} %",
        format_share(stats.hit_tokens, stats.query_tokens),
        str(pool.num_sessions),
    )
