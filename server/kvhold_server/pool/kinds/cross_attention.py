"""Cross attention: blocks for the encoder's tokens, all taken at admission and held to the end. Never cached."""

from __future__ import annotations

from kvhold_server.pool.kinds.base import GroupPolicy
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.turn import Turn


class CrossAttentionPolicy(GroupPolicy):
    """`slots` is what the caller passes for this kind: encoder tokens."""

    covers_encoder = True
    grows_plainly = False
    publishes_plainly = False

    def take_external(self, sequence: Sequence, total: int, turn: Turn) -> None:
        """Loaded tokens are the decoder's."""

    def publish(self, sequence: Sequence, tokens: int, turn: Turn) -> None:
        """An encoder's output has no prefix."""
