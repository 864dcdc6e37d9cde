"""Attention inside fixed chunks: what lies before the current chunk is dropped."""

from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.attention import AttentionSpec, geometry_of
from kvhold_server.domain.kinds.full import FullSpec
from kvhold_server.domain.kinds.sliding_window import promoted_block, same
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """Chunks begin on block edges, so no block is straddled."""

    kind: ClassVar[str] = "chunked_local"
    family: ClassVar[Family] = Family.ATTENTION | Family.CHUNKED

    attention_chunk_size_tokens: int

    def max_request_blocks(self, limits: Limits) -> int:
        """The current chunk and what is in flight."""
        kept = self.attention_chunk_size_tokens + limits.max_in_flight_tokens
        return cdiv(min(kept, limits.max_model_len_tokens), self.block_size_tokens)

    def uniform_with(self, other: LayerSpec) -> bool:
        """Chunked layers of the same chunk."""
        return bool(other.family & Family.CHUNKED) and same(self, other, "attention_chunk_size_tokens")

    def promoted(self, block_size_tokens: int) -> LayerSpec | None:
        """Full attention that remembers its chunk."""
        return geometry_of(
            self,
            FullSpec,
            attention_chunk_size_tokens=self.attention_chunk_size_tokens,
            **promoted_block(self, block_size_tokens),
        )
