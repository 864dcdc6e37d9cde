"""Attention to an encoder's output, which has its own length."""

from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.attention import AttentionSpec
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Blocks of the encoder's tokens."""

    kind: ClassVar[str] = "cross_attention"
    family: ClassVar[Family] = Family.ATTENTION | Family.CROSS

    def max_request_blocks(self, limits: Limits) -> int:
        """The encoder's longest input, whatever the request's length."""
        return cdiv(limits.max_num_encoder_input_tokens, self.block_size_tokens)

    def min_request_blocks(self, limits: Limits) -> int:
        """At least one block where there is an encoder."""
        return min(1, self.max_request_blocks(limits))

    def uniform_with(self, other: LayerSpec) -> bool:
        """Any cross attention."""
        return bool(other.family & Family.CROSS)
