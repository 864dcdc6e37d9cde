"""Encoder attention: computed in one go, nothing stays."""

from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.attention import AttentionSpec
from kvhold_server.domain.layer_spec import LayerSpec, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOnlySpec(AttentionSpec):
    """Not plannable by the modern strategies: a layer that holds nothing should not be listed."""

    kind: ClassVar[str] = "encoder_only"
    plannable: ClassVar[bool] = False

    def max_request_blocks(self, limits: Limits) -> int:
        """None."""
        return 0

    def min_request_blocks(self, limits: Limits) -> int:
        """None."""
        return 0

    def uniform_with(self, other: LayerSpec) -> bool:
        """No group can be formed of them."""
        return False
