"""Sampled lives of blocks: how long content stayed, how long it was idle before it was overwritten, gaps between uses.

Every k-th block handed out is watched (a count, not a random draw, so that runs repeat). `now_s` is set by the caller.
"""

from collections import deque
from dataclasses import dataclass
from itertools import compress, pairwise

from kvhold_server.pool.runs import Piece

_MAX_SAMPLES = 4_096
_MAX_ACCESSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySample:
    """One watched block was handed out again (or evicted by id)."""

    lifetime_s: float
    idle_s: float  # since it was last handed out or hit
    reuse_gaps_s: tuple[float, ...]  # between its last hits, at most three


class _Watched:
    __slots__ = ("accesses_s", "birth_s", "last_s")

    def __init__(self, now_s: float) -> None:
        self.birth_s = self.last_s = now_s
        self.accesses_s: deque[float] = deque(maxlen=_MAX_ACCESSES)


class Residency:
    """Watches a sample of blocks; drain with `take_samples`."""

    __slots__ = ("_is_watched", "_num_handed_out", "_samples", "_watched", "every", "now_s")

    def __init__(self, every: int, num_blocks: int) -> None:
        self.every = every  # 0 = off
        self.now_s = 0.0
        self._num_handed_out = 0
        self._watched: dict[int, _Watched] = {}
        self._is_watched = bytearray(num_blocks if every else 0)  # by block, so that a stretch is asked at once
        self._samples: deque[ResidencySample] = deque(maxlen=_MAX_SAMPLES)

    def handed_out(self, blocks: list[int], pieces: list[Piece]) -> None:
        """Their former content, if watched, is over; some are watched from now on. `pieces`: the blocks, cut."""
        watched, is_watched = self._watched, self._is_watched
        if watched:
            for block in self._watched_among(pieces):
                self.ended(block)
        for block in blocks[-self._num_handed_out % self.every :: self.every]:
            watched[block] = _Watched(self.now_s)
            is_watched[block] = 1
        self._num_handed_out += len(blocks)

    def touched(self, pieces: list[Piece]) -> None:
        """These blocks were hit."""
        for block in self._watched_among(pieces):
            watched = self._watched[block]
            watched.last_s = self.now_s
            watched.accesses_s.append(self.now_s)

    def _watched_among(self, pieces: list[Piece]) -> list[int]:
        found: list[int] = []
        for blocks, where in pieces:
            if where is None:
                found += filter(self._watched.__contains__, blocks)
            else:
                found += compress(blocks, self._is_watched[where])
        return found

    def ended(self, block: int) -> None:
        """The block's content is gone: emits its sample if it was watched."""
        watched = self._watched.pop(block, None)
        if watched is not None:
            self._is_watched[block] = 0
            times = list(watched.accesses_s)
            self._samples.append(
                ResidencySample(
                    lifetime_s=self.now_s - watched.birth_s,
                    idle_s=self.now_s - watched.last_s,
                    reuse_gaps_s=tuple(b - a for a, b in pairwise(times)),
                )
            )

    def forget(self) -> None:
        """The cache was reset: nothing watched so far counts."""
        self._watched.clear()
        self._is_watched[:] = bytes(len(self._is_watched))

    @property
    def watched(self) -> list[int]:
        """Blocks being watched, ascending."""
        return sorted(self._watched)

    def take_samples(self) -> list[ResidencySample]:
        """Samples since the last call, oldest first; at most 4096 are kept."""
        samples = list(self._samples)
        self._samples.clear()
        return samples
