"""A ring: one block per request, overwritten in turn."""

from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.attention import AttentionSpec
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class CircularBufferSpec(AttentionSpec):
    """`block_size_tokens` is the ring's capacity."""

    kind: ClassVar[str] = "circular_buffer"
    family: ClassVar[Family] = Family.ATTENTION | Family.RING

    @property
    def prefix_cacheable(self) -> bool:
        """Never: the ring is overwritten."""
        return False

    def max_request_blocks(self, limits: Limits) -> int:
        """One ring."""
        return 1

    def table_row_blocks(self, limits: Limits, num_tokens: int) -> int:
        """One ring."""
        return 1

    def uniform_with(self, other: LayerSpec) -> bool:
        """Any ring."""
        return bool(other.family & Family.RING)
