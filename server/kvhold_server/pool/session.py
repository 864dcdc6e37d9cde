"""What the pool remembers of a session: its sequences, those that it asked for in vain, and its open steps.

completed_step    open_steps      step
── 1 2 3 ─┤── 4 ─── 5 ─── 6 ──────┤          3 and all before it have left nothing in flight; 6 is the last begun
"""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum

from kvhold_server.pool.errors import HashesMissing, SequenceExists, UnknownSequence
from kvhold_server.pool.open_step import OpenStep
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.values import PrefixStatistics


class SessionState(Enum):
    """Where a session is in its life."""

    ALIVE = "alive"
    DEAD = "dead"  # its workers may still run
    RELEASED = "released"  # being freed in slices


class PoolSession:
    """One client's tenure in this pool. Serial numbers are never reused."""

    __slots__ = (
        "allotted",
        "completed_step",
        "open_steps",
        "refused",
        "sequences",
        "serial",
        "set_aside",
        "state",
        "statistics",
        "step",
    )

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.state = SessionState.ALIVE
        self.step = 0
        self.completed_step = 0
        self.open_steps: deque[OpenStep] = deque()
        self.sequences: dict[int, Sequence] = {}
        self.refused: dict[int, Sequence] = {}  # asked and not admitted: their hashes, oldest first; bounded
        self.allotted: list[int] = []  # free blocks that it may draw by itself (allotment.py)
        self.set_aside: list[int] = []  # blocks that it may have drawn: held, in no table yet
        self.statistics = PrefixStatistics()

    def begin(self, step: int) -> None:
        """This step is the last one begun from now on."""
        self.step = step
        self.open_steps.append(OpenStep(self.serial, step))

    def running(self, sequence_id: int) -> Sequence:
        """The sequence that holds blocks under this id. Raises UnknownSequence."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            raise UnknownSequence(sequence_id)
        return sequence

    def waiting(self, sequence_id: int, hashes: list[bytes] | None, num_groups: int) -> Sequence:
        """A sequence that holds nothing, as far as it is known; hashes sent now replace what was remembered.

        Raises SequenceExists if it runs already, HashesMissing if they were never sent or are forgotten.
        """
        if sequence_id in self.sequences:
            raise SequenceExists(sequence_id)
        if hashes is None:
            known = self.refused.get(sequence_id)
            if known is None:
                raise HashesMissing(sequence_id, 0, 1)
            return known
        sequence = Sequence(sequence_id, num_groups)
        sequence.hashes = hashes
        return sequence

    def remember(self, sequence: Sequence, max_remembered: int) -> None:
        """Keeps the hashes of a sequence that will be asked for again by its id (R19). The oldest are forgotten."""
        refused = self.refused
        refused.pop(sequence.sequence_id, None)
        refused[sequence.sequence_id] = sequence
        if len(refused) > max_remembered:
            del refused[next(iter(refused))]

    def held(self) -> Counter[int]:
        """Its blocks, and how often each stands in a table or is an end of a copy. O(blocks)."""
        tables = (table for sequence in self.sequences.values() for table in sequence.tables)
        held = Counter(block for table in tables for block in table if block)
        held.update(block for open_step in self.open_steps for block in open_step.copy_ends)
        held.update(self.set_aside)
        return held

    def check_invariants(self) -> None:
        """Open steps are those after the completed one, in order; nobody runs and waits at once."""
        assert self.refused.keys().isdisjoint(self.sequences)
        if self.state is SessionState.ALIVE:
            assert self.completed_step <= self.step
            steps = [open_step.step for open_step in self.open_steps]
            assert steps == sorted(set(steps)), steps
            assert not steps or (self.completed_step < steps[0] and steps[-1] == self.step), (
                self.completed_step,
                steps,
            )
        for open_step in self.open_steps:
            open_step.check_invariants()
