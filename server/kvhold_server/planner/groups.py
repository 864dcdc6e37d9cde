"""The planner's working group, and how groups look from one rank."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec, uniform_type_of
from kvhold_server.domain.layer_spec import LayerSpec, Limits, Mismatch, merge_specs
from kvhold_server.domain.plan import GroupRole, PlanWarning
from kvhold_server.planner.request import SpecMap


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that will share one block table: either one merged spec, or a uniform_type with a spec per layer."""

    layer_names: tuple[LayerName, ...]
    spec: LayerSpec
    is_eagle_group: bool = False
    host_resident: bool = False
    enable_kv_transfer: bool = True
    role: GroupRole = GroupRole.DEFAULT

    def layers(self) -> Iterator[tuple[LayerName, LayerSpec]]:
        """The layers present here with the spec of each."""
        spec = self.spec
        if isinstance(spec, UniformTypeSpec):
            if spec.layer_names == self.layer_names:
                return zip(self.layer_names, spec.layer_specs, strict=True)
            spec_of = dict(zip(spec.layer_names, spec.layer_specs, strict=True))
            return ((name, spec_of[name]) for name in self.layer_names)
        return ((name, spec) for name in self.layer_names)

    @property
    def first_layer_spec(self) -> LayerSpec:
        """The spec of the first layer; of a uniform_type without layers here, of its first member anywhere."""
        return self.spec.layer_specs[0] if isinstance(self.spec, UniformTypeSpec) else self.spec

    @property
    def block_width_bytes(self) -> int:
        """Bytes of one block in the layers present here."""
        if isinstance(self.spec, UniformTypeSpec):
            return self.spec.page_size_bytes if self.layer_names else 0
        return self.spec.page_size_bytes * len(self.layer_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Groups for the whole model, and what is to be said about them."""

    groups: tuple[LayerGroup, ...]
    warnings: tuple[PlanWarning, ...] = ()


def merged_group(specs: SpecMap, names: Sequence[LayerName]) -> LayerGroup:
    """The group of those layers, which the caller knows to merge."""
    spec = merge_specs([specs[name] for name in names])
    assert not isinstance(spec, Mismatch), f"{names[0]}: {spec}"
    return LayerGroup(layer_names=tuple(names), spec=spec)


def uniform_type_group(specs: SpecMap, names: Sequence[LayerName]) -> LayerGroup:
    """The group of those layers, each keeping its own spec."""
    return LayerGroup(layer_names=tuple(names), spec=uniform_type_of(names, [specs[name] for name in names]))


def project(groups: Sequence[LayerGroup], names: frozenset[LayerName]) -> tuple[LayerGroup, ...]:
    """The same groups as a rank with only those layers sees them: as many, in the same order.

    A uniform_type keeps the members present; with none present it stays whole, because the number of blocks that a
    request holds is the same on all ranks. Roles are a matter of the final layout and are reset.
    """
    return tuple(_projected(group, names) for group in groups)


def _projected(group: LayerGroup, names: frozenset[LayerName]) -> LayerGroup:
    present = tuple(name for name in group.layer_names if name in names)
    spec = group.spec
    if isinstance(spec, UniformTypeSpec) and present and present != spec.layer_names:
        spec = spec.restricted_to(present)
    return LayerGroup(layer_names=present, spec=spec, is_eagle_group=group.is_eagle_group and bool(present))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBlocks:
    """Blocks that one request holds."""

    device: int
    host: int


def request_blocks(groups: Sequence[LayerGroup], limits: Limits, pooled: frozenset[int] = frozenset()) -> RequestBlocks:
    """As the scheduler counts them: by each group's first layer, without the groups that have a pool of their own."""
    device = host = 0
    for index, group in enumerate(groups):
        blocks = group.first_layer_spec.max_request_blocks(limits)
        if group.host_resident:
            host += blocks
        elif index not in pooled:
            device += blocks
    return RequestBlocks(device=device, host=host)


def with_spec(group: LayerGroup, spec: LayerSpec) -> LayerGroup:
    """The same layers under another spec."""
    return dataclasses.replace(group, spec=spec)
