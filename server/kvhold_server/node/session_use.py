"""What a session has of its pool, for lists and quotas."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUse:
    """Sequences, and blocks counted once each."""

    num_sequences: int = 0
    num_held_blocks: int = 0
    num_quarantined_blocks: int = 0
