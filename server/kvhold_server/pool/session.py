"""What the pool remembers of a session: its sequences, its open steps, and what each open step did.

PoolSession ── open_steps ─▶ OpenStep 7 ── origins   what it published (provisional until the step is complete)
                                        ├─ released  what it let go (fenced until then; by reference)
                                        └─ copies    both ends are held until then
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from kvhold_server.pool.fences import Fence, own_fence_owner
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.values import Copy, PrefixStatistics

if TYPE_CHECKING:
    from kvhold_server.pool.turn import Turn


class SessionState(Enum):
    """Where a session is in its life."""

    ALIVE = "alive"
    DEAD = "dead"  # its workers may still run
    RELEASED = "released"  # being freed in slices


class Origin:
    """Who published blocks, in which step: one object for all blocks of a session's step and group.

    A block's hash may be seen by others once its origin is public.
    """

    __slots__ = ("group", "is_public", "num_blocks", "parts", "session", "step")

    def __init__(self, group: int, session: int, step: int) -> None:
        self.group = group
        self.session = session
        self.step = step
        self.is_public = False
        self.num_blocks = 0  # that have it; kept until it is public
        self.parts: list[list[int]] = []  # blocks published, list by list; emptied when public


class OpenStep:
    """One step that has begun and is not complete."""

    __slots__ = ("_fence", "_own_fence", "copies", "origins", "released", "session", "step")

    def __init__(self, session: int, step: int) -> None:
        self.session = session
        self.step = step
        self.origins: dict[int, Origin] = {}  # by group
        self.released: list[list[int]] = []
        self.copies: list[Copy] = []
        self._fence: Fence | None = None
        self._own_fence: Fence | None = None

    @property
    def copy_ends(self) -> list[int]:
        """Source, target, source, target, ...: held until this step is complete. Group by group, as they are copied."""
        ordered = sorted(self.copies, key=lambda copy: copy.group)
        return [block for copy in ordered for block in (copy.source, copy.target)]

    def fence_for(self, *, fence_own: bool) -> Fence:
        """The fence of blocks let go in this step; `fence_own`: one that this session must respect, too."""
        if fence_own:
            self._own_fence = self._own_fence or Fence(frozenset((own_fence_owner(self.session),)), frozenset())
            return self._own_fence
        self._fence = self._fence or Fence(frozenset((self.session,)), frozenset())
        return self._fence

    def fences(self) -> list[Fence]:
        """Those that were made."""
        return [fence for fence in (self._fence, self._own_fence) if fence is not None]


class PoolSession:
    """One client's tenure in this pool. Serial numbers are never reused."""

    __slots__ = (
        "completed_step",
        "open_steps",
        "refused",
        "sequences",
        "serial",
        "state",
        "statistics",
        "step",
        "turn",
    )

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.state = SessionState.ALIVE
        self.step = 0
        self.completed_step = 0
        self.open_steps: deque[OpenStep] = deque()
        self.sequences: dict[int, Sequence] = {}
        self.refused: dict[int, Sequence] = {}  # asked and not admitted: their hashes, oldest first; bounded
        self.turn: Turn | None = None  # of the last step begun
        self.statistics = PrefixStatistics()
