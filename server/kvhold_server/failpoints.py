"""Named places at which a test may stop, delay or fail the daemon. Nothing here is reachable from configuration.

Code that has such places takes an optional `hit: Callable[[str], None]` and calls it by name between two effects; a
daemon that is not under test passes None and pays one comparison. `Failpoints` is the callable that tests inject.

    Failpoints.parse("block_table.written=exit@17,drain.saved=sleep:0.5")
        the 17th time that block_table.written is reached, the process ends by SIGKILL: no cleanup, no flush
        every time that drain.saved is reached, it sleeps for half a second
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

Hit = Callable[[str], None]


class Stopped(BaseException):
    """A `raise` arm fired. Not an Exception: no handler of the code under test may take it for a failure of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What happens at a place."""

    action: str  # exit, raise, sleep, stop
    at: int = 0  # the n-th time only, counted from 1; 0: every time
    argument: float = 0.0  # sleep: seconds


def _exit(arm: Arm) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(arm: Arm) -> None:
    raise Stopped


def _sleep(arm: Arm) -> None:
    time.sleep(arm.argument)


def _stop(arm: Arm) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


ACTIONS: Final[Mapping[str, Callable[[Arm], None]]] = {"exit": _exit, "raise": _raise, "sleep": _sleep, "stop": _stop}


class Failpoints:
    """Callable; counts every place that it passes, armed or not."""

    def __init__(self, arms: Mapping[str, Arm] | None = None, *, at_total: int = 0, action: str = "raise") -> None:
        """`at_total` n > 0: `action` at the n-th place reached, whichever it is (for exhaustive tests)."""
        self.seen: Counter[str] = Counter()
        self._arms = dict(arms or {})
        self._at_total = at_total
        self._any = Arm(action=action)
        self._total = 0

    @classmethod
    def parse(cls, text: str) -> "Failpoints":
        """place=action[:argument][@n], comma separated. Raises ValueError for what it does not understand."""
        arms: dict[str, Arm] = {}
        for item in filter(None, text.split(",")):
            place, equals, rest = item.partition("=")
            rest, _, at = rest.partition("@")
            action, _, argument = rest.partition(":")
            if not equals or action not in ACTIONS:
                raise ValueError(f"{item!r}: expected place=action with an action of {', '.join(ACTIONS)}")
            arms[place] = Arm(action=action, at=int(at or 0), argument=float(argument or 0.0))
        return cls(arms)

    def __call__(self, place: str) -> None:
        self.seen[place] += 1
        self._total += 1
        if self._total == self._at_total:
            ACTIONS[self._any.action](self._any)
        arm = self._arms.get(place)
        if arm is not None and arm.at in (0, self.seen[place]):
            ACTIONS[arm.action](arm)
