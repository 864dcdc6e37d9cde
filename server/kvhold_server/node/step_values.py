"""What one step is and gives, between wire and pool: the pool's columns plus what only the daemon knows."""

from dataclasses import dataclass, field

from kvhold_server.node.annotations import AnnotatedItem
from kvhold_server.pool.values import Counts, StepInput, StepOutput


@dataclass(slots=True, kw_only=True)
class Invalidation:
    """Blocks and sequences whose hashes are dropped without freeing anything (R10)."""

    block_ids: list[int] = field(default_factory=list)
    sequence_ids: list[int] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)  # optional, 0: the whole sequence

    def __bool__(self) -> bool:
        return bool(self.block_ids or self.sequence_ids)


@dataclass(slots=True, kw_only=True)
class StepCommand:
    """One request of a session: the pool's items, and what the daemon does around them."""

    part: int
    items: StepInput
    preempted: list[bool] = field(default_factory=list)  # parallel to free; optional
    invalidate: Invalidation = field(default_factory=Invalidation)
    report_evictions: bool = False
    include_lookup_blocks: bool = False
    annotated: list[AnnotatedItem] = field(default_factory=list)  # in pools whose events carry tokens


@dataclass(slots=True, kw_only=True)
class StepAnswer:
    """What is sent back, and sent again if the request is repeated."""

    output: StepOutput
    counts: Counts
    num_available_blocks: int  # for this session
    num_groups: int
    evicted_hashes: list[bytes] = field(default_factory=list)
    freed_blocks: list[int] = field(default_factory=list)  # per free item
    quota_limited: bool = False  # the tenant's quota, not the pool, bounded what was given
    lookup_counts: list[int] = field(default_factory=list)  # entries per lookup item and group
    lookup_blocks: list[int] = field(default_factory=list)
    replayed: bool = False
