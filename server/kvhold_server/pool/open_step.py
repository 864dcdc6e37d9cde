"""One step that has begun and is not complete: what must be made good when it is.

OpenStep 7 ── origins   what it published (provisional until the step is complete)
           ├─ gained    state blocks that it named before they are written
           ├─ released  what it let go (fenced until then; by reference)
           └─ copies    both ends are held until then
"""

from __future__ import annotations

from kvhold_server.pool.fences import Fence, own_fence_owner
from kvhold_server.pool.origin import Origin
from kvhold_server.pool.values import Copy


class OpenStep:
    """A step of one session."""

    __slots__ = ("_fence", "_own_fence", "copies", "gained", "origins", "released", "session", "step")

    def __init__(self, session: int, step: int) -> None:
        self.session = session
        self.step = step
        self.origins: dict[int, Origin] = {}  # by group
        self.gained: set[int] = set()  # state blocks that got a hash in this step: not written yet (§15 M6)
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

    def check_invariants(self) -> None:
        """What it published is this step's own, group by group, and nobody else sees it yet."""
        for group, origin in self.origins.items():
            assert (origin.group, origin.session, origin.step) == (group, self.session, self.step)
            assert not origin.is_public and 0 <= origin.num_blocks <= sum(map(len, origin.parts))
