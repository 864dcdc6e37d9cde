"""What the block pool costs, without a daemon: opening, heap, hashing, freeing.

    .venv/bin/python bench/pool.py [--blocks 1000000]

CPU time, best of several rounds; calls are Python and C functions. Exit status 1: a bound is missed.
"""

import argparse
import gc
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvhold_client.hashing import PrefixHasher
from kvhold_server.domain.pool_config import GroupConfig, GroupKind, PoolConfig
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.values import AdmitColumns, FreeColumns, StepInput

BLOCK = 16
MAX_OPEN_S = 1.0
MAX_HEAP_BYTES = 220.0
MAX_CALLS_PER_BLOCK_HASHED = 4.0
MAX_CALLS_PER_BLOCK_FREED = 1.5
LINEAR = 1.6  # times what a block of the shortest sequence costs
PROMPT_TOKENS = 16_384


def make_pool(num_blocks: int) -> Pool:
    config = PoolConfig(
        groups=(GroupConfig(kind=GroupKind.FULL, block_size_tokens=BLOCK),),
        num_blocks=num_blocks,
        hash_unit_tokens=BLOCK,
        scheduler_block_tokens=BLOCK,
        max_model_len=1 << 24,
        report_events=False,
    )
    return Pool(config)


def best_s(work: Callable[[], object], rounds: int = 5) -> float:
    """Seconds of CPU."""
    best = float("inf")
    for _ in range(rounds):
        gc.collect()
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best


def count_calls(work: Callable[[], object]) -> int:
    """Functions called."""
    num = 0

    def tick(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num


def heap_per_block(num_blocks: int, num_cached: int) -> tuple[float, float]:
    """Bytes of metadata per block: of a new pool, and per cached block more (its digest included)."""
    tracemalloc.start()
    pool = make_pool(num_blocks)
    empty = tracemalloc.get_traced_memory()[0]
    session = pool.open_session()
    fill(pool, session, 1, 1, num_cached)
    free(pool, session, 3, 1)
    cached = tracemalloc.get_traced_memory()[0]
    assert pool.counts().cached == num_cached
    tracemalloc.stop()
    return empty / num_blocks, (cached - empty) / num_cached


def fill(pool: Pool, session: int, step: int, sequence: int, num: int) -> None:
    """Admits a sequence of so many blocks, all of them new, and completes it."""
    keys = [(sequence << 32 | i).to_bytes(32, "big") for i in range(num)]
    admit = AdmitColumns(sequence_ids=[sequence], num_tokens=[num * BLOCK], hash_counts=[num], hashes=keys)
    pool.step(session, StepInput(step=step, admit=admit, token_budget=2**31 - 1))
    pool.step(session, StepInput(step=step + 1, completed_step=step))


def free(pool: Pool, session: int, step: int, sequence: int) -> None:
    """Frees it."""
    pool.step(session, StepInput(step=step, completed_step=step - 1, free=FreeColumns(sequence_ids=[sequence])))


def calls_to_free(num: int) -> float:
    """Functions called per block freed, in a sequence of so many."""
    pool = make_pool(2 * num + 2)
    session = pool.open_session()
    fill(pool, session, 1, 1, num)
    return count_calls(lambda: free(pool, session, 3, 1)) / num


def us_to_free(num: int) -> float:
    """Microseconds of CPU per block freed, in a sequence of so many."""
    best = float("inf")
    for _ in range(5):
        pool = make_pool(2 * num + 2)
        session = pool.open_session()
        fill(pool, session, 1, 1, num)
        begun = time.process_time()
        free(pool, session, 3, 1)
        best = min(best, (time.process_time() - begun) / num * 1e6)
    return best


def calls_to_hash(num_tokens: int) -> float:
    """Functions called per block of a prompt that is hashed for the first time."""
    hasher = PrefixHasher(block_size_tokens=BLOCK)
    prompt = array("I", random.Random(1).choices(range(128_000), k=num_tokens))
    hasher.sequence().extend(prompt)  # tables are made on first use
    return count_calls(lambda: hasher.sequence().extend(prompt)) / (num_tokens // BLOCK)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    num_blocks: int = parser.parse_args().blocks
    open_s = best_s(lambda: make_pool(num_blocks))
    empty, cached = heap_per_block(num_blocks, num_blocks // 2)
    hash_calls = calls_to_hash(PROMPT_TOKENS)
    free_us = {num: us_to_free(num) for num in (256, 4096, 65_536)}
    free_calls = max(calls_to_free(num) for num in (1024, 16_384))
    growth = free_us[65_536] / free_us[256]
    shown = ", ".join(f"{us:.2f} µs each of {num}" for num, us in free_us.items())
    num_prompt_blocks = PROMPT_TOKENS // BLOCK
    rows = (
        (f"open {num_blocks} blocks", f"{open_s:.3f} s", open_s <= MAX_OPEN_S),
        ("heap per block, empty", f"{empty:.0f} bytes", empty <= MAX_HEAP_BYTES),
        ("heap per block, cached", f"{empty + cached:.0f} bytes", empty + cached <= MAX_HEAP_BYTES),
        (
            f"calls to hash {PROMPT_TOKENS} tokens",
            f"{hash_calls * num_prompt_blocks:.0f}, {num_prompt_blocks} of them digests",
            hash_calls <= MAX_CALLS_PER_BLOCK_HASHED,
        ),
        ("calls to free a block", f"{free_calls:.2f}", free_calls <= MAX_CALLS_PER_BLOCK_FREED),
        ("freeing is linear", shown, growth <= LINEAR),
    )
    for label, text, is_met in rows:
        print(f"{label:26} {text}{'' if is_met else '   MISSED'}")
    return int(not all(is_met for _, _, is_met in rows))


if __name__ == "__main__":
    sys.exit(main())
