"""The not yet pooled tail of a pooled key cache: one block per request, overwritten in turn."""

from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.sliding_window import SlidingWindowSpec
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class KpoolTailSpec(SlidingWindowSpec):
    """A sliding layer by family: what holds for windows holds for it unless said here."""

    kind: ClassVar[str] = "kpool_tail"
    family: ClassVar[Family] = Family.ATTENTION | Family.SLIDING | Family.TAIL

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
        """Any tail, whatever its window."""
        return bool(other.family & Family.TAIL)
