"""Where every byte of every layer lies: placements, and the strided views that follow from them. Pure arithmetic.

A placement is a five-axis array [layer, block, head, state, content] in one region. The innermost axis is contiguous
bytes; the others have strides, whose order is the layout:

    page  (l, b)        offset + l·layer_stride + b·block_stride
    state (l, b, h, n)  page + h·head_stride + n·state_stride,  `content_size_bytes` long

    LBNHC, LBHNC    every layer its own array of blocks; a page is dense
    LHBNC           every layer an array of heads, each an array of blocks; a page is scattered over the heads
    BLNHC, BLHNC    every block holds all layers; a page is dense
    BHLNC           every block holds all heads, each all layers; a page is scattered over the heads

Views always have the axes [block, head, state, content], whatever the physical order: only strides differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd, prod

from kvhold_client.mapping_errors import LayoutUnusable, PageOutsideRegion

DTYPE_SIZE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
_WORD_DTYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateArray:
    """One array of a recurrent layer's state."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPE_SIZE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContent:
    """What the innermost bytes of a layer mean.

    Attention: `key_size_elems` of the key, then `value_size_elems` of the value, in `dtype`. Packed formats (scales
    beside elements, sub-byte elements, fp8 latent rows): `packed`, and the view is of uint8. Recurrent layers:
    `states`, one after the other from the start of the page.
    """

    dtype: str = "uint8"
    key_size_elems: int = 0
    value_size_elems: int = 0
    packed: bool = False
    states: tuple[StateArray, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One strided tensor over a region: the fields of the wire's TensorPlacement."""

    layer_names: tuple[str, ...]
    offset_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int
    page_size_bytes: int  # of one layer, padding included
    num_blocks: int
    num_heads: int = 1
    head_stride_bytes: int = 0
    num_states: int = 1
    state_stride_bytes: int = 0
    content_size_bytes: int = 0  # 0: the page is opaque
    host_resident: bool = False

    @property
    def content_bytes(self) -> int:
        """Innermost axis; an opaque page is one run of bytes."""
        return self.content_size_bytes or self.page_size_bytes

    @property
    def end_bytes(self) -> int:
        """First byte behind everything that this placement reaches."""
        if not self.layer_names or not self.num_blocks:
            return self.offset_bytes
        last = (
            (len(self.layer_names) - 1) * self.layer_stride_bytes
            + (self.num_blocks - 1) * self.block_stride_bytes
            + (self.num_heads - 1) * self.head_stride_bytes
            + (self.num_states - 1) * self.state_stride_bytes
        )
        return self.offset_bytes + last + self.content_bytes

    @property
    def is_dense(self) -> bool:
        """Are the bytes of a page that hold something one contiguous run without gaps?"""
        axes = sorted([(self.head_stride_bytes, self.num_heads), (self.state_stride_bytes, self.num_states)])
        run = self.content_bytes
        for stride, extent in axes:
            if extent > 1:
                if stride != run:
                    return False
                run *= extent
        return True

    @property
    def used_page_bytes(self) -> int:
        """Bytes of a page that hold something: without padding."""
        return self.num_heads * self.num_states * self.content_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedView:
    """A typed array inside a region, ready for numpy's or torch's strided constructor."""

    dtype: str
    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStrides:
    """The four strides that a layout gives to a placement."""

    layer_stride_bytes: int
    block_stride_bytes: int
    head_stride_bytes: int
    state_stride_bytes: int


def page_strides(
    layout: str,
    *,
    num_layers: int,
    num_blocks: int,
    num_heads: int,
    num_states: int,
    content_size_bytes: int,
    page_size_bytes: int,
    bytes_per_block: int,
) -> PageStrides:
    """Strides of a placement, from the order of axes alone: for engines that plan themselves, and to check a plan.

    Walks from the innermost axis outwards. Padding makes the run grow to the padded page where the innermost of layer
    and block begins; in the two layouts that put heads outside of it, a padded page must have one head. Blocks are
    `bytes_per_block` apart where they are outermost. Raises LayoutUnusable.
    """
    extents = {"L": num_layers, "B": num_blocks, "H": num_heads, "N": num_states, "C": content_size_bytes}
    padded = page_size_bytes != num_heads * num_states * content_size_bytes
    page_axis = max(layout.index("L"), layout.index("B"))
    if padded and prod(extents[axis] for axis in layout[: page_axis + 1]) != num_layers * num_blocks:
        raise LayoutUnusable("*", f"a padded page of {num_heads} heads is not one run of bytes in {layout}")
    strides: dict[str, int] = {}
    run = 1
    for position in range(4, -1, -1):
        axis = layout[position]
        if padded and position == page_axis:
            run = max(run, page_size_bytes)
        strides[axis] = bytes_per_block if axis == "B" and layout[0] == "B" else run
        run = strides[axis] * extents[axis]
    return PageStrides(
        layer_stride_bytes=strides["L"],
        block_stride_bytes=strides["B"],
        head_stride_bytes=strides["H"],
        state_stride_bytes=strides["N"],
    )


def check_inside(placements: Iterable[Placement], *, region_bytes: int, host_resident: bool) -> None:
    """Raises PageOutsideRegion unless every byte of every page lies in the region."""
    for placement in placements:
        if placement.host_resident != host_resident or not placement.layer_names:
            continue
        if placement.offset_bytes < 0 or placement.end_bytes > region_bytes:
            raise PageOutsideRegion(placement.layer_names[0], placement.end_bytes, region_bytes)


def attention_view(placement: Placement, layer_name: str, content: LayerContent) -> StridedView:
    """[block, head, state, content] of one layer; content counts elements, or bytes where the format is packed.

    Raises LayoutUnusable where an element would not lie on a multiple of its size.
    """
    dtype = "uint8" if content.packed or not placement.content_size_bytes else content.dtype
    view = StridedView(
        dtype=dtype,
        offset_bytes=layer_offset_bytes(placement, layer_name),
        shape=(
            placement.num_blocks,
            placement.num_heads,
            placement.num_states,
            placement.content_bytes // DTYPE_SIZE_BYTES[dtype],
        ),
        strides_bytes=(
            placement.block_stride_bytes,
            placement.head_stride_bytes,
            placement.state_stride_bytes,
            DTYPE_SIZE_BYTES[dtype],
        ),
    )
    _check_alignment(view, layer_name, placement.content_bytes)
    return view


def state_views(placement: Placement, layer_name: str, content: LayerContent) -> tuple[StridedView, ...]:
    """One [block, *shape] view per state array of a recurrent layer. Raises LayoutUnusable."""
    views = []
    offset_bytes = layer_offset_bytes(placement, layer_name)
    end_bytes = offset_bytes + placement.page_size_bytes
    for state in content.states:
        inner = []
        run = DTYPE_SIZE_BYTES[state.dtype]
        for extent in reversed(state.shape):
            inner.append(run)
            run *= extent
        view = StridedView(
            dtype=state.dtype,
            offset_bytes=offset_bytes,
            shape=(placement.num_blocks, *state.shape),
            strides_bytes=(placement.block_stride_bytes, *reversed(inner)),
        )
        _check_alignment(view, layer_name, state.size_bytes)
        views.append(view)
        offset_bytes += state.size_bytes
    if offset_bytes > end_bytes:
        raise LayoutUnusable(layer_name, f"its states end {offset_bytes - end_bytes} bytes behind its page")
    return tuple(views)


def key_view(view: StridedView, content: LayerContent) -> StridedView:
    """The key's part of an attention view."""
    return replace(view, shape=(*view.shape[:3], content.key_size_elems))


def value_view(view: StridedView, content: LayerContent) -> StridedView:
    """The value's part of an attention view."""
    skipped_bytes = content.key_size_elems * DTYPE_SIZE_BYTES[view.dtype]
    return replace(
        view,
        offset_bytes=view.offset_bytes + skipped_bytes,
        shape=(*view.shape[:3], content.value_size_elems),
    )


def split_blocks(placement: Placement, num_parts: int) -> Placement:
    """The same bytes seen as `num_parts` kernel blocks per block, each a smaller page of the same kind.

    Part p of block b is kernel block b·num_parts + p. That is only a stride where pages follow each other without a gap
    (block_stride = dense page): raises LayoutUnusable elsewhere. The order of axes inside a kernel block is that of a
    block, so bytes written through blocks are not to be read through kernel blocks: an engine uses one or the other.
    """
    name = placement.layer_names[0] if placement.layer_names else "*"
    if num_parts < 1 or placement.num_states % num_parts:
        raise LayoutUnusable(name, f"{placement.num_states} states cannot be split into {num_parts} kernel blocks")
    if not placement.is_dense or placement.block_stride_bytes != placement.used_page_bytes:
        raise LayoutUnusable(
            name,
            f"kernel blocks need pages that follow each other: the block stride is {placement.block_stride_bytes}, "
            f"the {'dense' if placement.is_dense else 'scattered'} page {placement.used_page_bytes} bytes",
        )
    num_states = placement.num_states // num_parts
    heads_outside = placement.head_stride_bytes > placement.state_stride_bytes
    return replace(
        placement,
        num_blocks=placement.num_blocks * num_parts,
        block_stride_bytes=placement.block_stride_bytes // num_parts,
        page_size_bytes=placement.page_size_bytes // num_parts,
        num_states=num_states,
        head_stride_bytes=placement.head_stride_bytes // num_parts if heads_outside else placement.head_stride_bytes,
    )


def layers_view(placement: Placement) -> StridedView:
    """All bytes of a placement that hold something, for copying: [layer, block, word] where pages are dense, else
    [layer, block, head, state, word].

    Words are as wide as every offset and stride allows, up to eight bytes. Layers that share the same bytes (stride
    0) are one.
    """
    num_layers = len(placement.layer_names) if placement.layer_stride_bytes else min(1, len(placement.layer_names))
    if placement.is_dense:
        inner, inner_strides, run_bytes = [], [], placement.used_page_bytes
    else:
        inner = [placement.num_heads, placement.num_states]
        inner_strides = [placement.head_stride_bytes, placement.state_stride_bytes]
        run_bytes = placement.content_bytes
    outer_strides = [placement.layer_stride_bytes, placement.block_stride_bytes]
    word_bytes = gcd(8, run_bytes, placement.offset_bytes, *outer_strides, *inner_strides)
    return StridedView(
        dtype=_WORD_DTYPES[word_bytes],
        offset_bytes=placement.offset_bytes,
        shape=(num_layers, placement.num_blocks, *inner, run_bytes // word_bytes),
        strides_bytes=(*outer_strides, *inner_strides, word_bytes),
    )


def layer_offset_bytes(placement: Placement, layer_name: str) -> int:
    """First byte of the layer's page of block 0."""
    return placement.offset_bytes + placement.layer_names.index(layer_name) * placement.layer_stride_bytes


def _check_alignment(view: StridedView, layer_name: str, inner_bytes: int) -> None:
    size = DTYPE_SIZE_BYTES[view.dtype]
    for what, value in (("offset", view.offset_bytes), ("inner axis", inner_bytes)):
        if value % size:
            raise LayoutUnusable(
                layer_name, f"its {what} of {value} bytes is no multiple of {size}, as {view.dtype} needs"
            )
    for extent, stride in zip(view.shape, view.strides_bytes, strict=True):
        if extent > 1 and stride % size:
            raise LayoutUnusable(
                layer_name, f"a stride of {stride} bytes is no multiple of {size}, as {view.dtype} needs"
            )
