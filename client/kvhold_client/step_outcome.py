"""What a step changed, in terms of sequences: what `SequenceTable.flush` returns."""

from dataclasses import dataclass, field
from typing import Any

from kvhold_client.results import BlockCopy, ItemStatus, PoolCounts
from kvhold_client.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendAsk:
    """An extend item that was refused or not tried, to be asked for again."""

    sequence: Sequence
    slots_needed: int
    processed_tokens: int
    publish_tokens: int
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A sequence that runs from this step on: computing begins at `hit_tokens`."""

    sequence: Sequence
    hit_tokens: int
    granted_tokens: int


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """What a step changed. `extended` and `new_block_ids` are parallel; the latter has one list of ids per group."""

    sent: bool = False
    extended: list[Sequence] = field(default_factory=list)
    new_block_ids: list[list[list[int]]] = field(default_factory=list)
    refused_extends: list[ExtendAsk] = field(default_factory=list)  # the first was refused, the others not tried
    admitted: list[Admission] = field(default_factory=list)
    not_admitted: list[Sequence] = field(default_factory=list)  # in order; all of them may be asked for again
    admit_refusal: ItemStatus | None = None  # of the first of them
    impossible: list[Sequence] = field(default_factory=list)  # larger than the pool or quota: fail the request
    lost: list[Sequence] = field(default_factory=list)  # the daemon does not know them: preempt and admit again
    copies: list[BlockCopy] = field(default_factory=list)
    zero_block_ids: list[int] = field(default_factory=list)
    counts: PoolCounts | None = None  # None: nothing was sent
