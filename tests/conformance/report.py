"""What a conformance run found, row by row."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one row. Differences fail it; `skipped` says why it was not tried; a deviation is a difference we mean."""

    name: str
    differences: tuple[str, ...] = ()
    skipped: str = ""
    deviation: str = ""


@dataclass(slots=True, kw_only=True)
class Report:
    """Counts outcomes and prints failures as they come."""

    out: TextIO
    max_shown_chars: int = 300
    num_passed: int = 0
    num_failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    deviations: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        if outcome.deviation:
            self.deviations[outcome.deviation] += 1
        if outcome.skipped:
            self.skipped[outcome.skipped] += 1
        elif outcome.differences:
            self.num_failed += 1
            shown = "; ".join(outcome.differences)
            short = shown if len(shown) <= self.max_shown_chars else shown[: self.max_shown_chars] + " …"
            print(f"FAIL {outcome.name}: {short}", file=self.out)
        else:
            self.num_passed += 1

    def close(self) -> int:
        """Print the summary and return the exit status: 0 if nothing failed and something passed."""
        for title, counter in (("expected differences", self.deviations), ("skipped", self.skipped)):
            for reason, count in counter.most_common():
                print(f"{title}: {count} × {reason}", file=self.out)
        print(f"{self.num_passed} passed, {self.num_failed} failed, {self.skipped.total()} skipped", file=self.out)
        return 0 if self.num_passed and not self.num_failed else 1
