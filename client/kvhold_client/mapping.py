"""From exported regions and a plan to one tensor view per layer, without copying a byte.

    exports ──map──▶ memory ──layout──▶ {layer name: view}

    attention layer     one view [block, head, state, content]; `key` and `value` are its halves
    recurrent layer     a tuple of views [block, …], one per state array
    opaque page         one uint8 view [block, 1, 1, page bytes]

Layers of different groups alias: a block belongs to one group at a time. Block 0 is mapped like the others and never
to be trusted. The memory stays valid until `unmap`, whatever becomes of the daemon.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from kvhold_client.cuda_driver import BindingsMapper, CudaMapper
from kvhold_client.cuda_memory import map_device_region
from kvhold_client.host_memory import RegionExport, map_host_region
from kvhold_client.layout import (
    LayerContent,
    Placement,
    StridedView,
    attention_view,
    check_inside,
    key_view,
    split_blocks,
    state_views,
    value_view,
)
from kvhold_client.mapping_errors import LayoutUnusable, RegionNotMappable

View = Any  # numpy.ndarray or torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """What a worker needs of a plan: one rank's placements and what their bytes mean."""

    placements: tuple[Placement, ...]
    groups: tuple[tuple[str, ...], ...]  # layer names per group
    contents: Mapping[str, LayerContent] = field(default_factory=dict)  # missing: opaque bytes

    def placement_of(self, layer_name: str) -> Placement:
        """Raises LayoutUnusable."""
        for placement in self.placements:
            if layer_name in placement.layer_names:
                return placement
        raise LayoutUnusable(layer_name, "the plan places no such layer on this rank")

    def content_of(self, layer_name: str) -> LayerContent:
        return self.contents.get(layer_name, LayerContent())

    def placements_of_group(self, group_id: int) -> tuple[Placement, ...]:
        """Those that hold a layer of the group."""
        names = set(self.groups[group_id])
        return tuple(p for p in self.placements if names.intersection(p.layer_names))


class ViewMaker(Protocol):
    """What numpy and torch have in common."""

    library: str

    def view(self, view: StridedView) -> View: ...

    def copy_blocks(self, layers: View, sources: list[int], targets: list[int]) -> None: ...

    def zero_blocks(self, layers: View, blocks: list[int]) -> None: ...

    def close(self) -> None: ...


class Memory(Protocol):
    """Mapped memory, on the host or on a device."""

    @property
    def size_bytes(self) -> int: ...

    def make_views(self, library: str) -> ViewMaker:
        """Raises LibraryMissing, RegionNotMappable."""

    def close(self) -> None:
        """Unmaps. Raises MappingInUse, changing nothing."""


@dataclass(slots=True, kw_only=True)
class _Mapped:
    memory: Memory
    maker: ViewMaker


