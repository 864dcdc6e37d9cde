"""Exactly-once steps of one session: what comes again gets the first answer, what comes too late is refused.

    client: (5,0) ─▶ applied, answer lost        log: last (5,0), answers {(5,0): A}
            (5,0) ─▶ A again, nothing applied
            (5,1) ─▶ applied                     log: last (5,1), answers {(5,0): A, (5,1): B}
            (4,0) ─▶ StepOutOfOrder

`begin` only checks, `finish` records: a step that was refused with a typed error in between left no trace and may be
sent again, corrected or not. The answer is opaque here (the node stores what its caller encodes).
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

        Changes nothing. `completed_step` 0 says nothing new. Raises InvalidField, StepOutOfOrder (not after the last
        one, or the completed step shrinks).
        """
        answer = self._answers.get((step, part))
        if answer is not None:
            return answer
        _check("step", step, 1, MAX_STEP)
        _check("part", part, 0, MAX_PART)
        _check("completed_step", completed_step, 0, step)
        shrinks = 0 < completed_step < self.completed_step
        if shrinks or (step, part) <= (self.last_step, self.last_part):
            raise StepOutOfOrder(step, part, completed_step, self.last_step, self.last_part, self.completed_step)
        return None

    def finish(self, step: int, part: int, completed_step: int, answer: object) -> None:
        """Records that (step, part), accepted by `begin`, was applied and answered (`answer` is not None)."""
        assert answer is not None and (step, part) > (self.last_step, self.last_part)
        self.last_step, self.last_part = step, part
        self.completed_step = max(self.completed_step, completed_step)
        self._answers[step, part] = answer
        if len(self._answers) > self.max_answers:
            del self._answers[next(iter(self._answers))]

    def complete(self, completed_step: int) -> None:
        """Moves completed_step outside a step (a close says it too); a smaller one changes nothing.

        Raises InvalidField.
        """
        _check("completed_step", completed_step, 0, self.last_step)
        self.completed_step = max(self.completed_step, completed_step)

    @property
    def all_completed(self) -> bool:
        """Whether every step that began is complete."""
        return self.completed_step >= self.last_step

    def check_invariants(self) -> None:
        """Asserts bounds and order."""
        assert 0 <= self.completed_step <= self.last_step
        assert len(self._answers) <= self.max_answers
        assert list(self._answers) == sorted(self._answers)
        assert not self._answers or next(reversed(self._answers)) == (self.last_step, self.last_part)


def _check(field_name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidField(field_name, value, f"must be {low}..{high}")
