"""A block's checksum covers exactly its own bytes: every page of its group, nothing of its neighbours."""

from collections.abc import Callable

import pytest

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.plan import TensorPlacement
from kvhold_server.memory.page_checksums import BlockChecksums, Span, spans_of
from kvhold_server.memory.record_checksum import ChecksumKind

NUM_BLOCKS = 4
PLACEMENTS: dict[str, TensorPlacement] = {}


def placement(name: str, **shape: int) -> None:
    layers = (LayerName("a"), LayerName("b"))
    PLACEMENTS[name] = TensorPlacement(layer_names=layers, num_blocks=NUM_BLOCKS, size_bytes=4096, **shape)


# Layer by layer with opaque pages; block by block; heads apart: all blocks of head 0, then all of head 1.
placement("layers first", offset_bytes=64, layer_stride_bytes=128, block_stride_bytes=32, page_size_bytes=32)
placement("blocks first", offset_bytes=0, layer_stride_bytes=32, block_stride_bytes=64, page_size_bytes=32)
placement(
    "heads apart",
    offset_bytes=0,
    layer_stride_bytes=256,
    block_stride_bytes=32,
    page_size_bytes=64,
    num_heads=2,
    head_stride_bytes=128,
    num_states=2,
    state_stride_bytes=16,
    content_size_bytes=16,
)


def own_bytes(place: TensorPlacement, block: int) -> set[int]:
    """Written from the address formula, byte by byte."""
    found: set[int] = set()
    for layer in range(len(place.layer_names)):
        start = place.offset_bytes + layer * place.layer_stride_bytes + block * place.block_stride_bytes
        if not place.content_size_bytes:
            found |= set(range(start, start + place.page_size_bytes))
        for h in range(place.num_heads):
            for s in range(place.num_states):
                at = start + h * place.head_stride_bytes + s * place.state_stride_bytes
                found |= set(range(at, at + place.content_size_bytes))
    return found


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("kind", list(ChecksumKind))
def test_every_byte_of_a_block_counts_and_no_other(name: str, kind: ChecksumKind) -> None:
    place = PLACEMENTS[name]
    region = bytearray(place.end_bytes)
    spans = [span for layer in range(2) for span in spans_of(place, layer)]
    checksums = BlockChecksums([[(memoryview(region), spans)]])
    checksums._kind = kind
    before = [checksums.of(0, block) for block in range(NUM_BLOCKS)]
    for position in range(len(region)):
        region[position] ^= 0xA5
        owners = [block for block in range(NUM_BLOCKS) if position in own_bytes(place, block)]
        changed = [block for block in range(NUM_BLOCKS) if checksums.of(0, block) != before[block]]
        assert changed == owners, position
        region[position] ^= 0xA5
    assert all(checksums.matches(0, block, before[block]) for block in range(NUM_BLOCKS))
    assert not checksums.matches(0, 1, 0)


def test_touching_pieces_are_read_in_one_go() -> None:
    (first, second) = spans_of(PLACEMENTS["heads apart"], 0)
    assert first == Span(offset_bytes=0, stride_bytes=32, size_bytes=32)
    assert second == Span(offset_bytes=128, stride_bytes=32, size_bytes=32)


def test_ranks_and_their_order_count() -> None:
    span = [Span(offset_bytes=0, stride_bytes=8, size_bytes=8)]
    left, right = memoryview(b"left" * 8), memoryview(b"rite" * 8)
    both: Callable[[memoryview, memoryview], int] = lambda a, b: BlockChecksums([[(a, span), (b, span)]]).of(0, 1)  # noqa: E731
    assert len({both(left, right), both(right, left), both(left, left)}) == 3
