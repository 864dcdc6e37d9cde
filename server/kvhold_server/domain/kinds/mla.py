"""Multi-head latent attention: one latent row per token (or per several), or an indexer's rows (`cache_role`)."""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.attention import GEOMETRY_FIELDS, any_set, different_field, outside_family
from kvhold_server.domain.kinds.full import FullSpec, distinct
from kvhold_server.domain.layer_spec import Family, LayerSpec, Mismatch, round_up


class CacheRole(enum.Enum):
    """Latent rows, or the rows by which an indexer selects them."""

    SPARSE = "sparse"
    INDEXER = "indexer"


_MERGED_FIELDS = (
    "cache_dtype_str",
    "tokens_per_state",
    "model_version",
    "cache_role",
    "is_index_group_leader",
    "storage_block_size_tokens",
    *GEOMETRY_FIELDS,
)


def aligned_page_size_bytes(unpadded_bytes: int, alignment_bytes: int | None, padded_bytes: int | None) -> int | None:
    """The padding in force: that of the alignment if it changes anything, otherwise the one asked for."""
    if alignment_bytes is not None:
        aligned = round_up(unpadded_bytes, alignment_bytes)
        if aligned != unpadded_bytes:
            return aligned
    return padded_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec(FullSpec):
    """The head size of the value is 0: there is one row for both."""

    kind: ClassVar[str] = "mla_attention"
    family: ClassVar[Family] = Family.ATTENTION | Family.FULL | Family.MLA

    head_size_v_elems: int = 0
    cache_dtype_str: str | None = None
    alignment_bytes: int | None = None
    model_version: str | None = None
    cache_role: CacheRole = CacheRole.SPARSE
    is_index_group_leader: bool = False
    storage_block_size_tokens: int | None = None
    non_causal_multi_token_decode: bool = False

    @property
    def padded_page_size_bytes(self) -> int | None:
        """Computed from today's block, so that a scaled copy is aligned anew."""
        return aligned_page_size_bytes(self.unpadded_page_size_bytes, self.alignment_bytes, self.page_size_padded_bytes)

    @property
    def decodes_without_order(self) -> bool:
        """As given."""
        return self.non_causal_multi_token_decode

    @property
    def selects_rows(self) -> bool:
        """The indexer's part."""
        return self.cache_role is CacheRole.INDEXER

    @property
    def leads_selection(self) -> bool:
        """As given."""
        return self.is_index_group_leader

    @property
    def model_generation(self) -> str | None:
        """As given."""
        return self.model_version

    def padded_to(self, page_size_bytes: int) -> LayerSpec | None:
        """Padding that was chosen for a whole grid replaces that of the alignment."""
        return dataclasses.replace(self, page_size_padded_bytes=page_size_bytes, alignment_bytes=None)

    def merge(self, others: Sequence[LayerSpec]) -> LayerSpec | Mismatch:
        """Equal rows of equal meaning. A value size other than 0 never merges, not even with itself."""
        specs = distinct([self, *others])
        problem = outside_family(specs, Family.MLA) or different_field(specs, _MERGED_FIELDS)
        if problem is not None:
            return problem
        if self.head_size_v_elems:
            return Mismatch(field="head_size_v_elems", first=0, second=self.head_size_v_elems)
        return dataclasses.replace(
            self,
            page_size_padded_bytes=self.padded_page_size_bytes,
            alignment_bytes=None,
            sliding_window_tokens=None,
            attention_chunk_size_tokens=None,
            non_causal=False,
            non_causal_multi_token_decode=any_set(specs, "non_causal_multi_token_decode"),
        )
