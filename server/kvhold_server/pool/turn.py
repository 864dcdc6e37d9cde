"""What one verb (or one step of many) works on: whose it is, which step it belongs to, and where its answers go."""

from __future__ import annotations

from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.origin import Origin
from kvhold_server.pool.session import PoolSession
from kvhold_server.pool.values import Copy, StepOutput


class Turn:
    """A session's open step together with its output."""

    __slots__ = ("gained", "has_partials", "open_step", "output", "owner", "session", "store", "zeroing")

    def __init__(self, store: BlockStore, owner: PoolSession, *, has_partials: bool, zeroing: bool) -> None:
        self.store = store
        self.owner = owner
        self.session = owner.serial
        self.open_step = owner.open_steps[-1]
        self.gained = self.open_step.gained
        self.output = StepOutput()
        self.has_partials = has_partials  # hashes may name prefixes that end inside a block
        self.zeroing = zeroing

    def let_go(self, blocks: list[int], *, fence_own: bool = False) -> None:
        """One reference less; reusable by others once this step is complete."""
        self.store.let_go(blocks, self.open_step, fence_own=fence_own)

    def copy(self, copy: Copy) -> None:
        """Asks the client to copy; both ends are held until the step is complete."""
        self.output.copies.append(copy)
        self.open_step.copies.append(copy)
        self.store.has_copies = True

    def origin(self, group: int) -> Origin:
        """The origin of what this step publishes in a group."""
        origin = self.open_step.origins.get(group)
        if origin is None:
            origin = self.open_step.origins[group] = Origin(group, self.session, self.open_step.step)
            self.store.prefixes.num_provisional += 1
        return origin
