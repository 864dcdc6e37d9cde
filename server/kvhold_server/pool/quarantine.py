"""References of the dead: a session has died, and its workers may still read and write what it held.

block            5      6      7
references       1      3      2
of dead          1      1      0        5 is quarantined: only the dead hold it
B dies, has 6    1      2      0        6 is not: one living session is left
C hits 5         1+1    2      0        5 is not any more, and is again once C lets it go
"""

from __future__ import annotations

from collections import Counter


class Quarantine:
    """Counts, block by block, the references that dead sessions have, and the blocks that nobody else holds."""

    __slots__ = ("_refs", "dead_refs", "num_blocks")

    def __init__(self, refs: list[int]) -> None:
        self._refs = refs  # all references; kept by the block store
        self.dead_refs: Counter[int] = Counter()
        self.num_blocks = 0  # that only the dead hold

    def enter(self, blocks: list[int]) -> None:
        """One reference to each of these blocks belongs to the dead from now on; null entries are skipped."""
        refs, dead_refs = self._refs, self.dead_refs
        for block in blocks:
            if block:
                dead_refs[block] += 1
                if refs[block] == dead_refs[block]:
                    self.num_blocks += 1

    def leave(self, blocks: list[int]) -> None:
        """The dead are about to let these references go. A block that another dead one holds is counted again then."""
        refs, dead_refs = self._refs, self.dead_refs
        for block in blocks:
            if block:
                if refs[block] == dead_refs[block]:
                    self.num_blocks -= 1
                dead_refs[block] -= 1
                if not dead_refs[block]:
                    del dead_refs[block]

    def revive(self, blocks: list[int]) -> None:
        """The living are about to hold these blocks."""
        refs, dead_refs = self._refs, self.dead_refs
        for block in blocks:
            if block and refs[block] and refs[block] == dead_refs.get(block):
                self.num_blocks -= 1

    def check_invariants(self) -> None:
        """No block has more dead references than references, and those that have no others are counted."""
        refs = self._refs
        assert all(0 < num <= refs[block] for block, num in self.dead_refs.items())
        assert self.num_blocks == sum(refs[block] == num for block, num in self.dead_refs.items())
