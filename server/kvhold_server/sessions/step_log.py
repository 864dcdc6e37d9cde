"""Exactly-once steps of one session: what comes again gets the first answer, what comes too late is refused.

    client: (5,0) ─▶ applied, answer lost        log: last (5,0), answers {(5,0): A}
            (5,0) ─▶ A again, nothing applied
            (5,1) ─▶ applied                     log: last (5,1), answers {(5,0): A, (5,1): B}
            (4,0) ─▶ StepOutOfOrder

`begin` only checks, `finish` records: a step that was refused with a typed error in between left no trace and may be sent
again, corrected or not. The answer is opaque here (the node stores what its caller encodes).
"""

from dataclasses import dataclass, field

from kvhold_server.domain.errors import InvalidField
from kvhold_server.sessions.errors import StepOutOfOrder

MAX_STEP = 2**63 - 1
MAX_PART = 1023


@dataclass(slots=True)
class StepLog:
    """Mutable; O(1) per call and bounded."""

    max_answers: int = 4  # remembered; a client has at most one request in flight, so one would do for it
    last_step: int = 0
    last_part: int = 0
    completed_step: int = 0
    _answers: dict[tuple[int, int], object] = field(default_factory=dict, repr=False)

    def begin(self, step: int, part: int = 0, completed_step: int = 0) -> object | None:
        """Returns the stored answer if this (step, part) was applied before, None if it is to be applied now.

        Changes nothing. Raises InvalidField, StepOutOfOrder (not after the last, or a completed step that shrinks or did
        not begin; 0 = nothing new completed).
        """
        raise NotImplementedError

    def finish(self, step: int, part: int, completed_step: int, answer: object) -> None:
        """Records that (step, part), accepted by `begin`, was applied and answered."""
        raise NotImplementedError

    @property
    def all_completed(self) -> bool:
        """Whether every step that began is complete."""
        return self.completed_step >= self.last_step

    def check_invariants(self) -> None:
        """Asserts bounds and order."""
        raise NotImplementedError
