"""State layers (mamba and relatives): what matters is the state at one boundary, not the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvhold_server.domain.pool_config import GroupConfig, PoolConfig
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.kinds.base import Found, GroupPolicy, Prefix
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.turn import Turn


class MambaPolicy(GroupPolicy):
    """Modes "none" and "all": an ordinary table, of which only the last block(s) stay while the sequence runs."""

    finds_units = True
    is_drop_free = True
    is_indivisible = True
    wants_zeroing = False

    def __init__(self, gid: int, config: GroupConfig, pool: PoolConfig, store: BlockStore) -> None:
        super().__init__(gid, config, pool, store)
        self.extra_tokens = config.num_speculative_blocks * config.block_size_tokens

    def skipped_tokens(self, processed: int) -> int:
        return processed - 1

    def find(self, prefix: Prefix, groups: Seq[int], limit: int, drop: bool, align: int) -> Found:
        """The last boundary whose state is cached."""
        size, unit = self.block_tokens, self.pool.hash_unit_tokens
        fine = align < size
        step = unit if fine else size
        view = prefix.sequence.hashes if fine else prefix.sequence.block_hashes(self.stride)
        for i in range(min(limit // step, len(view)) - 1, -1, -1):
            tokens = (i + 1) * step
            if tokens % align:
                continue
            found = prefix.at(groups, view[i])
            if found is not None:
                padding = [0] * ((tokens - 1) // size)
                return Found([[*padding, block] for block in found], tokens)
        return Found([[] for _ in groups], 0)

    def need_admission(self, hits: list[int], hit_tokens: int, total: int, slots: int, main: int, capped: bool) -> int:
        return super().need_admission(hits, hit_tokens, total, slots + self.extra_tokens, main, capped)

    def need_growth(self, sequence: Sequence, slots: int, main: int, computed: int) -> int:
        return super().need_growth(sequence, slots + self.extra_tokens, main, computed)

    def grow(self, sequence: Sequence, slots: int, main: int, computed: int, turn: Turn) -> list[int]:
        return super().grow(sequence, slots + self.extra_tokens, main, computed, turn)
