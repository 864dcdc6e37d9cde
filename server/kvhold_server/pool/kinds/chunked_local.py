"""Chunked local attention: token t reads its own chunk only, tokens floor(t / C) * C up to t.

    C = 8, block 4, 15 tokens known     [ 0 0 ][ 3 . ]     nothing before the chunk is needed; block 3 must be there

What lies before the chunk is not needed, and not looked at. So in a pool without any group that looks at the whole
prefix, a hit is only taken where the block that ends at it is cached: its hash proves that this prefix was seen.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvhold_server.pool.kinds.base import Found, GroupPolicy, Prefix, cdiv


class ChunkedLocalPolicy(GroupPolicy):
    """Keeps the current chunk."""

    skips = True
    proves_prefix = False
    needs_proof = False  # set by the hybrid: no other group proves a prefix

    def skipped_tokens(self, processed: int) -> int:
        return processed // self.config.chunk_tokens * self.config.chunk_tokens

    def cap_blocks(self) -> int | None:
        pool = self.pool
        in_flight = pool.max_model_len if pool.max_in_flight_tokens is None else pool.max_in_flight_tokens
        return cdiv(min(self.config.chunk_tokens + in_flight, pool.max_model_len), self.block_tokens)

    def find(self, prefix: Prefix, groups: Seq[int], limit: int, drop: bool, align: int) -> Found:
        size = self.block_tokens
        view = prefix.sequence.block_hashes(self.stride)
        count = min(limit // size, len(view)) if self.needs_proof else limit // size
        while True:
            start = min(self.skipped_tokens(limit) // size, count)
            rows: list[list[int]] = [[0] * start for _ in groups]
            for i in range(start, min(count, len(view))):
                found = prefix.at(groups, view[i])
                if found is None:
                    break
                for row, block in zip(rows, found, strict=True):
                    row.append(block)
            length = len(rows[0])
            if not self.needs_proof or not length or length > start:
                return Found(rows, length * size)
            if prefix.at(groups, view[length - 1]) is not None:
                return Found(rows, length * size)
            limit = length * size - 1
            count = limit // size
