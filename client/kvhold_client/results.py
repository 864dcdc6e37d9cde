"""What the client hands out: frozen values of its own, so that nobody's program depends on generated messages.

The answer to a step, which is on the hot path, is in `step_reply.py`.
"""

import enum
from dataclasses import dataclass


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
class StateHandoff:
    """Once the step's kernels are done, this block holds the sequence's state after so many tokens."""

    sequence_id: int
    group_id: int
    block_id: int
    boundary_tokens: int


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
    miss_evicted_by_age_tokens: tuple[int, ...] = ()  # parts of it: gone for < N/4, N, 4N evictions, longer; N: blocks
    miss_evicted_by_growth_tokens: tuple[int, ...] = ()  # parts of it: kept by a pool larger by growth_percents[i]
    growth_percents: tuple[int, ...] = ()

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
    prefix_stats: PrefixStats = PrefixStats()  # of this session; empty once it has ended


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
