"""The pool: one authority for the blocks of one plan, as a synchronous object without clock, sockets or randomness.

    client's step ─▶ complete ─▶ drawn ─▶ free ─▶ extend ─▶ admit ─▶ lookup ─▶ allot ─▶ StepOutput
                     Tenures  Allotments Departure Growth  Admission Lookup Allotments
                        │          │        │        │        │        │        │
                        └──────────┴────────┴────────┴────────┴────────┴────────┴─▶ Groups       one kinds/*.py per kind
                                                                                    BlockStore   references, free list
                                                                                    PrefixIndex  hashes, who sees them

Sessions are small integers here (serials); the daemon maps its unguessable ids to them. Every verb is all or nothing.
"""

from __future__ import annotations

from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.admission import Admission
from kvhold_server.pool.allotment import Allotments
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.departure import Departure
from kvhold_server.pool.errors import BadCount, BlocksInUse, StepOutOfOrder, UnknownPoolSession
from kvhold_server.pool.groups import Groups
from kvhold_server.pool.growth import Growth
from kvhold_server.pool.inspection import describe_pool, published_blocks
from kvhold_server.pool.lookup import Lookup
from kvhold_server.pool.residency import ResidencySample
from kvhold_server.pool.session import PoolSession, SessionState
from kvhold_server.pool.tenure import Tenures
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import (
    Cleared,
    Completed,
    Counts,
    Event,
    Hit,
    PrefixStatistics,
    SessionUse,
    State,
    StepInput,
    StepOutput,
)

OBSERVER = PoolSession(0)  # asks without being anybody; never changed


