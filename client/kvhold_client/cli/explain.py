"""`kvhold explain`: why a prompt would hit no more than it does, and what more memory would give.

    kvhold explain --pool chat                                        where the pool's tokens came from so far
    kvhold explain --pool chat --more-memory 20                       and how many a pool larger by 20 % would have kept
    kvhold explain --pool chat --tokens prompt.json                   this prompt, group by group (token ids; - = stdin)
    kvhold explain --pool chat --hashes 5f0c…,77aa… --num-tokens 48   the same, with digests that the engine logged

Asking changes nothing: no pin, no eviction order. What more memory would give is read from the list of evicted hashes:
a block that is asked for again n evictions after its own would still be there in a pool of n blocks more. That list is
bounded; what was evicted before its beginning counts as never seen.
"""

import argparse
import json
import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from kvhold.v1 import admin_pb2, admin_pb2_grpc, pool_pb2, pool_pb2_grpc
from kvhold_client.calls import call
from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import OK, UsageError
from kvhold_client.cli.units import format_bytes, format_count, format_share
from kvhold_client.client import Client
from kvhold_client.hashing import ALGORITHMS, DEFAULT_ALGORITHM, PrefixHasher

PROMPT_GROWTHS = (20,)
SHOWN_GROWTHS = (10, 20, 50, 100, 400)  # per cent, where nobody asks for others
MAX_GROWTH = 10_000
GROWTH_HEADERS = ("more memory", "a rank", "evicted tokens kept", "hit rate")
REASON_WORDS = {
    "NEVER_SEEN": "never published (or too long ago to be remembered)",
    "EVICTED": "was evicted",
    "PROVISIONAL": "published by a step that is not complete",
    "OTHER_GROUP": "another group has it",
    "": "all there",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked about."""

    num_tokens: int
    hashes: bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which pool, which prompt."""
    parser.add_argument("--pool", required=True, metavar="NAME", help="pool to ask")
    parser.add_argument(
        "--tokens", metavar="FILE", help="token ids of a prompt: JSON list or separated by blanks; - = stdin"
    )
    parser.add_argument("--hashes", metavar="HEX,…", help="digests of a prompt, instead of --tokens")
    parser.add_argument("--num-tokens", type=int, metavar="N", help="with --hashes: tokens of the prompt")
    parser.add_argument("--algorithm", choices=tuple(ALGORITHMS), help="hash algorithm (default: the pool's)")
    parser.add_argument("--seed", help="hash seed, if the engines have one")
    parser.add_argument(
        "--more-memory",
        type=_percents,
        metavar="PERCENT,…",
        help="what so much more memory would give (default: several steps; of a prompt: 20)",
    )
    parser.add_argument("--admin-target", metavar="T", help="where AdminService listens (default: --target)")


def _percents(text: str) -> tuple[int, ...]:
    values = tuple(int(word.removesuffix("%")) for word in text.split(","))
    if not all(1 <= value <= MAX_GROWTH for value in values):
        raise argparse.ArgumentTypeError(f"must be 1..{MAX_GROWTH} per cent")
    return values


def run(args: argparse.Namespace, console: Console) -> int:
    """Asks and shows."""
    with Client(args.target, timeout_s=args.timeout) as client:
        stub = pool_pb2_grpc.PoolServiceStub(client._channel)
        pool = call(stub.GetPool, pool_pb2.GetPoolRequest(name=args.pool), client._settings).pool
    if not args.tokens and not args.hashes:
        return _explain_pool(args, console, pool)
    prompt = _prompt(args, pool)
    with Client(args.admin_target or args.target, timeout_s=args.timeout) as client:
        request = admin_pb2.ExplainLookupRequest(pool=args.pool, num_tokens=prompt.num_tokens, hashes=prompt.hashes)
        answer = call(admin_pb2_grpc.AdminServiceStub(client._channel).ExplainLookup, request, client._settings)
    return _explain_prompt(args, console, pool, prompt, answer)


def _prompt(args: argparse.Namespace, pool: pool_pb2.Pool) -> Prompt:
    """Raises UsageError."""
    if args.hashes:
        if args.num_tokens is None:
            raise UsageError("--hashes needs --num-tokens")
        try:
            return Prompt(args.num_tokens, bytes.fromhex(args.hashes.replace(",", " ")))
        except ValueError:
            raise UsageError("--hashes: not hexadecimal") from None
    tokens = _read_tokens(args.tokens)
    algorithm = args.algorithm or pool.content.hash_algorithm or DEFAULT_ALGORITHM
    if algorithm not in ALGORITHMS:
        raise UsageError(f"the pool's hash algorithm is {algorithm!r}: give --hashes as the engine computes them")
    try:
        hasher = PrefixHasher(block_size_tokens=pool.hash_block_size_tokens, algorithm=algorithm, seed=args.seed)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Prompt(len(tokens), b"".join(hasher.sequence().extend(tokens)))


def _read_tokens(name: str) -> list[int]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    try:
        tokens = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except ValueError:
        raise UsageError(f"{name}: neither a JSON list of token ids nor numbers separated by blanks") from None
    if not tokens or not all(isinstance(token, int) for token in tokens):
        raise UsageError(f"{name}: needs at least one token id, and nothing else")
    return tokens


def _explain_prompt(
    args: argparse.Namespace,
    console: Console,
    pool: pool_pb2.Pool,
    prompt: Prompt,
    answer: admin_pb2.ExplainLookupResponse,
) -> int:
    if args.output == "json":
        groups = [
            {
                "group": g.group_id,
                "kind": g.kind,
                "hit_tokens": g.hit_tokens,
                "first_missing_block": g.first_missing_block,
                "reason": g.reason,
                "evictions_ago": g.evictions_ago,
            }
            for g in answer.groups
        ]
        console.json(
            {
                "num_tokens": prompt.num_tokens,
                "hit_tokens": answer.hit_tokens,
                "groups": groups,
                "notes": list(answer.notes),
                "num_additional_blocks": answer.num_additional_blocks,
            }
        )
        return OK
    share = format_share(answer.hit_tokens, prompt.num_tokens)
    console.heading(
        f"{format_count(answer.hit_tokens)} of {format_count(prompt.num_tokens)} tokens would be hit ({share})"
    )
    rows = [
        (
            g.group_id,
            g.kind,
            g.hit_tokens,
            g.first_missing_block if g.reason else "–",
            REASON_WORDS.get(g.reason, g.reason) if g.reason or g.hit_tokens else "the prompt fills no block",
        )
        for g in answer.groups
    ]
    console.table(("group", "kind", "hit tokens", "first missing block", "why"), rows)
    for note in answer.notes:
        console.print(f"· {note}")
    for line in memory_advice(pool, answer.num_additional_blocks, args.more_memory or PROMPT_GROWTHS):
        console.print(line)
    return OK


def memory_advice(pool: pool_pb2.Pool, num_more: int, percents: tuple[int, ...]) -> list[str]:
    """What more memory would have kept of a prompt, in blocks and bytes; and whether so much more would have done."""
    if not num_more:
        return ["More memory would not help: nothing of this prompt was evicted lately."]
    needed = 100 * num_more / max(1, pool.counts.num_blocks)
    size = format_bytes(num_more * pool.block_size_bytes)
    lines = [f"{format_count(num_more)} blocks more ({needed:.1f} %, {size} a rank) would have kept all of it."]
    for percent in percents:
        enough = "would have been enough" if needed <= percent else "would not have been enough"
        lines.append(f"{percent} % more ({_growth_bytes(pool, percent)} a rank) {enough}.")
    return lines


def _explain_pool(args: argparse.Namespace, console: Console, pool: pool_pb2.Pool) -> int:
    stats = pool.prefix_stats
    parts = {
        "hit, own session": stats.hit_own_tokens,
        "hit, another session": stats.hit_shared_tokens,
        "miss: never seen": stats.miss_never_seen_tokens,
        "miss: was evicted": stats.miss_evicted_tokens,
        "miss: cut by a rule": stats.miss_rule_tokens,
        "miss: not visible yet": stats.miss_other_tokens,
    }
    growths = growths_of(pool, args.more_memory or SHOWN_GROWTHS)
    if args.output == "json":
        by_age = list(stats.miss_evicted_by_age_tokens)
        console.json(
            {
                "query_tokens": stats.query_tokens,
                "parts": parts,
                "miss_evicted_by_age_tokens": by_age,
                "more_memory": growths,
            }
        )
        return OK
    console.heading(
        f"pool {pool.name}: {format_count(stats.query_tokens)} tokens asked for in {stats.num_requests} admissions"
    )
    rows = [(word, format_count(n), format_share(n, stats.query_tokens)) for word, n in parts.items()]
    console.table(("tokens", "number", "share"), rows)
    if stats.miss_evicted_tokens:
        console.print()
        console.table(GROWTH_HEADERS, [_growth_row(pool, growth) for growth in growths])
    return OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a larger pool would have kept of the tokens that were evicted and asked for again."""

    more_percent: int
    more_bytes: int  # on each rank
    kept_tokens_at_least: int
    kept_tokens_at_most: int  # another number only where the daemon does not count to this very per cent
    hit_rate: float  # that it would have had at least


def growths_of(pool: pool_pb2.Pool, percents: tuple[int, ...]) -> list[Growth]:
    """One for each per cent asked about; none if the daemon, an older one, does not count them.

    bounds   5     10     20 …            what 12 % would have kept is
    parts    3000  1000   500             at least 3000 + 1000, at most 500 more
    """
    stats = pool.prefix_stats
    bounds, sums = list(stats.growth_percents), list(accumulate(stats.miss_evicted_by_growth_tokens, initial=0))
    hits = stats.hit_own_tokens + stats.hit_shared_tokens
    found = []
    for percent in percents if bounds else ():
        low = sums[bisect_right(bounds, percent)]
        high = sums[min(bisect_left(bounds, percent) + 1, len(sums) - 1)]
        found.append(
            Growth(
                more_percent=percent,
                more_bytes=_growth_blocks(pool, percent) * pool.block_size_bytes,
                kept_tokens_at_least=low,
                kept_tokens_at_most=high,
                hit_rate=(hits + low) / max(1, stats.query_tokens),
            )
        )
    return found


def _growth_blocks(pool: pool_pb2.Pool, percent: int) -> int:
    return -(-pool.counts.num_blocks * percent // 100)


def _growth_bytes(pool: pool_pb2.Pool, percent: int) -> str:
    return format_bytes(_growth_blocks(pool, percent) * pool.block_size_bytes)


def _growth_row(pool: pool_pb2.Pool, growth: Growth) -> tuple[str, ...]:
    kept = format_count(growth.kept_tokens_at_least)
    if growth.kept_tokens_at_most > growth.kept_tokens_at_least:
        kept += f" to {format_count(growth.kept_tokens_at_most)}"
    return (
        f"+{growth.more_percent} %",
        _growth_bytes(pool, growth.more_percent),
        kept,
        f"{100 * growth.hit_rate:.1f} %",
    )
