"""Sliding-window attention: only the last tokens stay, so blocks leave the window while a request runs.

computed      in flight
────────────┬───────────┐
   ╔════════╪═════════╗ │   window − 1 before the first token in flight, + extra for drafts, + what is in flight;
───╨────────┴─────────╨─┘   one block more because the window need not begin on a block's edge
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.attention import AttentionSpec, geometry_of
from kvhold_server.domain.kinds.errors import WindowNotContextParallel
from kvhold_server.domain.kinds.full import FullSpec
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """`extra_retained_tokens` is set by the planner from the drafter's look-ahead."""

    kind: ClassVar[str] = "sliding_window"
    family: ClassVar[Family] = Family.ATTENTION | Family.SLIDING

    sliding_window_tokens: int
    extra_retained_tokens: int = 0

    @property
    def window_tokens(self) -> int | None:
        """As given."""
        return self.sliding_window_tokens

    def max_request_blocks(self, limits: Limits) -> int:
        """The recycling-aware bound, used for planning and for admission alike."""
        kept = self.sliding_window_tokens - 1 + self.extra_retained_tokens + limits.max_in_flight_tokens
        return cdiv(min(kept, limits.max_model_len_tokens), self.block_size_tokens) + 1

    def check(self, layer_name: str, limits: Limits) -> None:
        """Raises PaddedPageTooSmall, WindowNotContextParallel."""
        AttentionSpec.check(self, layer_name, limits)
        if self.dcp_sharded and limits.decode_context_parallel_size > 1:
            raise WindowNotContextParallel(
                layer_name=layer_name, kind=self.kind, context_parallel_size=limits.decode_context_parallel_size
            )

    def retaining(self, extra_tokens: int) -> LayerSpec:
        """A copy that keeps that many tokens beyond its window."""
        if self.extra_retained_tokens == extra_tokens:
            return self
        return dataclasses.replace(self, extra_retained_tokens=extra_tokens)

    def uniform_with(self, other: LayerSpec) -> bool:
        """Any sliding layer of the same window."""
        return same(self, other, "sliding_window_tokens") and bool(other.family & Family.SLIDING)  # cheap test first

    def promoted(self, block_size_tokens: int) -> LayerSpec | None:
        """Full attention that remembers its window."""
        return geometry_of(
            self,
            FullSpec,
            sliding_window_tokens=self.sliding_window_tokens,
            **promoted_block(self, block_size_tokens),
        )


def promoted_block(spec: AttentionSpec, block_size_tokens: int) -> dict[str, int | None]:
    """Block and padding of a promoted layer: padding grows at least as the page does."""
    padded = spec.padded_page_size_bytes
    grown = spec.unpadded_page_size_bytes * block_size_tokens // spec.block_size_tokens
    return {
        "block_size_tokens": block_size_tokens,
        "page_size_padded_bytes": None if padded is None else max(padded, grown),
    }


def same(first: LayerSpec, second: LayerSpec, field: str) -> bool:
    """Do both agree in that field, which `second` may lack?"""
    return bool(getattr(first, field) == getattr(second, field, None))
