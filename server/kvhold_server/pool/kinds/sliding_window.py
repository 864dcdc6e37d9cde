"""Sliding window: token t reads tokens > t - W only, so older blocks are let go, and a hit needs the last window only.

W = 8, block 4      needs ceil(7 / 4) = 2 blocks before the hit's end (the next token takes one of the 8 places)

cached   1 2 3 4 5 6 7          29 tokens  →  [0 0 0 0 0 6 7]   hit 28
cached   1 2 3 4 5 . 7          29 tokens  →  [0 0 0 4 5]       hit 20
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.kinds.base import Found, GroupPolicy, Prefix, cdiv
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.turn import Turn


class SlidingWindowPolicy(GroupPolicy):
    """Keeps the window, and `extra_retained_tokens` behind it."""

    skips = True

    @property
    def is_dense(self) -> bool:
        if self.align_tokens % self.block_tokens:
            return True
        if self.pool.retention_interval_tokens is not None:
            return False
        return self.needed_blocks + self.is_eagle >= self.align_tokens // self.block_tokens

    @property
    def needed_blocks(self) -> int:
        """Blocks before the end of a hit that the next token reads."""
        return cdiv(self.config.window_tokens - 1, self.block_tokens)

    @property
    def proves_prefix(self) -> bool:  # type: ignore[override]
        """A window of one token needs no block at all."""
        return self.needed_blocks > 0

    def skipped_tokens(self, processed: int) -> int:
        return max(0, processed - self.config.window_tokens + 1 - self.config.extra_retained_tokens)

    def release_skipped(self, sequence: Sequence, processed: int, turn: Turn) -> None:
        config = self.config
        last = (processed - config.window_tokens + 1 - config.extra_retained_tokens) // self.block_tokens
        if last > 0:
            table = sequence.tables[self.gid]
            if last > len(table):
                last = len(table)
            if last and table[last - 1]:
                self._null_down(table, last, 0, turn)

    def cap_blocks(self) -> int | None:
        pool = self.pool
        in_flight = pool.max_model_len if pool.max_in_flight_tokens is None else pool.max_in_flight_tokens
        reach = self.config.window_tokens - 1 + self.config.extra_retained_tokens + in_flight
        return cdiv(min(reach, pool.max_model_len), self.block_tokens) + 1

    def find(self, prefix: Prefix, groups: Seq[int], limit: int, drop: bool, align: int) -> Found:
        size = self.block_tokens
        needed = self.needed_blocks + drop
        view = prefix.sequence.block_hashes(self.stride)
        count = min(limit // size, len(view))
        if not needed:
            count = limit // size
            count -= count * size % align // size
            return Found([[0] * count for _ in groups], count * size)
        rows: list[list[int]] = [[0] * count for _ in groups]
        run = 0
        i = count
        is_enough = False
        while i:
            i -= 1
            found = prefix.at(groups, view[i])
            if found is None:
                run = 0
                continue
            if not run and size != align and (i + (not drop)) * size % align:
                continue  # a hit may not end here
            for row, block in zip(rows, found, strict=True):
                row[i] = block
            run += 1
            if run >= needed:
                is_enough = True
                break
        length = i + run if is_enough else run  # what touches the start is enough, however short
        if not is_enough:
            length = _aligned(length, size, align)
        if drop and length:
            length = _aligned(length - 1, size, align)
        return Found([row[:length] for row in rows], length * size)

    def mask(self, sequence: Sequence, start: int, end: int) -> Seq[int] | None:
        """Blocks near the places where a hit may end: of every segment, and before the prompt's reachable ends."""
        size, align, interval = self.block_tokens, self.align_tokens, self.pool.retention_interval_tokens
        if align % size:
            return None
        shift = 1 if self.is_eagle else 0
        needed = self.needed_blocks + shift
        segment = align if interval is None else interval
        kept: set[int] = set()
        if segment:
            per = segment // size
            if needed >= per:
                return None
            kept.update(i for i in range(start, end) if i >= shift and (i - shift) % per >= per - needed)
        if interval is not None:
            for boundary in reachable_ends(sequence, self.pool, self.any_eagle):
                # A later prompt may part from this one shortly before the end: the unit below must work, too.
                for margin in range(self.pool.num_retained_boundary_units + 1):
                    last = (boundary // align - margin) * align // size + shift
                    kept.update(range(max(start, last - needed), min(end, last)))
        return sorted(kept)


def reachable_ends(sequence: Sequence, pool: PoolConfig, any_eagle: bool) -> list[int]:
    """Token counts at which a later request with this prompt can resume (§11 C2)."""
    prompt, block = sequence.num_prompt_tokens, pool.scheduler_block_tokens
    if any_eagle:
        ends = [max((prompt - 1) // block * block - block, 0), max(prompt // block * block - block, 0)]
    else:
        ends = [prompt - 1]
    if sequence.boundary_tokens:
        ends.append(sequence.boundary_tokens)
    return ends


def _aligned(length: int, size: int, align: int) -> int:
    """The longest length of at most this many blocks that ends at a multiple of `align` tokens."""
    while length and size != align and length * size % align:
        length -= 1
    return length
