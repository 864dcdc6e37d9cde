"""The two easy cases: all layers merge into one spec, or all keep their own page but hold the same number of blocks."""

from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec, uniform_type_of
from kvhold_server.domain.layer_spec import LayerSpec, Mismatch, count_specs, merge_specs
from kvhold_server.planner.errors import ConflictingWindows
from kvhold_server.planner.request import SpecMap


def uniform_spec(specs: SpecMap) -> LayerSpec | None:
    """The one spec that all layers merge into, or None.

    Raises ConflictingWindows: full-attention layers with two windows are refused rather than put into different groups.
    """
    merged = merge_specs([entry.spec for entry in count_specs(specs.values())])
    if not isinstance(merged, Mismatch):
        return merged
    if merged.conflict:
        raise ConflictingWindows(field=merged.field, first=merged.first, second=merged.second)
    return None


def uniform_type(specs: SpecMap) -> UniformTypeSpec | None:
    """The wrapper that keeps each layer's own page, or None. The rule is that of the first layer."""
    if not are_uniform([entry.spec for entry in count_specs(specs.values())]):
        return None
    return uniform_type_of(list(specs), list(specs.values()))


def are_uniform(specs: list[LayerSpec]) -> bool:
    """May all join a group that begins with the first?"""
    first = specs[0]
    return all(joins(first, spec) for spec in specs)


def joins(first: LayerSpec, spec: LayerSpec) -> bool:
    """May `spec` join a group whose first layer is `first`?"""
    return (
        spec.block_size_tokens == first.block_size_tokens
        and spec.dcp_sharded == first.dcp_sharded
        and first.uniform_with(spec)
    )
