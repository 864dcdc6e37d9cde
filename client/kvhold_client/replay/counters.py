"""Counters that several processes share through a file: what a scheduler had done is known even after SIGKILL.

    scheduler i   [ counters │ latency histogram ]     one writer each, so no locks; the parent reads
    rows          [ one byte per row of the trace ]    WAITING, LIVE, DONE, SKIPPED

The histogram has 16 buckets per octave of microseconds: percentiles are exact to 4.4 %.
"""

import math
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

NAMES = (
    "steps",
    "step_ns",  # spent in steps, with the simulated forward
    "rpcs",
    "rpc_ns",
    "max_rpc_ns",
    "in_call",  # 1 while a Step rpc is under way
    "admissions",
    "query_tokens",
    "hit_tokens",
    "resumed_query_tokens",  # of sequences that were preempted: counted apart, as the daemon does
    "resumed_hit_tokens",
    "inherited_query_tokens",  # of rows that a killed predecessor had begun
    "inherited_hit_tokens",
    "prefill_tokens",
    "generated_tokens",
    "preemptions",
    "finished",
    "skipped",
    "blocks_written",
    "blocks_verified",
    "bytes_verified",
    "mismatches",
    "silent_steps",
    "reconnects",  # resumes of the session, whatever broke it
    "daemon_restarts",  # those of them that met another daemon
    "lost_sequences",  # that a restarted daemon could not give back
    "ready",
    "ended",
)
NUM_BUCKETS = 420
PER_OCTAVE = 16
WAITING, LIVE, DONE, SKIPPED = range(4)
_SLOT_WORDS = len(NAMES) + NUM_BUCKETS
_INDEX = {name: i for i, name in enumerate(NAMES)}


def bucket_of(ns: int) -> int:
    """Histogram bucket of a duration."""
    return min(max(int(PER_OCTAVE * math.log2(max(ns, 1000) / 1000)), 0), NUM_BUCKETS - 1)


def percentile_s(histogram: Sequence[int], percent: float) -> float:
    """Upper edge of the bucket that holds the percentile, in seconds; 0 of nothing."""
    total = sum(histogram)
    rank, seen = math.ceil(total * percent / 100), 0
    for bucket, count in enumerate(histogram):
        seen += count
        if total and seen >= rank:
            return float(2 ** ((bucket + 1) / PER_OCTAVE)) * 1e-6
    return 0.0


class SharedCounters:
    """One process's slot, or all of them for the parent."""

    def __init__(self, path: Path, num_slots: int, num_rows: int) -> None:
        """Makes the file if it is not there; every process of a run passes the same numbers."""
        size = num_slots * _SLOT_WORDS * 8 + max(num_rows, 1)
        with path.open("a+b") as file:
            if file.seek(0, 2) < size:
                file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._view = memoryview(self._map)
        self._words = self._view[: num_slots * _SLOT_WORDS * 8].cast("q")
        self.rows = self._view[num_slots * _SLOT_WORDS * 8 :]
        self.num_slots = num_slots

    def add(self, slot: int, name: str, amount: int = 1) -> None:
        """Adds to a counter of one's own slot."""
        self._words[slot * _SLOT_WORDS + _INDEX[name]] += amount

    def put(self, slot: int, name: str, value: int) -> None:
        """Sets a counter of one's own slot."""
        self._words[slot * _SLOT_WORDS + _INDEX[name]] = value

    def get(self, slot: int, name: str) -> int:
        """A counter of a slot."""
        return self._words[slot * _SLOT_WORDS + _INDEX[name]]

    def total(self, name: str, slots: Iterable[int] | None = None) -> int:
        """A counter summed over slots."""
        return sum(self.get(slot, name) for slot in (range(self.num_slots) if slots is None else slots))

    def observe(self, slot: int, ns: int) -> None:
        """An rpc's duration."""
        at = slot * _SLOT_WORDS
        self._words[at + len(NAMES) + bucket_of(ns)] += 1
        self._words[at + _INDEX["rpcs"]] += 1
        self._words[at + _INDEX["rpc_ns"]] += ns
        if ns > self._words[at + _INDEX["max_rpc_ns"]]:
            self._words[at + _INDEX["max_rpc_ns"]] = ns

    def histogram(self, slots: Iterable[int] | None = None) -> list[int]:
        """Summed over slots."""
        summed = [0] * NUM_BUCKETS
        for slot in range(self.num_slots) if slots is None else slots:
            at = slot * _SLOT_WORDS + len(NAMES)
            for bucket, count in enumerate(self._words[at : at + NUM_BUCKETS]):
                summed[bucket] += count
        return summed

    def close(self) -> None:
        """Gives the mapping back."""
        self.rows.release()
        self._words.release()
        self._view.release()
        self._map.close()
