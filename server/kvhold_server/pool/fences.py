"""Fences: who may take a freed block before the step that last used it is complete.

A session that lets a block go may still have kernels in flight that read or write it. Its own later steps run behind
them on the same device, so it may take the block again at once; another session must wait until the step is complete.

    step 7 of A frees b      fence_of[b] = (A, 7), open       others walk past b in the free list
    B hits b, frees it too   fence_of[b] = {(A, 7), (B, 3)}   only when both are complete anybody may take it
    A completes 7            (A, 7) is closed                 now B may

A fence is one object per session and step, shared by all its blocks; completing a step closes it in O(1). For "how many
free blocks may S take" only two kinds of numbers are kept: all fenced free blocks, and per session those that nobody
else fences. While a pool has a single session there is nothing to decide and nothing is recorded but references to the
lists of freed blocks (`OpenStep.released`), from which the fences are made when a second session opens.
"""

from __future__ import annotations

from collections.abc import Iterable


def own_fence_owner(session: int) -> int:
    """Owner of a fence that its own session must respect, too: nobody's serial, and a different one for each."""
    return -1 - session


class Fence:
    """One or several (session, step) whose kernels may still use a block."""

    __slots__ = ("members", "num_free", "owners", "parts")

    def __init__(self, owners: frozenset[int], parts: frozenset[Fence]) -> None:
        self.owners = owners  # sessions that it still waits for; empty = closed
        self.parts = parts  # of a compound: the simple fences that are still open; of a simple one: none
        self.num_free = 0  # free blocks that carry it
        self.members: dict[frozenset[Fence], Fence] = {}  # of a simple fence: compounds that contain it


class Fences:
    """Fence of each block, and the numbers that availability needs."""

    __slots__ = ("_compounds", "_fence_of", "_sole", "total")

    def __init__(self) -> None:
        self._fence_of: dict[int, Fence] = {}  # blocks that were let go under a fence which was open then
        self._sole: dict[int, int] = {}  # session → free blocks that only it fences
        self._compounds: dict[frozenset[Fence], Fence] = {}
        self.total = 0  # free blocks under an open fence

    def blocked_for(self, session: int) -> int:
        """Free blocks that this session may not take now."""
        return self.total - self._sole.get(session, 0)

    def fence_for(self, session: int, block: int) -> Fence | None:
        """The fence that keeps this session from taking the block."""
        fence = self._fence_of.get(block)
        return fence if fence is not None and self.stands(session, fence) else None

    @staticmethod
    def stands(session: int, fence: Fence) -> bool:
        """Does the fence keep this session out?"""
        owners = fence.owners
        return len(owners) > 1 or (len(owners) == 1 and session not in owners)

    def let_go(self, fence: Fence, blocks: Iterable[int]) -> None:
        """The fence's session let these blocks go; some are still held by others. Before `enter_free`."""
        fence_of = self._fence_of
        for block in blocks:
            old = fence_of.get(block)
            # A later step of the same session completes later: its fence covers the earlier one.
            simple = old is None or not old.owners or old.owners == fence.owners
            fence_of[block] = fence if simple else self._join(old, fence)  # type: ignore[arg-type]

    def _join(self, old: Fence, new: Fence) -> Fence:
        parts = (old.parts or frozenset((old,))) | {new}
        compound = self._compounds.get(parts)
        if compound is None:
            owners = frozenset(owner for part in parts for owner in part.owners)
            compound = self._compounds[parts] = Fence(owners, parts)
            for part in parts:
                part.members[parts] = compound
        return compound

    def enter_free(self, blocks: Iterable[int]) -> None:
        """These blocks have become free."""
        fence_of = self._fence_of
        for block in blocks:
            fence = fence_of.get(block)
            if fence is not None:
                if fence.owners:
                    fence.num_free += 1
                    self._count(fence.owners, 1)
                else:
                    del fence_of[block]

    def leave_free(self, blocks: Iterable[int]) -> None:
        """These free blocks are held again. Their fence stays: its kernels are still running."""
        fence_of = self._fence_of
        for block in blocks:
            fence = fence_of.get(block)
            if fence is not None:
                if fence.owners:
                    fence.num_free -= 1
                    self._count(fence.owners, -1)
                else:
                    del fence_of[block]

    def _count(self, owners: frozenset[int], num: int) -> None:
        self.total += num
        if len(owners) == 1:
            (owner,) = owners
            self._sole[owner] = self._sole.get(owner, 0) + num

    def close(self, fence: Fence) -> None:
        """The fence's step is complete."""
        self._narrow(fence, frozenset())
        for parts, compound in fence.members.items():
            compound.parts -= {fence}
            if parts in self._compounds:
                del self._compounds[parts]
            self._narrow(compound, frozenset(owner for part in compound.parts for owner in part.owners))
        fence.members = {}

    def _narrow(self, fence: Fence, owners: frozenset[int]) -> None:
        if owners != fence.owners:
            self._count(fence.owners, -fence.num_free)
            fence.owners = owners
            if owners:
                self._count(owners, fence.num_free)
            else:
                fence.num_free = 0

    def forget_closed(self) -> None:
        """Drops entries of closed fences. O(entries)."""
        self._fence_of = {block: fence for block, fence in self._fence_of.items() if fence.owners}

    @property
    def is_quiet(self) -> bool:
        """No block is fenced and none can come out fenced."""
        return not self.total and not any(fence.owners for fence in self._fence_of.values())

    def check_invariants(self, free: set[int]) -> None:
        """The kept numbers are those that a recount gives."""
        fenced = {b: f for b, f in self._fence_of.items() if b in free and f.owners}
        assert self.total == len(fenced), (self.total, len(fenced))
        for session, num in self._sole.items():
            assert num == sum(fence.owners == {session} for fence in fenced.values()), session
        for fence in set(fenced.values()):
            assert fence.num_free == sum(other is fence for other in fenced.values())
