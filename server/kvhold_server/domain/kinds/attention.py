"""What all attention kinds share: the geometry of a page of keys and values.

page = heads × states × content        heads    num_head_slots, or num_kv_heads
                                       states   floor(block / tokens per state), exact; 1/4 means 4 per token
                                       content  state_content_bytes, or (key + value elements) × element
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.kinds.errors import PaddedPageTooSmall
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, Mismatch, SpecT, cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """Base of the attention kinds."""

    family: ClassVar[Family] = Family.ATTENTION

    dcp_sharded: bool = True
    num_kv_heads: int  # on one rank
    head_size_elems: int
    head_size_v_elems: int  # 0 for MLA kinds
    dtype: Dtype
    kv_quant_mode: str = ""  # takes part in equality only
    page_size_padded_bytes: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int | Fraction = 1
    max_tp_shards: int | None = None

    @property
    def num_heads(self) -> int:
        """Slots of the head axis."""
        return self.num_kv_heads if self.num_head_slots is None else self.num_head_slots

    @property
    def num_states(self) -> int:
        """States of a block; a tail that does not fill a state is lost."""
        return int(self.block_size_tokens // self.tokens_per_state)

    @property
    def content_size_bytes(self) -> int:
        """Bytes of one state of one head slot."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        return (self.head_size_elems + self.head_size_v_elems) * self.dtype.size_bytes

    @property
    def padded_page_size_bytes(self) -> int | None:
        """The padding asked for."""
        return self.page_size_padded_bytes

    @property
    def state_tokens(self) -> int | Fraction:
        """As given."""
        return self.tokens_per_state

    @property
    def storage_format(self) -> tuple[str, str] | None:
        """Element type and quantization: blocks of different formats must be zeroed between uses."""
        return (self.dtype.value, self.kv_quant_mode)

    def max_request_blocks(self, limits: Limits) -> int:
        """Every token of the longest request, over the context-parallel ranks."""
        shards = limits.decode_context_parallel_size if self.dcp_sharded else 1
        return cdiv(cdiv(limits.max_model_len_tokens, shards), self.block_size_tokens)

    def table_row_blocks(self, limits: Limits, num_tokens: int) -> int:
        """One entry per block of this rank."""
        shards = limits.decode_context_parallel_size if self.dcp_sharded else 1
        return cdiv(num_tokens, self.block_size_tokens * shards)

    def check(self, layer_name: str, limits: Limits) -> None:
        """Raises PaddedPageTooSmall."""
        padded = self.padded_page_size_bytes
        if padded is not None and padded < self.unpadded_page_size_bytes:
            raise PaddedPageTooSmall(
                layer_name=layer_name, padded_bytes=padded, unpadded_bytes=self.unpadded_page_size_bytes
            )

    def scaled(self, factor: int) -> LayerSpec:
        """Block and explicit padding grow together."""
        padded = self.page_size_padded_bytes
        return dataclasses.replace(
            self,
            block_size_tokens=self.block_size_tokens * factor,
            page_size_padded_bytes=None if padded is None else padded * factor,
        )

    def padded_to(self, page_size_bytes: int) -> LayerSpec | None:
        """Any attention page can be padded."""
        return dataclasses.replace(self, page_size_padded_bytes=page_size_bytes)


# What must agree for two attention layers to share pages. The padding compared is the one in force.
GEOMETRY_FIELDS = (
    "block_size_tokens",
    "dcp_sharded",
    "block_stride_alignment_bytes",
    "max_tp_shards",
    "num_kv_heads",
    "head_size_elems",
    "head_size_v_elems",
    "dtype",
    "kv_quant_mode",
    "padded_page_size_bytes",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
)


def different_field(specs: Iterable[LayerSpec], fields: tuple[str, ...]) -> Mismatch | None:
    """The first of `fields` in which some spec differs from the first one."""
    ordered = list(specs)
    first = ordered[0]
    for spec in ordered[1:]:
        if spec is first:
            continue
        for field in fields:
            if getattr(spec, field) != getattr(first, field):
                return Mismatch(field=field, first=getattr(first, field), second=getattr(spec, field))
    return None


def outside_family(specs: Iterable[LayerSpec], family: Family, excluded: Family = Family.NONE) -> Mismatch | None:
    """The first spec that is not of `family`, or that is of `excluded`, as a mismatch of kinds."""
    ordered = list(specs)
    for spec in ordered:
        if not spec.family & family or spec.family & excluded:
            return Mismatch(field="kind", first=ordered[0].kind, second=spec.kind)
    return None


def geometry_of(spec: LayerSpec, target: type[SpecT], **others: object) -> SpecT:
    """A spec of kind `target` with all attention fields of `spec`, an attention layer, and `others`."""
    values: dict[str, Any] = {field.name: getattr(spec, field.name) for field in dataclasses.fields(AttentionSpec)}
    return target(**(values | others))


def any_set(specs: Iterable[LayerSpec], field: str) -> bool:
    """Does some spec, all of which have that field, have it set?"""
    return any(getattr(spec, field) for spec in specs)
