"""Typed errors of the pool. A shortage of blocks is not one of them: that is an item's status, see values.py."""

from dataclasses import dataclass

from kvhold_server.domain.errors import AlreadyExists, Exhausted, InvalidRequest, NotFound, PreconditionFailed


@dataclass(eq=False)
class OutOfBlocks(Exhausted):
    """More free blocks were taken than there are. The verbs of a pool count before they take."""

    template = "{wanted} blocks are wanted, {num_free} are free"
    wanted: int
    num_free: int


@dataclass(eq=False)
class UnknownPoolSession(NotFound):
    """The session slot is not open in this pool."""

    template = "pool session {session} is not open"
    session: int


@dataclass(eq=False)
class UnknownSequence(NotFound):
    """The sequence has no blocks: it was never admitted, or is freed already."""

    template = "sequence {sequence_id} holds no blocks"
    sequence_id: int


@dataclass(eq=False)
class SequenceExists(AlreadyExists):
    """Admitting a sequence that already holds blocks."""

    template = "sequence {sequence_id} holds blocks already: extend it, or free it first"
    sequence_id: int


@dataclass(eq=False)
class BadCount(InvalidRequest):
    """A count of an item is out of range."""

    template = "{field} = {value} is not allowed: {constraint}"
    field: str
    value: int
    constraint: str


@dataclass(eq=False)
class HashesMissing(InvalidRequest):
    """The hashes of a sequence are not known (any more): send them with the item."""

    template = "sequence {sequence_id}: hashes of {num_known} units are known, {num_needed} are needed; send them all"
    sequence_id: int
    num_known: int
    num_needed: int


@dataclass(eq=False)
class HitChanged(PreconditionFailed):
    """`expect_hit_tokens` of an admit item no longer holds; nothing was applied."""

    template = "sequence {sequence_id} was expected to hit {expected_tokens} tokens, but hits {hit_tokens}"
    sequence_id: int
    expected_tokens: int
    hit_tokens: int


@dataclass(eq=False)
class NeverFits(PreconditionFailed):
    """The sequence needs more blocks than the pool has; waiting cannot help."""

    template = "sequence {sequence_id} needs {needed_blocks} blocks, the pool has {usable_blocks}"
    sequence_id: int
    needed_blocks: int
    usable_blocks: int


@dataclass(eq=False)
class DrawsDiffer(InvalidRequest):
    """What a client says that it drew from its allotment is not what its items take. Nothing was applied."""

    template = "drawn: {num_drawn} blocks, but the items take {num_needed}, of {num_allotted} that were allotted"
    num_drawn: int
    num_needed: int
    num_allotted: int


@dataclass(eq=False)
class StepOutOfOrder(PreconditionFailed):
    """Steps of a session must grow, and a completed step must have begun."""

    template = "step {step} (completed {completed_step}) does not follow step {last_step} (completed {last_completed})"
    step: int
    completed_step: int
    last_step: int
    last_completed: int


@dataclass(eq=False)
class TooManyOpenSteps(Exhausted):
    """The session began many steps and never said that one is complete."""

    template = "{open_steps} steps are open, the bound is {max_open_steps}: report completed_step"
    open_steps: int
    max_open_steps: int


@dataclass(eq=False)
class BlocksInUse(PreconditionFailed):
    """A reset was refused because blocks are held."""

    template = "{num_held} blocks are held by {holders}"
    num_held: int
    holders: str


@dataclass(eq=False)
class QuarantineOpen(PreconditionFailed):
    """A session that is still alive, or was released before, cannot be released from quarantine."""

    template = "session {session} is {state}"
    session: int
    state: str
