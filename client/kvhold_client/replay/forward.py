"""What stands for the model: computing a block stamps it, using a cached block checks it.

    request with 40 tokens computed, 16-token blocks, 8 more granted

        block 0      block 1      block 2
        [digest 0]   [digest 1]   [private]  ─▶ full at 48 tokens: stamped with its digest, then it may be published

A block that is not full yet carries a stamp of its request alone, so that a stranger's write would show there, too.
"""

import hashlib
from collections.abc import Iterable
from typing import Protocol

from kvhold_client.replay.counters import SharedCounters
from kvhold_client.replay.request import Request
from kvhold_client.shape import PoolShape
from kvhold_client.step_outcome import Admission


class BlockBytes(Protocol):
    """Where stamps go: `stamps.Stamper`."""

    bytes_per_block: list[int]

    def write(self, group: int, blocks: list[int], digests: list[bytes]) -> None: ...

    def wrong_blocks(self, group: int, blocks: list[int], digests: list[bytes]) -> list[int]: ...


class Forward:
    """Computes and reads for one scheduler; counts blocks, bytes, and stamps that are not what they must be."""

    def __init__(self, memory: BlockBytes, shape: PoolShape, counters: SharedCounters, slot: int) -> None:
        self._memory = memory
        self._counters = counters
        self._slot = slot
        self._groups = [(g, group.block_size_tokens) for g, group in enumerate(shape.groups) if group.paged]
        self._unit_tokens = shape.hash_block_size_tokens
        self._hash_size = shape.hash_size_bytes
        self.mismatches: list[str] = []

    def compute(self, advanced: Iterable[tuple[Request, int]]) -> None:
        """Stamps every block that gets its first or its last token in this step."""
        for group, size in self._groups:
            blocks: list[int] = []
            digests: list[bytes] = []
            for request, tokens in advanced:
                start = request.num_computed
                end = start + tokens
                if tokens == 1 and end % size and start % size:
                    continue
                table = request.sequence.tables[group]
                for i in range(start // size, -(-end // size)):
                    if table[i] and (i * size >= start or (i + 1) * size <= end):
                        blocks.append(table[i])
                        digests.append(self._stamp_of(request, i, size, end))
            if blocks:
                self._memory.write(group, blocks, digests)
                self._counters.add(self._slot, "blocks_written", len(blocks))

    def read_hits(self, admissions: Iterable[tuple[Request, Admission]]) -> None:
        """Checks every cached block that a sequence was given at its admission."""
        for request, admission in admissions:
            if admission.hit_tokens:
                self._check(request, admission.hit_tokens, "hit")

    def check_all(self, request: Request) -> None:
        """Checks everything that a request holds: nobody may have written there."""
        self._check(request, request.num_computed, "held")

    def _check(self, request: Request, num_tokens: int, what: str) -> None:
        for group, size in self._groups:
            table = request.sequence.tables[group]
            kept = [i for i in range(min(-(-num_tokens // size), len(table))) if table[i]]
            if not kept:
                continue
            blocks = [table[i] for i in kept]
            digests = [self._stamp_of(request, i, size, num_tokens) for i in kept]
            wrong = self._memory.wrong_blocks(group, blocks, digests)
            self._counters.add(self._slot, "blocks_verified", len(blocks))
            self._counters.add(self._slot, "bytes_verified", len(blocks) * self._memory.bytes_per_block[group])
            if wrong:
                self._counters.add(self._slot, "mismatches", len(wrong))
                self.mismatches.append(f"row {request.row_index}, group {group}: {what} blocks {wrong[:8]} differ")

    def _stamp_of(self, request: Request, i: int, size: int, num_tokens: int) -> bytes:
        """Digest of a full block, else the request's own mark."""
        if (i + 1) * size > num_tokens:
            return hashlib.shake_256(b"partial %d %d" % (request.row_index, i)).digest(32)
        end = (i + 1) * size // self._unit_tokens * self._hash_size
        return bytes(request.sequence.hashes[end - self._hash_size : end])
