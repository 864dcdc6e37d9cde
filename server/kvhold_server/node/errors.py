"""Typed errors of the daemon as a whole: pools by name, their identity, quotas, draining."""

from dataclasses import dataclass

from kvhold_server.domain.errors import (
    Exhausted,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)


@dataclass(eq=False)
class PoolNotFound(NotFound):
    """No pool has this name."""

    template = "no pool {pool!r}"
    pool: str


@dataclass(eq=False)
class RankNotFound(NotFound):
    """The pool's plan has fewer ranks."""

    template = "pool {pool!r} has ranks 0..{last_rank}, not {rank}"
    pool: str
    rank: int
    last_rank: int


@dataclass(eq=False)
class PoolBusy(PreconditionFailed):
    """Somebody is opening or deleting the pool right now; ABORTED on the wire."""

    template = "pool {pool!r} is {doing}; try again"
    pool: str
    doing: str
    retry_after_s: float = 0.1


@dataclass(eq=False)
class PoolInUse(PreconditionFailed):
    """Others would lose what they work on."""

    template = "pool {pool!r} is used by {num_sessions} sessions and {num_mappings} mappings; close them, or force"
    pool: str
    num_sessions: int
    num_mappings: int


@dataclass(eq=False)
class StepContentsDiffer(InvalidRequest):
    """A number that was applied before came again for something else: no retry, a caller's bug. Nothing was applied."""

    template = "step {step} part {part} was applied with other contents ({field} differs): take a new number"
    field: str
    step: int
    part: int


@dataclass(eq=False)
class PlanMismatch(PreconditionFailed):
    """The pool was made from another plan, or with other options."""

    template = "pool {pool!r} holds another plan: {first_difference}"
    pool: str
    first_difference: str
    fingerprint: str  # the pool's
    asked_fingerprint: str


@dataclass(eq=False)
class ByteFormatMismatch(PreconditionFailed):
    """The pool's bytes are laid out by an engine that is set up differently (R15)."""

    template = "pool {pool!r} holds bytes of another format: {first_difference}"
    pool: str
    first_difference: str


@dataclass(eq=False)
class ContentMismatch(PreconditionFailed):
    """Equal hashes would not mean equal contents (R14)."""

    template = "pool {pool!r} holds other contents: {first_difference}"
    pool: str
    first_difference: str


@dataclass(eq=False)
class GenerationConflict(PreconditionFailed):
    """Somebody updated the content since the caller looked; ABORTED on the wire."""

    template = "pool {pool!r} is at content generation {generation}, not {expected_generation}"
    pool: str
    generation: int
    expected_generation: int


@dataclass(eq=False)
class TooManyPools(Exhausted):
    """The daemon's bound on pools is reached."""

    template = "{num_pools} pools are open, the bound is {max_pools}"
    num_pools: int
    max_pools: int


@dataclass(eq=False)
class TooManyPoolSessions(Exhausted):
    """The bound on sessions of one pool is reached."""

    template = "pool {pool!r} has {num_sessions} sessions, the bound is {max_sessions}"
    pool: str
    num_sessions: int
    max_sessions: int


@dataclass(eq=False)
class TooManyTenants(Exhausted):
    """The bound on tenants with a quota is reached."""

    template = "pool {pool!r} has quotas for {num_tenants} tenants, the bound is {max_tenants}"
    pool: str
    num_tenants: int
    max_tenants: int


@dataclass(eq=False)
class TooManyWatchers(Exhausted):
    """The bound on event streams is reached."""

    template = "{num_watchers} event streams are open, the bound is {max_watchers}"
    num_watchers: int
    max_watchers: int


@dataclass(eq=False)
class RegionSizeMismatch(PreconditionFailed):
    """The worker expects another plan's region."""

    template = "rank {rank} of pool {pool!r} has {size_bytes} bytes, {expected_size_bytes} are expected"
    pool: str
    rank: int
    size_bytes: int
    expected_size_bytes: int


@dataclass(eq=False)
class LowBlocksNotReserved(PreconditionFailed):
    """A worker's warm-up would scribble on real blocks (R12)."""

    template = (
        "warm-up writes into blocks 1..{num_warmup_blocks}, pool {pool!r} reserves {num_reserved_low_blocks}; "
        "open it with num_reserved_low_blocks = {num_warmup_blocks}, or switch the warm-up off"
    )
    pool: str
    num_warmup_blocks: int
    num_reserved_low_blocks: int


@dataclass(eq=False)
class NoMemoryHere(PreconditionFailed):
    """The pool has no memory to export: it was made for simulation."""

    template = "pool {pool!r} has no memory: {problem}"
    pool: str
    problem: str


@dataclass(eq=False)
class Draining(Unavailable):
    """The daemon is going away."""

    template = "the daemon is draining; reconnect in {retry_after_s} s"
    retry_after_s: float


@dataclass(eq=False)
class AlreadyDraining(PreconditionFailed):
    """A drain is under way."""

    template = "a drain is under way; {time_left_s} s are left"
    time_left_s: float


@dataclass(eq=False)
class BackendUnknown(Unsupported):
    """This daemon has no such memory."""

    template = "memory backend {backend!r} is not available here: {available} are"
    backend: str
    available: str

    @classmethod
    def reason(cls) -> str:
        return "BACKEND_UNAVAILABLE"


@dataclass(eq=False)
class KindNotPooled(Unsupported):
    """Blocks of this kind of layer cannot be managed (yet)."""

    template = "groups[{group}]: blocks of kind {kind!r} cannot be managed"
    group: int
    kind: str


@dataclass(eq=False)
class PlanRequired(InvalidRequest):
    """A pool is not there, and cannot be made of nothing."""

    template = "pool {pool!r} is not open, and the request has no plan to make it from"
    pool: str