class MappedRegion:
    """One rank's memory as tensors. Also a context manager, which unmaps."""

    def __init__(self, layout: RankLayout, mapped: dict[bool, _Mapped], *, read_only: bool) -> None:
        self.layout = layout
        self.read_only = read_only
        self._mapped = mapped  # by host_resident
        self._views: dict[str, Any] | None = None

    def __enter__(self) -> "MappedRegion":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unmap()

    @property
    def is_mapped(self) -> bool:
        return bool(self._mapped)

    @property
    def library(self) -> str:
        """What views are made with: "numpy" or "torch"."""
        return next(iter(self._mapped.values())).maker.library

    @property
    def device_address(self) -> int:
        """Where the device part lies in this process; 0 if there is none. For mapping there again."""
        mapped = self._mapped.get(False)
        return getattr(mapped.memory, "address", 0) if mapped is not None else 0

    @property
    def views(self) -> dict[str, Any]:
        """Every layer of this rank: a view, or a tuple of views for a recurrent layer."""
        if self._views is None:
            names = (name for placement in self.layout.placements for name in placement.layer_names)
            self._views = {name: self._layer_view(name) for name in names}
        return self._views

    def key(self, layer_name: str) -> View:
        """[block, head, state, key element]."""
        return self._part(layer_name, key_view)

    def value(self, layer_name: str) -> View:
        """[block, head, state, value element]. Raises LayoutUnusable where the layer stores none (latent rows)."""
        if not self.layout.content_of(layer_name).value_size_elems:
            raise LayoutUnusable(layer_name, "stores no values apart from its keys")
        return self._part(layer_name, value_view)

    def kernel_block_view(self, layer_name: str, num_parts: int) -> View:
        """The layer as kernel blocks [block · num_parts, head, state / num_parts, content].

        Raises LayoutUnusable where pages do not follow each other without gaps.
        """
        split = split_blocks(self.layout.placement_of(layer_name), num_parts)
        return self._make(split, attention_view(split, layer_name, self.layout.content_of(layer_name)))

    def make_view(self, placement: Placement, view: StridedView) -> View:
        """Any strided view over the placement's region."""
        return self._make(placement, view)

    def maker_of(self, placement: Placement) -> ViewMaker:
        """What makes views over the placement's region."""
        return self._region_of(placement).maker

    def unmap(self) -> None:
        """Ends the mapping and tells the daemon. Raises MappingInUse, leaving everything usable, while views are alive.

        Idempotent. Drop your own references first; those in `views` are dropped here.
        """
        self._views = None
        for host_resident in list(self._mapped):
            mapped = self._mapped[host_resident]
            mapped.maker.close()
            try:
                mapped.memory.close()
            except BaseException:
                mapped.maker = mapped.memory.make_views(mapped.maker.library)
                raise
            del self._mapped[host_resident]

    def _layer_view(self, layer_name: str) -> Any:
        placement = self.layout.placement_of(layer_name)
        content = self.layout.content_of(layer_name)
        if content.states:
            return tuple(self._make(placement, view) for view in state_views(placement, layer_name, content))
        return self._make(placement, attention_view(placement, layer_name, content))

    def _part(self, layer_name: str, part: Any) -> View:
        placement = self.layout.placement_of(layer_name)
        content = self.layout.content_of(layer_name)
        if content.packed or content.states or not content.key_size_elems:
            raise LayoutUnusable(layer_name, "its format is packed: only the engine knows where a key ends")
        return self._make(placement, part(attention_view(placement, layer_name, content), content))

    def _make(self, placement: Placement, view: StridedView) -> View:
        return self._region_of(placement).maker.view(view)

    def _region_of(self, placement: Placement) -> _Mapped:
        mapped = self._mapped.get(placement.host_resident)
        if mapped is None:
            raise RegionNotMappable("host region" if placement.host_resident else "region", "not mapped (any more)")
        return mapped


def map_region(
    exports: Iterable[RegionExport],
    layout: RankLayout,
    *,
    read_only: bool = False,
    library: str = "auto",
    cuda: CudaMapper | None = None,
    wanted_address: int = 0,
) -> MappedRegion:
    """Maps all regions of one rank. All or nothing: on an error nothing stays mapped.

    `library`: "torch", "numpy", or "auto": torch if it is installed. Device memory needs torch. `wanted_address`: the
    `device_address` of an earlier mapping, to map there again. `cuda`: another driver than the installed one. Raises
    MappingError.
    """
    mapped: dict[bool, _Mapped] = {}
    try:
        for export in exports:
            check_inside(layout.placements, region_bytes=export.size_bytes, host_resident=export.host_resident)
            mapped[export.host_resident] = _map_one(
                export, read_only=read_only, library=library, cuda=cuda, wanted_address=wanted_address
            )
    except BaseException:
        MappedRegion(layout, mapped, read_only=read_only).unmap()
        raise
    return MappedRegion(layout, mapped, read_only=read_only)


def _map_one(
    export: RegionExport, *, read_only: bool, library: str, cuda: CudaMapper | None, wanted_address: int
) -> _Mapped:
    memory: Memory
    if export.is_device:
        driver = cuda or BindingsMapper()
        memory = map_device_region(export, driver, read_only=read_only, wanted_address=wanted_address)
    else:
        memory = map_host_region(export, read_only=read_only)
    try:
        return _Mapped(memory=memory, maker=memory.make_views(library))
    except BaseException:
        memory.close()
        raise
