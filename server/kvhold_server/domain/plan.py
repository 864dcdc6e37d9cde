"""What a plan is: groups of layers that share one block table, and where each layer's pages lie in memory.

Address of layer `l` (its index in `layer_names`), block `b` of a placement, in bytes from the start of the rank's region:

    offset_bytes + l * layer_stride_bytes + b * block_stride_bytes

A placement whose layers share the same bytes (legacy `shared_by`) has layer_stride_bytes 0.
"""

from dataclasses import dataclass

from kvhold_server.domain.ids import LayerName


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlacement:
    """One strided tensor over a rank's region."""

    layer_names: tuple[LayerName, ...]
    size_bytes: int  # of the region the formula runs in (modern) or of this tensor alone (legacy)
    offset_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int
    host_resident: bool = False  # lies in the host region, not in the device's
