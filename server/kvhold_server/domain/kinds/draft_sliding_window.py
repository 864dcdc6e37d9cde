"""A drafter's sliding window, in a block pool of its own. Made by the planner, never asked for."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.sliding_window import SlidingWindowSpec
from kvhold_server.domain.layer_spec import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSlidingWindowSpec(SlidingWindowSpec):
    """Its blocks take no part in prefix hits."""

    kind: ClassVar[str] = "draft_sliding_window"
    planner_made: ClassVar[bool] = True

    @property
    def prefix_cacheable(self) -> bool:
        """Never: the drafter rebuilds its window."""
        return False


def draft_window_of(spec: LayerSpec, block_size_tokens: int) -> DraftSlidingWindowSpec:
    """A sliding-window layer as a drafter's, with that block."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(SlidingWindowSpec)}
    return DraftSlidingWindowSpec(**(values | {"block_size_tokens": block_size_tokens}))
