"""A checksum of one block's bytes, over every page that its group has on every rank. Opt-in: it reads all of them.

    block 7 of group 1 ─▶ rank 0: layer a page 7, layer c page 7 ┐
                          rank 1: layer a page 7, layer c page 7 ┴─▶ one XXH3 (or CRC-32) over all, in this order

Taken when a block's record is written (its bytes are proven then), checked on the first hit after a recovery.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.plan import RankPlan, TensorPlacement
from kvhold_server.memory.record_checksum import ChecksumKind, best_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Contiguous bytes of each block: block b's begin at offset + b · stride."""

    offset_bytes: int
    stride_bytes: int
    size_bytes: int


def spans_of(placement: TensorPlacement, layer_index: int) -> list[Span]:
    """The pieces of one layer's page in address order; one, unless heads or states of a block lie apart."""
    first = placement.page_offset_bytes(layer_index, 0)
    if not placement.content_size_bytes:
        pieces = [(first, placement.page_size_bytes)]
    else:
        pieces = sorted(
            (first + h * placement.head_stride_bytes + s * placement.state_stride_bytes, placement.content_size_bytes)
            for h in range(placement.num_heads)
            for s in range(placement.num_states)
        )
    return [Span(offset_bytes=o, stride_bytes=placement.block_stride_bytes, size_bytes=n) for o, n in _merged(pieces)]


def spans_of_group(plan: RankPlan, group: int, *, host: bool = False) -> list[Span]:
    """Every piece of a group's blocks in one region of one rank, each byte once (layers may share bytes)."""
    wanted: set[LayerName] = set(plan.groups[group].layer_names)
    found: dict[Span, None] = {}
    for placement in plan.tensors:
        if placement.host_resident == host:
            for index, name in enumerate(placement.layer_names):
                if name in wanted:
                    found |= dict.fromkeys(spans_of(placement, index))
    return list(found)


class BlockChecksums:
    """Reads regions that somebody else mapped and keeps alive."""

    def __init__(self, spans: Sequence[Sequence[tuple[memoryview, Sequence[Span]]]]) -> None:
        """For each group: the regions that it has pages in, and where in them."""
        self._spans = spans
        self._kind = best_kind()

    def of(self, group: int, block: int) -> int:
        """1 .. 2**64 − 1. Costs a pass over the block's bytes."""
        pieces = (
            region[start : start + span.size_bytes]
            for region, spans in self._spans[group]
            for span in spans
            for start in (span.offset_bytes + block * span.stride_bytes,)
        )
        return self._digest(pieces) or 1

    def matches(self, group: int, block: int, checksum: int) -> bool:
        """Whether the bytes are still those that the checksum was taken of; 0 (not taken) matches nothing."""
        return checksum != 0 and self.of(group, block) == checksum

    def _digest(self, pieces: Iterable[memoryview]) -> int:
        if self._kind is ChecksumKind.XXH3:
            import xxhash

            state = xxhash.xxh3_64()
            for piece in pieces:
                state.update(piece)
            digest: int = state.intdigest()
            return digest
        crc = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        return crc | 1 << 32


def _merged(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins pieces that touch."""
    merged: list[tuple[int, int]] = []
    for offset, size in pieces:
        if merged and merged[-1][0] + merged[-1][1] == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((offset, size))
    return merged
