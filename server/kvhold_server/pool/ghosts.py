"""Hashes that were evicted lately: tells a miss by eviction from a prefix that was never seen. Bounded.

Two generations: when the young one is full it becomes the old one, and the old one is dropped. So between one and two
times `capacity` of the latest evictions are remembered, at the price of one dict store each.
"""


class Ghosts:
    """Evicted hash → when, counted in evictions."""

    __slots__ = ("_capacity", "_old", "_young", "num_evicted")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self.num_evicted = 0  # blocks that lost their hash to make room, since the pool opened

    def add(self, keys: list[bytes]) -> None:
        """These hashes are not findable any more, the first of them first."""
        self._young.update(zip(keys, range(self.num_evicted + 1, self.num_evicted + len(keys) + 1), strict=True))
        self.num_evicted += len(keys)
        if len(self._young) > self._capacity:
            self._old, self._young = self._young, {}

    def age(self, key: bytes) -> int | None:
        """Evictions since this one; None if it is not remembered."""
        born = self._young.get(key) or self._old.get(key)
        return None if born is None else self.num_evicted - born

    def clear(self) -> None:
        """A reset is no eviction: what it forgot was never there."""
        self._young, self._old = {}, {}
