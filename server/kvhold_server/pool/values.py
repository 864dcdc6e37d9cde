"""Values that go in and out of the pool: columns of a step, results, events, counts.

A step's items are columns (parallel lists), not objects: at hundreds of items per step an object each would cost more
than the work on it. An *optional* column may be empty, which means its default for every item. Lists inside one column
set have equal length otherwise. Hashes of all items are one flat list, cut by `hash_counts`.

    sequence_ids   [ 7,  9]
    hash_counts    [ 2,  1]
    hashes         [h0, h1, k0]       7 gains h0 h1, 9 gains k0
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from kvhold_server.domain.errors import KvholdError


class Status(IntEnum):
    """What became of one item."""

    OK = 0
    REFUSED = 1  # not enough blocks now; nothing changed but blocks that had left a window (§12 A4)
    NOT_TRIED = 2  # an item before it was refused, or the budget was used up
    CONFLICT = 3  # expect_hit_tokens no longer holds; `hit_tokens` carries the new hit; nothing changed
    ERROR = 4  # see `errors` of the output


class Bound(IntEnum):
    """Why an admitted (or refused) sequence did not get more tokens."""

    NONE = 0  # it got all it asked for
    BUDGET = 1  # the step's token budget
    MAX_NEW = 2  # the item's own cap
    ALIGNMENT = 3  # rounded down to the item's alignment
    BLOCKS = 4  # refused: free blocks minus watermark and reserved
    FULL_SEQUENCE = 5  # refused: the whole sequence would not fit (full_sequence_must_fit)
    STATE_NOT_WRITTEN = 6  # refused: the state it hits is written by this very step (mamba); ask again next step
    HIT_CHANGED = 7  # conflict: see expect_hit_tokens


@dataclass(slots=True, kw_only=True)
class FreeColumns:
    """Sequences whose blocks are given back, deepest first. A refused sequence is forgotten. Preempting = this."""

    sequence_ids: list[int] = field(default_factory=list)
    computed_tokens: list[int] = field(default_factory=list)  # optional, 0: publish nothing more
    hash_counts: list[int] = field(default_factory=list)  # optional, 0: hash units gained since last mentioned
    hashes: list[bytes] = field(default_factory=list)
    fence_own: list[bool] = field(default_factory=list)  # optional: also this session waits for the step to complete


@dataclass(slots=True, kw_only=True)
class ExtendColumns:
    """Running sequences, in order. Absolute and idempotent: a smaller need than before changes nothing."""

    sequence_ids: list[int] = field(default_factory=list)
    slots_needed: list[int] = field(default_factory=list)  # tokens that the tables must cover, lookahead included
    processed_tokens: list[int] = field(
        default_factory=list
    )  # computed minus in flight: older blocks may leave windows
    publish_tokens: list[int] = field(
        default_factory=list
    )  # optional, 0: known tokens computed by the end of this step
    hash_counts: list[int] = field(default_factory=list)  # optional, 0
    hashes: list[bytes] = field(default_factory=list)
    num_lookahead_tokens: list[int] = field(default_factory=list)  # optional, 0: part of slots_needed that is drafts
    computed_tokens: list[int] = field(default_factory=list)  # optional, = processed: where this step's tokens start
    num_encoder_tokens: list[int] = field(default_factory=list)  # optional, 0: cross attention
    reserved_blocks: list[int] = field(default_factory=list)  # optional, 0: free blocks that must remain


@dataclass(slots=True, kw_only=True)
class AdmitColumns:
    """Waiting sequences, in order; they share one token budget and stop at the first refusal."""

    sequence_ids: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)  # known tokens: prompt and, after preemption, outputs
    num_prompt_tokens: list[int] = field(default_factory=list)  # optional, = num_tokens
    hash_counts: list[int] = field(default_factory=list)  # optional, 0; -1: asked before, use the hashes sent then
    hashes: list[bytes] = field(default_factory=list)
    max_hit_tokens: list[int] = field(default_factory=list)  # optional, -1 = num_tokens - 1
    max_new_tokens: list[int] = field(default_factory=list)  # optional, -1 = no cap beyond the budget
    budget_overhead: list[int] = field(default_factory=list)  # optional, 0: budget used beside new tokens (drafts)
    alignment: list[int] = field(default_factory=list)  # optional, 1: a chunk that is not the last ends at a multiple
    num_lookahead_tokens: list[int] = field(default_factory=list)  # optional, 0
    num_external_tokens: list[int] = field(default_factory=list)  # optional, 0: loaded from elsewhere, after the hit
    num_encoder_tokens: list[int] = field(default_factory=list)  # optional, 0: cross attention
    full_sequence_must_fit: list[bool] = field(default_factory=list)  # optional
    watermark_blocks: list[int] = field(default_factory=list)  # optional, 0: free blocks that must remain
    reserved_blocks: list[int] = field(default_factory=list)  # optional, 0: as watermark, but not in the gate
    defer_publish: list[bool] = field(default_factory=list)  # optional: publish later (Pool.publish), when loads landed
    skip_lookup: list[bool] = field(default_factory=list)  # optional: hit nothing, still publish
    is_resumed: list[bool] = field(default_factory=list)  # optional: preempted before; counted apart in statistics
    expect_hit_tokens: list[int] = field(default_factory=list)  # optional, -1 = any


@dataclass(slots=True, kw_only=True)
class LookupColumns:
    """Questions only: nothing is pinned, no order changes."""

    sequence_ids: list[int] = field(default_factory=list)  # 0 = none; its hashes are remembered for a later admit
    num_tokens: list[int] = field(default_factory=list)
    hash_counts: list[int] = field(default_factory=list)  # -1: of this sequence as sent before
    hashes: list[bytes] = field(default_factory=list)
    max_hit_tokens: list[int] = field(default_factory=list)  # optional, -1 = num_tokens - 1


@dataclass(slots=True, kw_only=True)
class StepInput:
    """One scheduler step, applied in the order of its fields: complete, drawn, free, extend, admit, lookup."""

    step: int
    completed_step: int = 0  # may be this very step if it launches nothing: then it is complete once it is applied
    num_drawn_blocks: int = 0
    max_allotted_blocks: int = 0  # after the step
    token_budget: int = 0  # of admit
    max_admissions: int = 2**31 - 1
    drawn: ExtendColumns = field(default_factory=ExtendColumns)  # served from the last step's allotment (allotment.py)
    free: FreeColumns = field(default_factory=FreeColumns)
    extend: ExtendColumns = field(default_factory=ExtendColumns)
    admit: AdmitColumns = field(default_factory=AdmitColumns)
    lookup: LookupColumns = field(default_factory=LookupColumns)


@dataclass(slots=True, kw_only=True)
class Copy:
    """The client copies this block's bytes before it computes; both ends stay held until the step is complete."""

    group: int
    source: int
    target: int


