"""Real bytes in real blocks: whoever computes a block stamps it in every layer, whoever hits it checks every stamp.

A stamp is 32 bytes made of the block's digest, the layer and the group, at the first and at the last content bytes of
the block's page: in a wrong place, of another block, of another layer, or half written, it does not match.

    page of (layer, block)   [ stamp │ … content … │ stamp ]

All layers and all blocks of a step are written with one indexed assignment per placement.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from kvhold_client.layout import Placement, StridedView
from kvhold_client.mapping import MappedRegion

STAMP_BYTES = 32
_WORDS = STAMP_BYTES // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Face:
    """One end of the pages of a group's layers in one placement, as numpy [layer, block, word]."""

    words: Any
    rows: Any  # positions of the group's layers, [layer, 1]
    salts: Any  # [layer, 1, word]


class Stamper:
    """Stamps and checks blocks of one mapped rank."""

    def __init__(self, memory: MappedRegion) -> None:
        import numpy

        self._numpy = numpy
        groups = range(len(memory.layout.groups))
        self._faces = [self._faces_of(memory, group) for group in groups]
        self.bytes_per_block = [sum(len(face.rows) * STAMP_BYTES for face in faces) for faces in self._faces]

    def _faces_of(self, memory: MappedRegion, group: int) -> list[_Face]:
        numpy = self._numpy
        faces = []
        names = memory.layout.groups[group]
        for placement in memory.layout.placements_of_group(group):
            rows = [i for i, name in enumerate(placement.layer_names) if name in names]
            for at_end in (False, True):
                salts = [_salt(group, placement.layer_names[row], at_end) for row in rows]
                salt_words = numpy.frombuffer(b"".join(salts), dtype="<u8").reshape(len(rows), 1, _WORDS)
                view = memory.make_view(placement, _face_view(placement, at_end))
                faces.append(_Face(words=view.view("<u8"), rows=numpy.array(rows).reshape(-1, 1), salts=salt_words))
        return faces

    def write(self, group: int, blocks: list[int], digests: list[bytes]) -> None:
        """Stamps blocks; digest i belongs to block i."""
        expected = self._stamps(digests)
        for face in self._faces[group]:
            face.words[face.rows, blocks] = expected ^ face.salts

    def wrong_blocks(self, group: int, blocks: list[int], digests: list[bytes]) -> list[int]:
        """Blocks in which some layer's stamp is not the expected one."""
        expected = self._stamps(digests)
        numpy = self._numpy
        good = numpy.ones(len(blocks), dtype=bool)
        for face in self._faces[group]:
            good &= (face.words[face.rows, blocks] == expected ^ face.salts).all(axis=(0, 2))
        return [block for block, fine in zip(blocks, good.tolist(), strict=True) if not fine]

    def _stamps(self, digests: list[bytes]) -> Any:
        padded = b"".join(digest[:STAMP_BYTES].ljust(STAMP_BYTES, b"\0") for digest in digests)
        return self._numpy.frombuffer(padded, dtype="<u8").reshape(1, len(digests), _WORDS)


def _salt(group: int, layer_name: str, at_end: bool) -> bytes:
    return hashlib.shake_256(f"{group} {layer_name} {at_end}".encode()).digest(STAMP_BYTES)


def _face_view(placement: Placement, at_end: bool) -> StridedView:
    """The first or last STAMP_BYTES of the content of every page."""
    offset = placement.offset_bytes
    if at_end:
        offset += (placement.num_heads - 1) * placement.head_stride_bytes
        offset += (placement.num_states - 1) * placement.state_stride_bytes
        offset += placement.content_bytes - STAMP_BYTES
    return StridedView(
        dtype="uint8",
        offset_bytes=offset,
        shape=(len(placement.layer_names), placement.num_blocks, STAMP_BYTES),
        strides_bytes=(placement.layer_stride_bytes, placement.block_stride_bytes, 1),
    )
