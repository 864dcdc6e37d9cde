"""Copies and zero-fills of whole blocks, over all layers of a group at once.

A placement holds its layers at one stride, so a batch of block copies is one indexed copy over [layer, block, …] and
no loop over layers or blocks. Batches are cut so that the copy's own temporary stays small.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvhold_client.layout import Placement, layers_view
from kvhold_client.mapping import MappedRegion
from kvhold_client.mapping_errors import InvalidCopy

MAX_TEMPORARY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """All layers' bytes of `source` go to `target`."""

    source: int
    target: int


def copy_blocks(region: MappedRegion, group_id: int, copies: Sequence[BlockCopy]) -> None:
    """Performs the whole batch, as if all sources were read before any target is written. Raises InvalidCopy.

    One source may feed several targets. A target that is written twice, or is a source too, has no defined content in
    an engine's step, so it is refused before anything is written. Block 0 is no target.
    """
    targets = [copy.target for copy in copies]
    sources = [copy.source for copy in copies]
    if len(set(targets)) != len(targets):
        raise InvalidCopy("a block is the target of two copies")
    if not set(targets).isdisjoint(sources):
        raise InvalidCopy(f"blocks {sorted(set(targets) & set(sources))} are sources and targets in one batch")
    placements = region.layout.placements_of_group(group_id)
    _check_blocks(region, placements, targets, lowest=1)
    _check_blocks(region, placements, sources, lowest=0)
    for placement in placements:
        maker = region.maker_of(placement)
        layers = region.make_view(placement, layers_view(placement))
        for part in _parts(placement, len(copies)):
            maker.copy_blocks(layers, sources[part], targets[part])


def zero_blocks(region: MappedRegion, group_id: int, blocks: Sequence[int]) -> None:
    """Fills all layers' bytes of these blocks with zeros; padding is left alone. Raises InvalidCopy."""
    placements = region.layout.placements_of_group(group_id)
    _check_blocks(region, placements, blocks, lowest=1)
    for placement in placements:
        layers = region.make_view(placement, layers_view(placement))
        region.maker_of(placement).zero_blocks(layers, list(blocks))


def _check_blocks(region: MappedRegion, placements: Sequence[Placement], blocks: Sequence[int], *, lowest: int) -> None:
    if region.read_only:
        raise InvalidCopy("the region is mapped read-only")
    for placement in placements:
        outside = [block for block in blocks if not lowest <= block < placement.num_blocks]
        if outside:
            raise InvalidCopy(f"block {outside[0]} is not in {lowest}..{placement.num_blocks - 1}")


def _parts(placement: Placement, num_copies: int) -> Iterator[slice]:
    bytes_per_block = max(1, len(placement.layer_names) * placement.used_page_bytes)
    step = max(1, MAX_TEMPORARY_BYTES // bytes_per_block)
    return (slice(start, start + step) for start in range(0, num_copies, step))
