"""Rings and k-pool tails: one scratch block per sequence, from first allocation to end. Never shared or cached."""

from __future__ import annotations

from kvhold_server.pool.kinds.base import GroupPolicy
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.turn import Turn


class RingPolicy(GroupPolicy):
    """One block, whatever the length."""

    grows_plainly = False
    publishes_plainly = False
    wants_zeroing = False

    def cap_blocks(self) -> int | None:
        return 1

    def need_admission(
        self, sequence: Sequence, hits: list[int], hit_tokens: int, total: int, slots: int, main: int, capped: bool
    ) -> int:
        return 1

    def adopt(self, sequence: Sequence, hits: list[int], hit_tokens: int, total: int) -> None:
        assert not hits

    def take_external(self, sequence: Sequence, total: int, turn: Turn) -> None:
        sequence.tables[self.gid] += self.store.take(1, turn.session)

    def need_growth(self, sequence: Sequence, slots: int, main: int, computed: int) -> int:
        return 0 if sequence.tables[self.gid] else 1

    def grow(self, sequence: Sequence, slots: int, main: int, computed: int, turn: Turn) -> list[int]:
        table = sequence.tables[self.gid]
        if table:
            return []
        blocks = self.store.take(1, turn.session)
        table += blocks
        if turn.zeroing and self.wants_zeroing:
            turn.output.zero_blocks += blocks
        return blocks

    def publish(self, sequence: Sequence, tokens: int, turn: Turn) -> None:
        """Scratch is nobody else's."""


class KpoolTailPolicy(RingPolicy):
    """A ring whose block must be zeroed."""

    wants_zeroing = True
