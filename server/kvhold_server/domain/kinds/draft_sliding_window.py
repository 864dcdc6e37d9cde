"""A drafter's sliding window, in a block pool of its own. Made by the planner, never asked for."""

from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.sliding_window import SlidingWindowSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSlidingWindowSpec(SlidingWindowSpec):
    """Its blocks take no part in prefix hits."""

    kind: ClassVar[str] = "draft_sliding_window"
    planner_made: ClassVar[bool] = True

    @property
    def prefix_cacheable(self) -> bool:
        """Never: the drafter rebuilds its window."""
        return False
