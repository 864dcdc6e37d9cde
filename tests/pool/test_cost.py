"""Costs that must not grow, counted in function calls and bytes, so that a busy machine cannot make them fail."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, PoolConfig
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.values import AdmitColumns, ExtendColumns, FreeColumns, Status, StepInput

BLOCK = 16
BIG = 2**31 - 1
FULL = GroupConfig(kind=GroupKind.FULL, block_size_tokens=BLOCK)
WINDOW = GroupConfig(kind=GroupKind.SLIDING_WINDOW, block_size_tokens=BLOCK, window_tokens=1024)


def make_pool(num_blocks: int, *groups: GroupConfig) -> Pool:
    return Pool(
        PoolConfig(
            groups=groups or (FULL,),
            num_blocks=num_blocks,
            hash_unit_tokens=BLOCK,
            scheduler_block_tokens=BLOCK,
            max_model_len=1 << 20,
            report_events=False,
        )
    )


def count_calls(work: Callable[[], Any]) -> int:
    """Python and C functions called by `work`."""
    num = 0

    def tick(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num


def hashes(first: int, num: int) -> list[bytes]:
    return [i.to_bytes(32, "big") for i in range(first, first + num)]


def admit(sid: int, num_blocks: int, first_hash: int) -> AdmitColumns:
    return AdmitColumns(
        sequence_ids=[sid],
        num_tokens=[num_blocks * BLOCK + 1],
        hash_counts=[num_blocks],
        hashes=hashes(first_hash, num_blocks),
    )


def decode_calls(num_blocks: int, table_blocks: int, *groups: GroupConfig) -> float:
    """Calls per sequence in a step in which 64 sequences cross a block boundary."""
    pool = make_pool(num_blocks, *groups)
    session = pool.open_session()
    num = 64
    for sid in range(1, num + 1):
        items = StepInput(step=sid, token_budget=BIG, admit=admit(sid, table_blocks, sid * 100_000))
        assert pool.step(session, items).admit_status == [Status.OK]
    ids = list(range(1, num + 1))
    calls = 0
    for k in (1, 2, 3):  # the last one counts: by then every window has moved
        tokens = (table_blocks + k) * BLOCK
        extend = ExtendColumns(
            sequence_ids=ids,
            slots_needed=[tokens + 1] * num,
            processed_tokens=[tokens] * num,
            publish_tokens=[tokens] * num,
            hash_counts=[1] * num,
            hashes=[(sid * 100_000 + table_blocks + k).to_bytes(32, "big") for sid in ids],
        )
        items = StepInput(step=num + k, completed_step=num + k - 1, extend=extend)
        calls = count_calls(lambda i=items: pool.step(session, i))
    return calls / num


def test_a_decode_step_costs_the_same_in_any_pool_with_any_table() -> None:
    """Per sequence: one free block, one table entry, one hash."""
    small = decode_calls(2_000, 16)
    assert small <= 12
    assert decode_calls(100_000, 16) == small
    assert decode_calls(100_000, 500) == small


def test_a_decode_step_with_a_window_group_is_bounded_too() -> None:
    """Two groups and a block that leaves: sequence by sequence, where a plain group's step goes through in bulk."""
    assert decode_calls(20_000, 100, FULL, WINDOW) <= 65


def test_refusing_costs_the_same_for_any_prefix() -> None:
    """PERF-06: the second time nothing is looked up, and nothing was touched the first time."""
    costs = []
    for num_hit in (10, 3_000):
        pool = make_pool(4_000)
        session = pool.open_session()
        items = StepInput(step=1, token_budget=BIG, admit=admit(1, num_hit, 0))
        pool.step(session, items)
        pool.step(session, StepInput(step=2, token_budget=BIG, admit=admit(2, 3_900 - num_hit, 50_000)))
        asked = StepInput(step=3, completed_step=2, token_budget=BIG, admit=admit(3, num_hit + 200, 0))
        assert pool.step(session, asked).admit_status == [Status.REFUSED]
        again = AdmitColumns(sequence_ids=[3], num_tokens=[(num_hit + 200) * BLOCK + 1], hash_counts=[-1])
        costs.append(
            count_calls(lambda p=pool, s=session, a=again: p.step(s, StepInput(step=3, token_budget=BIG, admit=a)))
        )
    assert costs[0] == costs[1] < 60


def per_block_calls(first_hash: Callable[[int], int]) -> tuple[float, float]:
    """Calls per block of admitting and of freeing, sweeps of void entries included."""
    pool = make_pool(6_000)
    session = pool.open_session()
    num_admit_calls = num_free_calls = num_admitted = 0
    num_blocks = 2048
    for step in range(1, 13):
        items = StepInput(step=step, completed_step=step - 1, token_budget=BIG)
        items.admit = admit(step, num_blocks, first_hash(step))
        admitted = count_calls(lambda i=items: pool.step(session, i))
        free = StepInput(step=step, completed_step=step - 1, free=FreeColumns(sequence_ids=[step]))
        freed = count_calls(lambda i=free: pool.step(session, i))
        if step > 3:  # from then on blocks are recycled
            num_admit_calls, num_free_calls = num_admit_calls + admitted, num_free_calls + freed
            num_admitted += num_blocks
    return num_admit_calls / num_admitted, num_free_calls / num_admitted


def test_admitting_and_freeing_cost_few_calls_for_many_blocks() -> None:
    """PERF-03: hits and new blocks are handled in bulk where Python can, so that a call serves many blocks."""
    hit, freed_hits = per_block_calls(lambda _step: 0)
    new, freed_new = per_block_calls(lambda step: step * 10_000)
    assert hit <= 0.12 and new <= 0.15, (hit, new)
    assert freed_hits <= 0.05 and freed_new <= 0.08, (freed_hits, freed_new)


def test_a_pool_costs_little_before_it_is_used() -> None:
    """Opening is independent of use; at most 100 bytes of heap per block (measured: about 30)."""
    tracemalloc.start()
    pool = make_pool(200_000)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.counts().available == 199_999
    assert size / 200_000 <= 40


def test_a_cached_block_costs_at_most_200_bytes_of_metadata() -> None:
    """With its hash of 32 bytes (65 of those are the hash object itself)."""
    num = 50_000
    pool = make_pool(num + 1)
    session = pool.open_session()
    tracemalloc.start()
    pool.step(session, StepInput(step=1, token_budget=BIG, admit=admit(1, num - 1, 0)))
    pool.step(session, StepInput(step=2, completed_step=1, free=FreeColumns(sequence_ids=[1])))
    pool.complete(session, 2)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / num + 30 <= 250, size / num
