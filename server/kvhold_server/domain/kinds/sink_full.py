"""Full attention with sink tokens that are never dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.full import FullSpec, merge_full
from kvhold_server.domain.layer_spec import LayerSpec, Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFullSpec(FullSpec):
    """`sink_len_tokens` does not decide who shares a group: the first layer's stands for all."""

    kind: ClassVar[str] = "sink_full"

    sink_len_tokens: int | None = None

    def merge(self, others: Sequence[LayerSpec]) -> LayerSpec | Mismatch:
        """As full attention, one state per token only."""
        if self.tokens_per_state != 1:
            return Mismatch(field="tokens_per_state", first=1, second=self.tokens_per_state)
        return merge_full(self, others)
