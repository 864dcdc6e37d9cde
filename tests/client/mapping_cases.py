"""Small plans in every layout, for tests of mapping: built from the order of axes alone."""

from kvhold_client.layout import DTYPE_SIZE_BYTES, LayerContent, Placement, page_strides
from kvhold_client.mapping import RankLayout


def one_group_layout(
    layout: str,
    *,
    num_layers: int = 3,
    num_blocks: int = 5,
    num_heads: int = 2,
    block_size_tokens: int = 4,
    head_size: int = 8,
    dtype: str = "bfloat16",
    padding_bytes: int = 0,
) -> RankLayout:
    """One full-attention group; key and value in one content axis."""
    content_bytes = 2 * head_size * DTYPE_SIZE_BYTES[dtype]
    page_bytes = num_heads * block_size_tokens * content_bytes + padding_bytes
    strides = page_strides(
        layout,
        num_layers=num_layers,
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_states=block_size_tokens,
        content_size_bytes=content_bytes,
        page_size_bytes=page_bytes,
        bytes_per_block=num_layers * page_bytes,
    )
    names = tuple(f"layers.{index}" for index in range(num_layers))
    placement = Placement(
        layer_names=names,
        offset_bytes=0,
        layer_stride_bytes=strides.layer_stride_bytes,
        block_stride_bytes=strides.block_stride_bytes,
        head_stride_bytes=strides.head_stride_bytes,
        state_stride_bytes=strides.state_stride_bytes,
        page_size_bytes=page_bytes,
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_states=block_size_tokens,
        content_size_bytes=content_bytes,
    )
    content = LayerContent(dtype=dtype, key_size_elems=head_size, value_size_elems=head_size)
    return RankLayout(placements=(placement,), groups=(names,), contents=dict.fromkeys(names, content))


def region_bytes(layout: RankLayout) -> int:
    """Smallest region that holds the layout."""
    return max(placement.end_bytes for placement in layout.placements)
