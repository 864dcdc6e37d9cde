"""Full attention whose window is replayed: allocated in full, but only with its like."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.attention import different_field
from kvhold_server.domain.kinds.full import FullSpec, merge_full
from kvhold_server.domain.layer_spec import LayerSpec, Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RswaSpec(FullSpec):
    """`rswa_window_tokens` is what is replayed."""

    kind: ClassVar[str] = "rswa"

    rswa_window_tokens: int

    def merge(self, others: Sequence[LayerSpec]) -> LayerSpec | Mismatch:
        """Same window, then as full attention."""
        return different_field([self, *others], ("kind",)) or (
            different_field([self, *others], ("rswa_window_tokens",)) or merge_full(self, others)
        )
