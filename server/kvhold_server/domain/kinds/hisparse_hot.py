"""The device buffer into which a request's selected host rows are fetched. Made by the planner."""

from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class HisparseHotSpec(LayerSpec):
    """An opaque page; a fixed number of blocks per request."""

    kind: ClassVar[str] = "hisparse_hot"
    family: ClassVar[Family] = Family.HISPARSE_HOT
    planner_made: ClassVar[bool] = True

    row_page_size_bytes: int
    num_request_blocks: int

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
        """Never: it is a cache of a cache."""
        return False

    def max_request_blocks(self, limits: Limits) -> int:
        """Fixed."""
        return self.num_request_blocks

    def min_request_blocks(self, limits: Limits) -> int:
        """Fixed."""
        return self.num_request_blocks

    def table_row_blocks(self, limits: Limits, num_tokens: int) -> int:
        """Fixed."""
        return self.num_request_blocks

    def uniform_with(self, other: LayerSpec) -> bool:
        """Its like."""
        return bool(other.family & Family.HISPARSE_HOT)