@dataclass(slots=True, kw_only=True)
class HandOff:
    """A finished boundary state of a state group that a client may copy elsewhere (§15 M8)."""

    sequence_id: int
    group: int
    block: int
    boundary_tokens: int


@dataclass(slots=True, kw_only=True)
class Stored:
    """Blocks of one sequence and group became findable, in table order."""

    group: int
    hashes: list[bytes]
    blocks: list[int]
    indices: list[int]  # logical block of each hash: block `i` covers tokens [i*size, (i+1)*size)
    start_tokens: int  # range that was offered; null and masked blocks in it are not in `hashes`
    end_tokens: int
    parent: bytes | None  # hash of what lies before start_tokens
    session: int
    sequence_id: int
    is_partial: bool = False  # one hash unit that ends inside a block: [start_tokens, end_tokens)
    num_duplicates: int = 0  # of these hashes had a copy in the group before


@dataclass(slots=True, kw_only=True)
class Removed:
    """Blocks of one group stopped being findable under these hashes."""

    group: int
    hashes: list[bytes]
    blocks: list[int]
    copies_left: list[int]  # other blocks that still have this hash in this group; 0 = the hash is gone


@dataclass(slots=True, kw_only=True)
class Cleared:
    """Nothing is findable any more."""


Event: TypeAlias = "Stored | Removed | Cleared"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUse:
    """What one session has; each block counts once."""

    num_sequences: int = 0
    num_held_blocks: int = 0  # in tables, or ends of copies
    num_quarantined_blocks: int = 0  # of a dead session: blocks that only the dead hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Blocks whose bytes are now proven: what a recovery record may say. Parallel lists."""

    groups: list[int]
    blocks: list[int]
    hashes: list[bytes]
    key_tokens: list[int]  # length of the prefix that the hash stands for


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """Answers in the order of the input's items; `Ext` = tried extends, `Adm` = tried admits, G = number of groups.

    Block lists are flat: item i, group g has `counts[i * G + g]` entries, one after the other.
    """

    free_status: list[int] = field(default_factory=list)
    free_counts: list[int] = field(default_factory=list)  # blocks that nobody holds any more
    num_drawn_items: int = 0
    allotted_blocks: list[int] = field(default_factory=list)  # this session's own to draw until its next step
    is_only_session: bool = False
    extend_status: list[int] = field(default_factory=list)
    extend_counts: list[int] = field(default_factory=list)  # new table entries per item and group
    extend_blocks: list[int] = field(default_factory=list)  # their ids; state groups may list null and moved ids
    admit_status: list[int] = field(default_factory=list)
    admit_bound: list[int] = field(default_factory=list)  # Bound
    admit_hit_tokens: list[int] = field(default_factory=list)
    admit_own_hit_tokens: list[int] = field(default_factory=list)  # part of it that this session published
    admit_new_tokens: list[int] = field(default_factory=list)  # to compute in this step
    admit_boundary_tokens: list[int] = field(default_factory=list)  # shared-prefix boundary (junction), 0 = none
    admit_counts: list[int] = field(default_factory=list)  # whole positional tables: hits first, null = 0
    admit_hit_counts: list[int] = field(default_factory=list)  # leading entries of each table that were hit
    admit_blocks: list[int] = field(default_factory=list)
    lookup_hit_tokens: list[int] = field(default_factory=list)
    lookup_boundary_tokens: list[int] = field(default_factory=list)
    completed: Completed | None = None  # what `completed_step` proved, if recovery records are wanted; before `events`
    completed_last: Completed | None = None  # a step that names itself as complete: what it proved, after `events`
    copies: list[Copy] = field(default_factory=list)
    zero_blocks: list[int] = field(default_factory=list)  # clear before use
    hand_offs: list[HandOff] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    errors: dict[tuple[str, int], KvholdError] = field(default_factory=dict)  # (part, item) → why


