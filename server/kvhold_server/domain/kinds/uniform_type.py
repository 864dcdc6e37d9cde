"""A group's spec where every layer keeps its own: same number of blocks for all, a page each.

block 7 of the group:  │ page of layer a │ page of b │ page of c      │     page = sum of the members' pages
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import LayerSpec, Limits, Mismatch, SpecCount, count_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformTypeSpec(LayerSpec):
    """Not a kind of layer: it exists as the spec of a group only. Build it with `uniform_type_of`."""

    kind: ClassVar[str] = "uniform_type"
    planner_made: ClassVar[bool] = True

    layer_names: tuple[LayerName, ...]
    layer_specs: tuple[LayerSpec, ...]  # parallel to layer_names
    counts: tuple[SpecCount, ...] = field(compare=False)  # the different ones: formulas ask each once

    @property
    def num_heads(self) -> int:
        """Opaque: ask the members."""
        return 1

    @property
    def num_states(self) -> int:
        """Opaque: ask the members."""
        return 1

    @property
    def content_size_bytes(self) -> int:
        """What the members' pages hold together."""
        return sum(entry.count * entry.spec.unpadded_page_size_bytes for entry in self.counts)

    @property
    def page_size_bytes(self) -> int:
        """The members' pages together."""
        return sum(entry.count * entry.spec.page_size_bytes for entry in self.counts)

    @property
    def prefix_cacheable(self) -> bool:
        """Only if all members are."""
        return all(entry.spec.prefix_cacheable for entry in self.counts)

    def max_request_blocks(self, limits: Limits) -> int:
        """The member that needs most decides for all."""
        return max(entry.spec.max_request_blocks(limits) for entry in self.counts)

    def min_request_blocks(self, limits: Limits) -> int:
        """The member that needs most decides for all."""
        return max(entry.spec.min_request_blocks(limits) for entry in self.counts)

    def table_row_blocks(self, limits: Limits, num_tokens: int) -> int:
        """The member that needs most decides for all."""
        return max(entry.spec.table_row_blocks(limits, num_tokens) for entry in self.counts)

    def each(self) -> Iterable[LayerSpec]:
        """The members' different specs."""
        return (entry.spec for entry in self.counts)

    def uniform_with(self, other: LayerSpec) -> bool:
        """A wrapper joins nothing."""
        return False

    def merge(self, others: Sequence[LayerSpec]) -> LayerSpec | Mismatch:
        """A wrapper merges with nothing."""
        raise AssertionError("a uniform_type is the spec of a group, not of a layer")

    def restricted_to(self, names: Sequence[LayerName]) -> "UniformTypeSpec":
        """Only the members named, in that order; the block size stays."""
        spec_of = dict(zip(self.layer_names, self.layer_specs, strict=True))
        return uniform_type_of(names, [spec_of[name] for name in names], self.block_size_tokens)


def uniform_type_of(
    names: Sequence[LayerName], specs: Sequence[LayerSpec], block_size_tokens: int | None = None
) -> UniformTypeSpec:
    """The wrapper around `specs` (at least one). It does not test whether they are uniform."""
    first = specs[0]
    return UniformTypeSpec(
        block_size_tokens=first.block_size_tokens if block_size_tokens is None else block_size_tokens,
        dcp_sharded=first.dcp_sharded,
        layer_names=tuple(names),
        layer_specs=tuple(specs),
        counts=tuple(count_specs(specs)),
    )
