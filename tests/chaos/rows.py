"""Endless requests with shared prefixes, each a function of its number alone: a successor asks exactly what its
predecessor asked."""

import random
from collections.abc import Iterator

from kvhold_client.replay.counters import DONE, SKIPPED, SharedCounters
from kvhold_client.replay.trace import UNIT_TOKENS, TraceRow

NUM_ROWS = 1_000_000  # more than any run gets through
NUM_FAMILIES = 24  # of shared prefixes
MAX_OUTPUT_TOKENS = 24


def row(index: int) -> TraceRow:
    """A prefix that others have, too, then tokens of its own."""
    choice = random.Random(index)
    family = min(int(choice.expovariate(0.2)), NUM_FAMILIES - 1)
    num_shared = family % 3 + 1  # units of the family's prefix
    own_tokens = choice.randint(1, UNIT_TOKENS)
    ids = [family * 10 + i for i in range(num_shared)] + [1_000_000 + index]
    return TraceRow(
        timestamp_ms=0.0,
        input_length=num_shared * UNIT_TOKENS + own_tokens,
        output_length=choice.randint(1, MAX_OUTPUT_TOKENS),
        hash_ids=tuple(ids),
    )


def rows_of(first: int, stride: int, counters: SharedCounters) -> Iterator[tuple[int, TraceRow]]:
    """One scheduler's rows that nobody has finished; what a killed predecessor had begun comes first."""
    for index in range(first, NUM_ROWS, stride):
        if counters.rows[index] not in (DONE, SKIPPED):
            yield index, row(index)
