"""What the client hands out: frozen values of its own, so that nobody's program depends on generated messages.

Answers to a step are columns, as on the wire: entry i belongs to item i, entry i * num_groups + g to item i, group g.
A step of hundreds of sequences costs a handful of list copies, not an object per item.
"""

import enum
from dataclasses import dataclass, field


class ItemStatus(enum.IntEnum):
    """Outcome of one item; the numbers are the wire's."""

    OK = 1
    OUT_OF_BLOCKS = 2  # nothing applied: preempt somebody, or wait
    NOT_TRIED = 3  # an earlier item was refused
    NO_BUDGET = 4  # the token budget was used up before this item
    HIT_CONFLICT = 5  # another hit than the one counted on
    UNKNOWN_SEQUENCE = 6  # not held, or its hashes are forgotten: send them again
    SEQUENCE_EXISTS = 7  # it holds blocks already
    STATE_NOT_READY = 8  # the state it hits is written by this very step: ask in the next one
    NEVER_FITS = 9  # fail the request
    QUOTA_EXCEEDED = 10
    INVALID = 11  # a caller's bug; `StepReply.problems` says which


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """Disjoint block states. free + cached + held + quarantined + reserved + 1 (null) = num_blocks."""

    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_held_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_provisional_blocks: int = 0  # not disjoint: published, not yet visible to other sessions
    num_blocks: int = 0
    num_available_blocks: int = 0  # could be given to the asking session now

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0..1; the null block is no usable one."""
        usable = self.num_blocks - 1
        return (self.num_held_blocks + self.num_quarantined_blocks) / usable if usable > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReply:
    """Answer of one Step rpc."""

    boot_id: str
    replayed: bool = False
    num_freed_blocks: list[int] = field(default_factory=list)
    extend_statuses: list[int] = field(default_factory=list)  # ItemStatus
    extend_num_new_blocks: list[int] = field(default_factory=list)
    extend_block_ids: list[int] = field(default_factory=list)
    admit_statuses: list[int] = field(default_factory=list)  # ItemStatus
    admit_hit_tokens: list[int] = field(default_factory=list)
    admit_granted_tokens: list[int] = field(default_factory=list)
    admit_num_blocks: list[int] = field(default_factory=list)
    admit_num_hit_blocks: list[int] = field(default_factory=list)
    admit_block_ids: list[int] = field(default_factory=list)
    admit_boundary_tokens: list[int] = field(default_factory=list)
    lookup_hit_tokens: list[int] = field(default_factory=list)
    copies: list["BlockCopy"] = field(default_factory=list)
    zero_block_ids: list[int] = field(default_factory=list)
    evicted_hashes: bytes = b""
    problems: list["ItemProblem"] = field(default_factory=list)
    counts: PoolCounts = field(default_factory=PoolCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemProblem:
    """Why one item failed for a reason of its own."""

    part: str  # free, extend, admit, …
    index: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Workers copy these bytes before the step's kernels run."""

    group_id: int
    source_block_id: int
    target_block_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """Queried tokens, attributed: query = own + shared hits + all misses."""

    query_tokens: int = 0
    hit_own_tokens: int = 0
    hit_shared_tokens: int = 0
    miss_never_seen_tokens: int = 0
    miss_evicted_tokens: int = 0
    miss_rule_tokens: int = 0
    miss_other_tokens: int = 0
    num_requests: int = 0
    preempted_query_tokens: int = 0
    preempted_hit_tokens: int = 0

    @property
    def hit_tokens(self) -> int:
        """Own and shared."""
        return self.hit_own_tokens + self.hit_shared_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """One session as ListSessions describes it."""

    short_id: str
    pool: str
    client_name: str
    tenant: str
    state: str  # live, grace or quarantined
    epoch: int
    num_sequences: int
    num_held_blocks: int
    num_quarantined_blocks: int
    last_step: int
    completed_step: int
    age_s: float
    grace_left_s: float
    pid: int
    quarantine_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One limit that the daemon enforces."""

    name: str
    max_value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the daemon can do."""

    server_version: str
    boot_id: str
    layer_kinds: tuple[str, ...]
    strategies: tuple[str, ...]
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    memory_backends: tuple[str, ...]
    hash_algorithms: tuple[str, ...]
    bounds: tuple[Bound, ...]
