"""Groups → strided tensors over one region.

Strides follow from the layout: from the innermost axis outwards, each stride is the product of the extents inside it.

    page p = heads × states × content (+ padding)      r = states × content      n layers, nb blocks

    layout         layer stride   block stride
    LBHNC, LBNHC   p × nb         p
    LHBNC          p × nb         r                   a page is not contiguous
    BLHNC, BLNHC   p              bytes per block
    BHLNC          r              bytes per block     a page is not contiguous

Every group begins again at byte 0: a block id belongs to one group at a time, and its bytes are what that group makes
of them. Block-outermost layouts give a block all its bytes in one piece, of which a narrow group leaves the end unused.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import Family, LayerSpec, round_up
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import TensorPlacement
from kvhold_server.planner.errors import LayoutCannotHoldPages, LayoutMixesStrides, PaddedPageSplit
from kvhold_server.planner.groups import LayerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Strides:
    """Bytes from one index to the next, per axis."""

    layer: int
    block: int
    head: int
    state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Layers of one spec that lie behind each other in a group's block."""

    spec: LayerSpec
    layer_names: tuple[LayerName, ...]


def layer_runs(group: LayerGroup) -> list[LayerRun]:
    """The layers present, equal specs together, by first occurrence."""
    by_object: dict[int, list[LayerName]] = {}
    objects: dict[int, LayerSpec] = {}
    for name, spec in group.layers():
        by_object.setdefault(id(spec), []).append(name)
        objects[id(spec)] = spec
    by_value: dict[LayerSpec, list[int]] = {}
    for key, spec in objects.items():
        by_value.setdefault(spec, []).append(key)
    if len(by_value) != len(objects):
        return _runs_in_member_order(group)
    return [LayerRun(spec=spec, layer_names=tuple(by_object[keys[0]])) for spec, keys in by_value.items()]


def _runs_in_member_order(group: LayerGroup) -> list[LayerRun]:
    names: dict[LayerSpec, list[LayerName]] = {}
    for name, spec in group.layers():
        names.setdefault(spec, []).append(name)
    return [LayerRun(spec=spec, layer_names=tuple(members)) for spec, members in names.items()]


def bytes_per_block(groups: Sequence[LayerGroup]) -> int:
    """What one block id costs: the widest group, rounded up to every alignment that a layer asks for."""
    width = max(group.block_width_bytes for group in groups)
    assert width > 0, "a rank has at least one layer"
    alignments = {1}
    for group in groups:
        for spec in _specs_present(group):
            alignments.add(spec.block_stride_alignment_bytes or 1)
            if spec.family & Family.HISPARSE_HOT:
                alignments.add(spec.page_size_bytes)
    return round_up(width, math.lcm(*alignments))


def check_layout(layout: Layout, groups: Sequence[LayerGroup]) -> None:
    """Raises LayoutCannotHoldPages where pages differ and the layout needs them equal."""
    pages = sorted({spec.page_size_bytes for group in groups for spec in _specs_present(group)})
    if len(pages) <= 1:
        return
    if not layout.block_compact or (len(groups) > 1 and layout.layer_outermost):
        raise LayoutCannotHoldPages(layout=layout.value, page_sizes_bytes=tuple(pages), num_groups=len(groups))


def place_groups(
    groups: Sequence[LayerGroup], num_blocks: int, block_bytes: int, layout: Layout, *, host_resident: bool = False
) -> tuple[TensorPlacement, ...]:
    """Tensors for all layers present, over a region of num_blocks × block_bytes.

    Raises PaddedPageSplit, LayoutMixesStrides. The layout has been checked.
    """
    tensors: list[TensorPlacement] = []
    for group in groups:
        begin = 0  # bytes of the group's block that earlier runs take
        for run in layer_runs(group):
            tensors.append(_place_run(run, begin, num_blocks, block_bytes, layout, host_resident))
            begin += len(run.layer_names) * run.spec.page_size_bytes
    if layout is Layout.LHBNC and len(groups) > 1:
        _check_equal_block_strides(layout, tensors)
    return tuple(tensors)