@dataclass(slots=True, kw_only=True)
class Extended:
    """Answer of a single extend."""

    status: Status
    new_blocks: list[list[int]]  # per group


@dataclass(slots=True, kw_only=True)
class Admitted:
    """Answer of a single admit."""

    status: Status
    bound: Bound
    hit_tokens: int
    own_hit_tokens: int = 0
    new_tokens: int = 0
    boundary_tokens: int = 0  # junction
    tables: list[list[int]] = field(default_factory=list)  # per group, positional
    hit_counts: list[int] = field(default_factory=list)  # per group: leading entries of the table that were hit
    new_blocks: list[list[int]] = field(default_factory=list)  # per group, in the order in which they were taken


@dataclass(slots=True, kw_only=True)
class Hit:
    """Answer of a lookup."""

    hit_tokens: int
    boundary_tokens: int  # junction: a longer prefix exists that some group no longer backs; 0 = none
    blocks: list[list[int]]  # per group, null where the group does not need its block
    group_hit_tokens: list[int]  # per group, each looked up alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Disjoint: they sum to `total`."""

    free: int  # no content
    cached: int  # free, and findable by hash
    held: int  # in the table of a live session (or held for a copy)
    quarantined: int  # held only by sessions that died
    reserved: int  # low ids that are never handed out
    null: int
    total: int
    provisional: int  # not disjoint: published, but not yet by a completed step
    fenced: int  # not disjoint: free, but waiting for a step of their last holder to complete
    sequences: int
    sessions: int

    @property
    def available(self) -> int:
        """Blocks that could be handed out if no fence stood."""
        return self.free + self.cached


GROWTH_PERCENTS = (5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 300, 400)  # how much larger a pool could be


@dataclass(slots=True, kw_only=True)
class PrefixStatistics:
    """Tokens asked for at admission; the parts sum to `query_tokens`. Resumed sequences are counted apart."""

    requests: int = 0
    query_tokens: int = 0
    hit_own_tokens: int = 0  # published by this session
    hit_shared_tokens: int = 0  # published by another one
    miss_never_seen_tokens: int = 0
    miss_evicted_tokens: int = 0
    miss_evicted_by_age_tokens: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # see attribution.py
    miss_evicted_by_growth_tokens: list[int] = field(default_factory=lambda: [0] * (len(GROWTH_PERCENTS) + 1))
    miss_rule_tokens: int = 0  # window or state not kept, partial block, alignment, last token, caps
    miss_other_tokens: int = 0  # seen, but provisional of another session
    skipped_requests: int = 0  # asked not to read the cache; not in the sum
    skipped_query_tokens: int = 0
    resumed_requests: int = 0
    resumed_query_tokens: int = 0
    resumed_hit_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class State:
    """Full dump, as the recorded traces describe it (JSON-able but for the hashes)."""

    free_order: list[int]
    refs: list[int]  # of block 1..N-1
    cache: list[tuple[bytes, int, list[int]]]  # hash, group, blocks in insertion order
    tables: dict[tuple[int, int], list[list[int]]]  # (session, sequence) → table per group
    primaries: list[tuple[int, bytes, int, int]]  # block, hash, group, key_tokens
