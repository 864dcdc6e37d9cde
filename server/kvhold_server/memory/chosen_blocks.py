"""Some of a table's blocks, and how to pick their items out of a column of all of them.

flags     0 1 1 0 1        column    a b c d e        among → b c e
flags     0 1 1 1 1        no gap: the same as column[1:5], which needs no look at the flags
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress, islice
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Some of the blocks. Of a full table they are all but the null block: then columns are cut, which is quicker."""

    blocks: list[int]  # ascending
    flags: "array[int] | None"  # one for every block, not 0: chosen; None: they follow each other without a gap

    @classmethod
    def of(cls, flags: "array[int]") -> "Chosen":
        """Those whose flag is not 0."""
        if flags and not flags[0] and flags.tobytes().find(bytes(flags.itemsize), flags.itemsize) < 0:
            return cls(blocks=list(range(1, len(flags))), flags=None)  # a full table, seen without a look at each flag
        blocks = list(compress(range(len(flags)), flags))
        has_gap = bool(blocks) and blocks[-1] - blocks[0] >= len(blocks)
        return cls(blocks=blocks, flags=flags if has_gap else None)

    def among(self, column: "array[int]") -> "array[int]":
        """Their items of a column of all blocks."""
        if self.flags is not None:
            return array(column.typecode, compress(column, self.flags))
        return column[self.blocks[0] : self.blocks[-1] + 1] if self.blocks else column[:0]

    def within(self, items: Iterator[T]) -> Iterator[T]:
        """Theirs of the items of all blocks from the first chosen one to the last."""
        return items if self.flags is None else compress(items, islice(self.flags, self.blocks[0], None))
