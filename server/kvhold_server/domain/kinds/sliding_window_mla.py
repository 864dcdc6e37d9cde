"""A sliding window over latent rows. By family a sliding layer, not an MLA one."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.attention import GEOMETRY_FIELDS, different_field, geometry_of, outside_family
from kvhold_server.domain.kinds.errors import UnknownModelVersion
from kvhold_server.domain.kinds.full import distinct
from kvhold_server.domain.kinds.mla import MlaSpec, aligned_page_size_bytes
from kvhold_server.domain.kinds.sliding_window import SlidingWindowSpec, promoted_block, same
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, Mismatch

_MERGED_FIELDS = (
    "cache_dtype_str",
    "model_version",
    "sliding_window_tokens",
    "extra_retained_tokens",
    "bounded_replay",
    *GEOMETRY_FIELDS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowMlaSpec(SlidingWindowSpec):
    """With `bounded_replay`, a hit replays the window instead of reading it from blocks."""

    kind: ClassVar[str] = "sliding_window_mla"
    family: ClassVar[Family] = Family.ATTENTION | Family.SLIDING | Family.SLIDING_MLA

    head_size_v_elems: int = 0
    cache_dtype_str: str | None = None
    alignment_bytes: int | None = None
    model_version: str | None = None
    bounded_replay: bool = False

    @property
    def padded_page_size_bytes(self) -> int | None:
        """As MLA."""
        return aligned_page_size_bytes(self.unpadded_page_size_bytes, self.alignment_bytes, self.page_size_padded_bytes)

    @property
    def prefix_cacheable(self) -> bool:
        """Not where the window is replayed."""
        return not self.bounded_replay

    def check(self, layer_name: str, limits: Limits) -> None:
        """Raises PaddedPageTooSmall, WindowNotContextParallel, UnknownModelVersion."""
        SlidingWindowSpec.check(self, layer_name, limits)
        if self.model_version not in (None, "deepseek_v4"):
            raise UnknownModelVersion(layer_name=layer_name, model_version=str(self.model_version))

    def uniform_with(self, other: LayerSpec) -> bool:
        """Its like, of the same window and replay."""
        return (
            bool(other.family & Family.SLIDING_MLA)
            and same(self, other, "sliding_window_tokens")
            and same(self, other, "bounded_replay")
        )

    def padded_to(self, page_size_bytes: int) -> LayerSpec | None:
        """Padding that was chosen for a whole grid replaces that of the alignment."""
        return dataclasses.replace(self, page_size_padded_bytes=page_size_bytes, alignment_bytes=None)

    def merge(self, others: Sequence[LayerSpec]) -> LayerSpec | Mismatch:
        """Equal rows and equal geometry: unequal pages in one tensor would overlap."""
        specs = distinct([self, *others])
        problem = outside_family(specs, Family.SLIDING_MLA) or different_field(specs, _MERGED_FIELDS)
        if problem is not None:
            return problem
        return dataclasses.replace(self, page_size_padded_bytes=self.padded_page_size_bytes, alignment_bytes=None)

    def promoted(self, block_size_tokens: int) -> LayerSpec | None:
        """MLA that remembers its window; replay has no meaning there."""
        return geometry_of(
            self,
            MlaSpec,
            sliding_window_tokens=self.sliding_window_tokens,
            cache_dtype_str=self.cache_dtype_str,
            alignment_bytes=self.alignment_bytes,
            model_version=self.model_version,
            **promoted_block(self, block_size_tokens),
        )
