"""What a step changed, in terms of sequences: what `SequenceTable.flush` returns."""

from dataclasses import dataclass, field
from typing import Any

from kvhold_client.results import BlockCopy, ItemStatus, PoolCounts, StateHandoff
from kvhold_client.sequence import Sequence
from kvhold_client.step_reply import StepReply


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

    reply: StepReply | None = None  # None: nothing was sent
    extended: list[Sequence] = field(default_factory=list)
    new_block_ids: list[list[list[int]]] = field(default_factory=list)
    refused_extends: list[ExtendAsk] = field(default_factory=list)  # the first was refused, the others not tried
    admitted: list[Admission] = field(default_factory=list)
    not_admitted: list[Sequence] = field(default_factory=list)  # in order; all of them may be asked for again
    admit_refusal: ItemStatus | None = None  # of the first of them
    impossible: list[Sequence] = field(default_factory=list)  # larger than the pool or quota: fail the request
    lost: list[Sequence] = field(default_factory=list)  # the daemon does not know them: preempt and admit again

    @property
    def sent(self) -> bool:
        """Something had to be said."""
        return self.reply is not None

    @property
    def copies(self) -> list[BlockCopy]:
        """What the workers copy before this step's kernels run."""
        return self.reply.copies if self.reply else []

    @property
    def handoffs(self) -> list[StateHandoff]:
        """Which states the kernels leave where."""
        return self.reply.handoffs if self.reply else []

    @property
    def zero_block_ids(self) -> list[int]:
        """What the workers clear first."""
        return self.reply.zero_block_ids if self.reply else []

    @property
    def counts(self) -> PoolCounts | None:
        """The pool after the step; None if nothing was sent."""
        return self.reply.counts if self.reply else None