class Pool:
    """Facade. Not thread-safe: one event-loop thread owns it."""

    def __init__(self, config: PoolConfig) -> None:
        """Opens a pool in which every block is free."""
        self.config = config
        self.store = BlockStore(
            num_blocks=config.num_blocks,
            num_groups=len(config.groups),
            caching=config.enable_caching,
            num_reserved=config.num_reserved_low_blocks,
            report_events=config.report_events,
            num_ghosts=config.num_ghost_hashes,
            sample_every=config.residency_sample_every,
        )
        self.groups = Groups(config, self.store)
        self.tenures = Tenures(config, self.store)
        self.departure = Departure(config, self.store, self.groups, self.tenures)
        self.allotments = Allotments(config, self.store, self.groups, self.tenures)
        self.growth = Growth(config, self.store, self.groups)
        self.admission = Admission(config, self.store, self.groups)
        self.lookups = Lookup(config, self.groups)
        self._zeroing = config.needs_zeroing or self.groups.has_states

    # ---------------------------------------------------------------- sessions
    def open_session(self) -> int:
        """Returns a new session's serial; serials are never reused. Events (of what was allotted): `take_events`."""
        for owner in self.tenures.sessions.values():
            self.allotments.set_aside(owner)
        return self.tenures.open().serial

    def resume_session(self, session: int) -> None:
        """Its client came back, perhaps as another process: what the first one drew and did not say stays held.

        Events: `take_events`.
        """
        self.allotments.set_aside(self._alive(session))

    def close_session(self, session: int) -> None:
        """The client left in good order, all its steps complete: publishes what is provisional, frees its sequences.

        Nothing stays fenced. For a client that merely vanished use `kill_session`. Events: `take_events`.
        """
        owner = self._alive(session)
        self.allotments.set_aside(owner)
        self.tenures.close(owner)

    def kill_session(self, session: int) -> None:
        """The client is dead, its workers may not be; O(its allotment).

        Its provisional hashes are invisible from now on, what it freed stays fenced, what it holds is quarantined;
        `reap` does the bookkeeping in slices.
        """
        owner = self._alive(session)
        self.allotments.set_aside(owner)
        owner.state = SessionState.DEAD

    def reap(self, session: int, max_blocks: int) -> bool:
        """Works off at most about `max_blocks` of a dead session's blocks; True when nothing is left to do.

        Drops provisional hashes, and counts what the session held as quarantined. Events: `take_events`.
        """
        return self.tenures.reap(session, max_blocks)

    def release_quarantine(self, session: int, max_blocks: int) -> bool:
        """All workers of a dead session are gone: frees at most about `max_blocks` blocks per call.

        True = done, and the session is forgotten. Implies `reap`.
        """
        return self.tenures.release(session, max_blocks)

    def _alive(self, session: int) -> PoolSession:
        owner = self.tenures.sessions.get(session)
        if owner is None or owner.state is not SessionState.ALIVE:
            raise UnknownPoolSession(session)
        return owner

    # ---------------------------------------------------------------- the step
    def step(self, session: int, items: StepInput, *, now_s: float = 0.0) -> StepOutput:
        """Applies a whole scheduler step: complete, drawn, free, extend, admit, lookup (design.md, "Steps").

        A refused extend leaves later extends and all admits NOT_TRIED; so does a refused admit the admits after it.
        Item errors are in `StepOutput.errors`. Raises UnknownPoolSession, StepOutOfOrder, TooManyOpenSteps, and of what
        was drawn DrawsDiffer, UnknownSequence.
        """
        self.store.residency.now_s = now_s
        owner = self._alive(session)
        step, completed_step = items.step, items.completed_step
        if completed_step > step:
            raise StepOutOfOrder(step, completed_step, owner.step, owner.completed_step)
        draws = None
        if owner.allotted or owner.set_aside or items.drawn.sequence_ids:
            draws = self.allotments.check(owner, items.drawn, items.num_drawn_blocks)
        if step == owner.step and not owner.open_steps:  # a further part of a step that named itself as complete
            owner.begin(step)
            owner.completed_step = step - 1
        completed = self.tenures.advance(owner, step, completed_step if completed_step < step else step - 1)
        turn = self._turn(owner)
        output = turn.output
        output.completed = completed
        if draws is not None:
            self.allotments.take_up(turn, items.drawn, draws)
            output.num_drawn_items = len(draws.sequences)
        if items.free.sequence_ids:
            self.departure.free_all(turn, items.free)
        may_admit = self.growth.extend_all(turn, items.extend) if items.extend.sequence_ids else True
        if items.admit.sequence_ids:
            self.admission.admit_all(turn, items, may_admit=may_admit)
        if items.lookup.sequence_ids:
            self.lookups.look_up_all(turn, items.lookup)
        if output.copies:
            output.copies.sort(key=lambda copy: copy.group)
        if completed_step == step:
            output.completed_last = self.tenures.complete(owner, step)
        if items.max_allotted_blocks:
            output.allotted_blocks = self.allotments.grant(owner, items.max_allotted_blocks)
            output.is_only_session = self.allotments.is_foreseeable(owner)
        output.events = self.store.prefixes.take_events()
        return output

    def _turn(self, owner: PoolSession) -> Turn:
        if not owner.open_steps:  # verbs before the first step, or after all are complete: they belong to the next
            owner.begin(owner.step + 1)
        return Turn(self.store, owner, has_partials=self.groups.has_partials, zeroing=self._zeroing)

    def complete(self, session: int, completed_step: int) -> Completed:
        """All kernels of steps up to this one are done on all ranks.

        Publishes for everybody, lifts fences, lets go of copy ends. Idempotent. Returns what became provable, for
        recovery records (empty unless the pool is configured with report_completed).
        """
        owner = self._alive(session)
        if completed_step > owner.step:
            raise StepOutOfOrder(owner.step, completed_step, owner.step, owner.completed_step)
        return self.tenures.complete(owner, completed_step)

    def lookup(
        self,
        session: int,
        *,
        num_tokens: int,
        hashes: list[bytes] | None = None,
        sequence_id: int | None = None,
        max_hit_tokens: int = -1,
    ) -> Hit:
        """Longest usable prefix now. Reads only: no pin, no change in order; a hint (R2).

        With a `sequence_id`, hashes are remembered for a later admit, or taken from what was sent before. Session 0 is
        an observer: it sees what every session sees.
        """
        if not session:
            return self.lookups.look_up(OBSERVER, None, hashes, num_tokens, max_hit_tokens)
        return self.lookups.look_up(self._alive(session), sequence_id, hashes, num_tokens, max_hit_tokens)

    # ----------------------------------------------------------- cache upkeep
    def invalidate(self, session: int, sequence_id: int, blocks: list[int]) -> int:
        """Drops the hashes of these blocks of the sequence and of its later blocks in the same group (R10).

        They stay held, and are published again when the sequence says that they were computed. Returns how many blocks
        lost a hash.
        """
        sequence = self._alive(session).running(sequence_id)
        wanted = set(blocks) - {0}
        num = 0
        for gid, table in enumerate(sequence.tables):
            start = next((i for i, block in enumerate(table) if block in wanted), len(table))
            num += sum(self.store.drop_keys(block) for block in table[start:] if block)
            sequence.offered[gid] = min(sequence.offered[gid], start)
        return num

    def evict(self, blocks: list[int]) -> int:
        """Drops the hashes of blocks, held or not, in the given order; nothing moves. Returns how many had one."""
        for block in blocks:
            if not 0 <= block < self.config.num_blocks:
                raise BadCount("block", block, f"must be 0..{self.config.num_blocks - 1}")
        if self.store.residency.every:
            for block in blocks:
                self.store.residency.ended(block)
        return sum(self.store.drop_keys(block) for block in blocks)

    def reset(self, *, force: bool = False) -> list[tuple[int, int]]:
        """Forgets all hashes; returns the sequences that hold blocks, as (session, sequence id).

        Raises BlocksInUse if blocks are held, unless forced: then held blocks lose their hashes too and keep their
        holders, which publish nothing any more.
        """
        holders = self.holders()
        num_held = self.store.num_usable - self.store.free.count
        if num_held and not force:
            raise BlocksInUse(num_held, ", ".join(f"{s}/{q}" for s, q in holders[:20]) or "a copy or a dead session")
        self.store.clear()
        if self.store.prefixes.events is not None:
            self.store.prefixes.events.append(Cleared())
        self.tenures.go_stale()
        return holders

    # ------------------------------------------------------------- inspection
    def holders(self) -> list[tuple[int, int]]:
        """The sequences that hold blocks, as (session, sequence id)."""
        return self.tenures.holders()

    def take_events(self) -> list[Event]:
        """Events since they were last taken, oldest first. `step` takes its own."""
        return self.store.prefixes.take_events()

    def take_residency_samples(self) -> list[ResidencySample]:
        """Lives of watched blocks that ended; bounded, oldest dropped."""
        return self.store.residency.take_samples()

    def counts(self) -> Counts:
        """O(sessions)."""
        store, config = self.store, self.config
        sessions = self.tenures.sessions.values()
        quarantined = store.quarantine.num_blocks
        return Counts(
            free=store.free.count - store.num_cached,
            cached=store.num_cached,
            held=store.num_usable - store.free.count - quarantined,
            quarantined=quarantined,
            reserved=config.num_reserved_low_blocks,
            null=1,
            total=config.num_blocks,
            provisional=store.prefixes.num_provisional_blocks,
            fenced=store.fences.total,
            sequences=sum(len(owner.sequences) for owner in sessions),
            sessions=sum(owner.state is SessionState.ALIVE for owner in sessions),
        )

    @property
    def num_allotted_blocks(self) -> int:
        """Blocks that some client may have drawn without a word, set aside or not. O(sessions)."""
        return sum(len(owner.allotted) + len(owner.set_aside) for owner in self.tenures.sessions.values())

    def available(self, session: int) -> int:
        """Free blocks that this session may take now (fences of others excluded). O(1)."""
        return self.store.available(session)

    def use_of(self, session: int) -> SessionUse:
        """What a session has, alive or dead. O(its blocks)."""
        return self.tenures.use_of(session)

    def tables(self, session: int, sequence_id: int) -> list[list[int]]:
        """A copy of a sequence's tables, per group. UnknownSequence."""
        return [table.copy() for table in self._alive(session).running(sequence_id).tables]

    def prefix_statistics(self, session: int | None = None) -> PrefixStatistics:
        """Since the pool opened, of one session or of all. The live object: do not change it."""
        return self.admission.attribution.total if session is None else self._alive(session).statistics

    def published(self) -> Completed:
        """Blocks that every session can hit now, under their own hashes; O(blocks)."""
        return published_blocks(self.store)

    def describe(self) -> State:
        """Full dump; O(blocks)."""
        return describe_pool(self.store, self.tenures)

    def check_invariants(self) -> None:
        """Asserts every invariant of docs/blocks.md; O(blocks)."""
        self.tenures.check_invariants()
        self.allotments.check_invariants()
        counts = self.counts()
        parts = counts.free + counts.cached + counts.held + counts.quarantined + counts.reserved + counts.null
        assert parts == counts.total and min(counts.free, counts.cached, counts.held, counts.quarantined) >= 0, counts
