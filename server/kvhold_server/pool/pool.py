"""The pool: one authority for the blocks of one plan, as a synchronous object without clock, sockets or randomness.

    client's step ─▶ complete ─▶ free ─▶ extend ─▶ admit ─▶ lookup ─▶ StepOutput
                        │          │        │        │
                        └──────────┴────────┴────────┴──▶ BlockStore (free list, references, prefix index)
                                                          Fences (who may take a freed block)
                                                          one kinds/*.py per group kind

Sessions are small integers here (slots); the daemon maps its unguessable ids to them. Every verb is all or nothing.
"""

from __future__ import annotations

from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.values import (
    Admitted,
    Completed,
    Counts,
    Event,
    Extended,
    Hit,
    PrefixStatistics,
    State,
    StepInput,
    StepOutput,
)


class Pool:
    """Facade. Not thread-safe: one event-loop thread owns it."""

    def __init__(self, config: PoolConfig) -> None:
        """Opens a pool in which every block is free. Raises InvalidField for a configuration that cannot work."""
        raise NotImplementedError

    # ---------------------------------------------------------------- sessions
    def open_session(self) -> int:
        """Returns a new session's slot; slots of dead sessions are reused after their quarantine ended."""
        raise NotImplementedError

    def close_session(self, session: int) -> list[Event]:
        """The client left in good order, all its steps complete: publishes what is provisional, frees its sequences.

        Nothing stays fenced. For a client that merely vanished use `kill_session`.
        """
        raise NotImplementedError

    def kill_session(self, session: int) -> None:
        """The client is dead, its workers may not be: O(1). Its provisional hashes are invisible from now on,
        what it freed stays fenced, what it holds is quarantined; `reap` does the bookkeeping in slices."""
        raise NotImplementedError

    def reap(self, session: int, max_blocks: int) -> bool:
        """Works off at most about `max_blocks` of a dead session's blocks: drops provisional hashes and moves what it
        held to quarantine. True when nothing is left to do. Events: `take_events`."""
        raise NotImplementedError

    def release_quarantine(self, session: int, max_blocks: int) -> bool:
        """All workers of a dead session are gone: frees its blocks, at most about `max_blocks` per call; True = done
        and the slot is forgotten. Implies `reap`."""
        raise NotImplementedError

    # ---------------------------------------------------------------- the step
    def step(self, session: int, items: StepInput) -> StepOutput:
        """Applies a whole scheduler step: complete, free, extend, admit, lookup (design.md, "Steps").

        A refused extend leaves later extends and all admits NOT_TRIED; so does a refused admit the admits after it.
        Item errors are in `StepOutput.errors`. Raises UnknownPoolSession, StepOutOfOrder, TooManyOpenSteps.
        """
        raise NotImplementedError

    def begin_step(self, session: int, step: int, completed_step: int = 0) -> None:
        """Begins a step by hand; the single verbs below then belong to it. `step` must not be smaller than the last."""
        raise NotImplementedError

    def end_step(self, session: int) -> StepOutput:
        """Drains copies, ids to zero and hand-offs gathered since the step began. Copy ends stay held until the step
        completes."""
        raise NotImplementedError

    def complete(self, session: int, completed_step: int) -> Completed:
        """All kernels of steps up to this one are done on all ranks: publishes for everybody, lifts fences, lets go of
        copy ends. Idempotent. Returns what became provable (for recovery records)."""
        raise NotImplementedError

    # ------------------------------------------------------------ single verbs
    def extend(
        self,
        session: int,
        sequence_id: int,
        *,
        slots_needed: int,
        processed_tokens: int,
        publish_tokens: int = 0,
        hashes: list[bytes] | None = None,
        num_lookahead_tokens: int = 0,
        computed_tokens: int | None = None,
        num_encoder_tokens: int = 0,
        reserved_blocks: int = 0,
    ) -> Extended:
        """As one item of ExtendColumns. Raises UnknownSequence, BadCount."""
        raise NotImplementedError

    def admit(
        self,
        session: int,
        sequence_id: int,
        *,
        num_tokens: int,
        token_budget: int,
        num_prompt_tokens: int | None = None,
        hashes: list[bytes] | None = None,
        max_hit_tokens: int = -1,
        max_new_tokens: int = -1,
        budget_overhead: int = 0,
        alignment: int = 1,
        num_lookahead_tokens: int = 0,
        num_external_tokens: int = 0,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        watermark_blocks: int = 0,
        reserved_blocks: int = 0,
        defer_publish: bool = False,
        skip_lookup: bool = False,
        is_resumed: bool = False,
        expect_hit_tokens: int = -1,
    ) -> Admitted:
        """As one item of AdmitColumns; `hashes=None` = as sent before (R19). Raises SequenceExists, BadCount,
        HashesMissing, NeverFits. A changed hit is status CONFLICT."""
        raise NotImplementedError

    def free(
        self,
        session: int,
        sequence_id: int,
        *,
        computed_tokens: int = 0,
        hashes: list[bytes] | None = None,
        fence_own: bool = False,
    ) -> None:
        """Publishes what was computed, then gives all blocks back, deepest first, group by group. UnknownSequence."""
        raise NotImplementedError

    def publish(
        self, session: int, sequence_id: int, *, publish_tokens: int, hashes: list[bytes] | None = None
    ) -> None:
        """Publishes a running sequence's full blocks up to `publish_tokens` (after defer_publish, or late hashes)."""
        raise NotImplementedError

    def lookup(
        self,
        session: int,
        *,
        num_tokens: int,
        hashes: list[bytes] | None = None,
        sequence_id: int | None = None,
        max_hit_tokens: int = -1,
    ) -> Hit:
        """Longest usable prefix now. Reads only: no pin, no change in order; a hint (R2). With a `sequence_id`, hashes
        are remembered, or taken from what was sent before."""
        raise NotImplementedError

    # ----------------------------------------------------------- cache upkeep
    def invalidate(self, session: int, sequence_id: int, blocks: list[int]) -> int:
        """Drops the hashes of these blocks of the sequence and of its later blocks in the same group; they stay held
        (a load failed, R10). Returns how many blocks lost a hash."""
        raise NotImplementedError

    def evict(self, blocks: list[int]) -> int:
        """Drops the hashes of blocks, held or not, in the given order; nothing moves. Returns how many had one."""
        raise NotImplementedError

    def reset(self, *, force: bool = False) -> None:
        """Forgets all hashes. Raises BlocksInUse if blocks are held, unless forced: then held blocks lose their hashes
        too and keep their holders, which publish nothing older than the reset any more."""
        raise NotImplementedError

    # ------------------------------------------------------------- inspection
    def take_events(self) -> list[Event]:
        """Events of verbs called outside `step`, oldest first; drained."""
        raise NotImplementedError

    def counts(self) -> Counts:
        """O(1)."""
        raise NotImplementedError

    def available(self, session: int) -> int:
        """Free blocks that this session may take now (fences of others excluded). O(1)."""
        raise NotImplementedError

    def tables(self, session: int, sequence_id: int) -> list[list[int]]:
        """A copy of a sequence's tables, per group. UnknownSequence."""
        raise NotImplementedError

    def num_common_prefix_blocks(self, session: int) -> list[int]:
        """Per group: leading blocks that every sequence in the pool shares (full attention only; else 0)."""
        raise NotImplementedError

    def cached_tokens_estimate(self, session: int, sequence_id: int) -> int:
        """Prefix of this sequence that could be found again if it were freed now (§13 S7)."""
        raise NotImplementedError

    def block_ids_for(self, session: int, sequence_id: int, computed_tokens: int) -> list[list[int]]:
        """Per group: ids that hold the first `computed_tokens` (state and encoder groups: all)."""
        raise NotImplementedError

    def prefix_statistics(self, session: int | None = None) -> PrefixStatistics:
        """Since the pool opened, of one session or of all. A copy."""
        raise NotImplementedError

    def describe(self) -> State:
        """Full dump; O(blocks)."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Asserts every invariant of docs/blocks.md; O(blocks)."""
        raise NotImplementedError