def _place_run(
    run: LayerRun, begin: int, num_blocks: int, block_bytes: int, layout: Layout, host_resident: bool
) -> TensorPlacement:
    spec = run.spec
    page = spec.page_size_bytes
    strides = strides_of(run, num_blocks, layout, block_bytes if layout.block_outermost else None)
    return TensorPlacement(
        layer_names=run.layer_names,
        size_bytes=block_bytes * num_blocks,
        # Layer-outermost, a run of earlier layers takes its blocks' pages; block-outermost, one block's.
        offset_bytes=begin * max(strides.layer, page) // page,
        layer_stride_bytes=strides.layer,
        block_stride_bytes=strides.block,
        page_size_bytes=page,
        num_blocks=num_blocks,
        num_heads=spec.num_heads,
        head_stride_bytes=strides.head,
        num_states=spec.num_states,
        state_stride_bytes=strides.state,
        content_size_bytes=spec.content_size_bytes,
        host_resident=host_resident,
    )


def strides_of(run: LayerRun, num_blocks: int, layout: Layout, block_stride_bytes: int | None) -> Strides:
    """Strides of all axes; the block's is given where blocks are outermost. Raises PaddedPageSplit."""
    spec = run.spec
    extents = {"L": len(run.layer_names), "B": num_blocks, "H": spec.num_heads, "N": spec.num_states}
    extents["C"] = spec.content_size_bytes
    padded = spec.padded_page_size_bytes
    tail = 1 + max(layout.value.index("L"), layout.value.index("B"))  # axes from here on are inside a page
    if padded is not None and any(extents[axis] != 1 for axis in layout.value[:tail] if axis not in "LB"):
        raise PaddedPageSplit(
            layer_name=run.layer_names[0], page_bytes=padded, num_heads=spec.num_heads, layout=layout.value
        )
    strides: dict[str, int] = {}
    span = 1
    for position in range(4, -1, -1):
        axis = layout.value[position]
        if padded is not None and position == tail - 1:
            span = max(span, padded)
        strides[axis] = block_stride_bytes if axis == "B" and block_stride_bytes is not None else span
        span = strides[axis] * extents[axis]
    return Strides(layer=strides["L"], block=strides["B"], head=strides["H"], state=strides["N"])


def place_layer(
    name: LayerName, spec: LayerSpec, offset_bytes: int, num_blocks: int, region_bytes: int, layout: Layout
) -> TensorPlacement:
    """One layer in a region of its own, block after block, pages in one piece."""
    heads_outside = layout.value.index("H") < layout.value.index("N")
    content = spec.content_size_bytes
    page = spec.page_size_bytes
    return TensorPlacement(
        layer_names=(name,),
        size_bytes=region_bytes,
        offset_bytes=offset_bytes,
        layer_stride_bytes=page * num_blocks,
        block_stride_bytes=page,
        page_size_bytes=page,
        num_blocks=num_blocks,
        num_heads=spec.num_heads,
        head_stride_bytes=content * (spec.num_states if heads_outside else 1),
        num_states=spec.num_states,
        state_stride_bytes=content * (1 if heads_outside else spec.num_heads),
        content_size_bytes=content,
    )


def _check_equal_block_strides(layout: Layout, tensors: Sequence[TensorPlacement]) -> None:
    first = tensors[0]
    for tensor in tensors:
        if tensor.block_stride_bytes != first.block_stride_bytes:
            raise LayoutMixesStrides(
                layout=layout.value,
                layer_name=first.layer_names[0],
                block_stride_bytes=first.block_stride_bytes,
                other_layer_name=tensor.layer_names[0],
                other_block_stride_bytes=tensor.block_stride_bytes,
            )


def _specs_present(group: LayerGroup) -> Iterator[LayerSpec]:
    return iter(group.spec.each()) if group.layer_names else iter(())
