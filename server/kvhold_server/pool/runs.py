"""Stretches of consecutive ids in a table. Lists indexed by block are read and written there by slices, in C.

    [ 9, 40, 41, 42, … 99, 7, 12 ]      [9 …] one by one      40…99 as refs[40:100]      [7, 12] one by one

Prompts get their blocks together and give them back together, so that most of a long table is a few such stretches,
ascending or descending. Short or scattered tables lose a few comparisons by being asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

SHORTEST = 32  # blocks; from here on a slice is cheaper than a loop


Piece = tuple[list[int], "slice | None"]


class Runs:
    """Knows the ids of one pool that were seen in a stretch."""

    __slots__ = ("_ids", "_num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._ids: list[int] = []  # id at its own place, 0 where it was not seen; nothing before it is needed

    def cut(self, blocks: list[int]) -> list[Piece]:
        """The list in pieces, in order: a stretch with its slice, or blocks that are none, with None.

        The null block is in no stretch, and no block is in one twice.
        """
        pieces: list[Piece] = []
        start, end = 0, len(blocks)
        while end - start >= SHORTEST:
            size = _stretch(blocks, start, end)
            piece = blocks[start : start + size]
            pieces.append((piece, self._slice(piece) if size >= SHORTEST else None))
            start += size
        if start < end:
            pieces.append((blocks[start:], None))
        return pieces

    def _slice(self, piece: list[int]) -> slice | None:
        """Where these ids are in a list of all, if they follow each other."""
        first, last = piece[0], piece[-1]
        where = slice(first, last + 1) if first < last else slice(first, last - 1 if last else None, -1)
        if not self._ids:
            self._ids = [0] * self._num_blocks
        if self._ids[where] == piece:  # quick: these are the very objects
            return where if first and last else None
        if piece != list(range(first, last + 1) if first < last else range(first, last - 1, -1)):
            return None
        self._ids[where] = piece
        return where if first and last else None


def read(column: Sequence[T], pieces: list[Piece]) -> list[T]:
    """The column's entries of these blocks."""
    found: list[T] = []
    for blocks, where in pieces:
        found += map(column.__getitem__, blocks) if where is None else column[where]
    return found


def write(column: list[T], pieces: list[Piece], value: T) -> None:
    """Sets the column's entries of these blocks."""
    for blocks, where in pieces:
        if where is None:
            for block in blocks:
                column[block] = value
        else:
            column[where] = [value] * len(blocks)


def _stretch(blocks: list[int], start: int, end: int) -> int:
    """How many from `start` on look like one stretch by some of them; if it is too short, how many to pass over."""
    first, size = blocks[start], SHORTEST
    step = blocks[start + size - 1] - first
    if step not in (size - 1, 1 - size):
        return size - 1
    step = 1 if step > 0 else -1
    low, high = size, end - start
    middle = high  # mostly it is all the rest
    while low < high:
        if blocks[start + middle - 1] == first + step * (middle - 1):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
