"""Rows on the device while they are computed, before they move to host memory. Made by the planner."""

from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class HisparseResidentSpec(LayerSpec):
    """An opaque page."""

    kind: ClassVar[str] = "hisparse_resident"
    family: ClassVar[Family] = Family.HISPARSE_RESIDENT
    planner_made: ClassVar[bool] = True

    row_page_size_bytes: int

    @property
    def num_heads(self) -> int:
        """Opaque."""
        return 1

    @property
    def num_states(self) -> int:
        """Opaque."""
        return 1

    @property
    def content_size_bytes(self) -> int:
        """The whole page."""
        return self.row_page_size_bytes

    @property
    def prefix_cacheable(self) -> bool:
        """Never: the host's copy is."""
        return False

    def max_request_blocks(self, limits: Limits) -> int:
        """Only rows in flight need to be resident: the others are in host memory."""
        kept = min(limits.max_in_flight_tokens, limits.max_model_len_tokens)
        return cdiv(kept, self.block_size_tokens)

    def uniform_with(self, other: LayerSpec) -> bool:
        """Its like."""
        return bool(other.family & Family.HISPARSE_RESIDENT)
