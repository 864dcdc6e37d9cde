"""The pool: one authority for the blocks of one plan, as a synchronous object without clock, sockets or randomness.

    client's step ─▶ complete ─▶ free ─▶ extend ─▶ admit ─▶ lookup ─▶ StepOutput
                        │          │        │        │
                        └──────────┴────────┴────────┴──▶ BlockStore (free list, references, prefix index)
                                                          Fences (who may take a freed block)
                                                          one kinds/*.py per group kind

Sessions are small integers here (serials); the daemon maps its unguessable ids to them. Every verb is all or nothing.
"""

from __future__ import annotations

from collections import Counter
from itertools import repeat

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.admission import Admission, hit_limit
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.errors import (
    BadCount,
    BlocksInUse,
    StepOutOfOrder,
    TooManyOpenSteps,
    UnknownPoolSession,
    UnknownSequence,
)
from kvhold_server.pool.groups import Groups, HitResult
from kvhold_server.pool.inspection import check_pool, describe_pool, published_blocks
from kvhold_server.pool.residency import ResidencySample
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.session import OpenStep, PoolSession, SessionState
from kvhold_server.pool.tenure import Tenures
from kvhold_server.pool.together import extend_together, is_plain
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import (
    Admitted,
    Bound,
    Cleared,
    Completed,
    Counts,
    Event,
    Extended,
    Hit,
    PrefixStatistics,
    SessionUse,
    State,
    Status,
    StepInput,
    StepOutput,
)
from kvhold_server.pool.waiting import AdmitItem, admit_items, cut

OBSERVER = PoolSession(0)  # asks without being anybody; never changed


class Pool:
    """Facade. Not thread-safe: one event-loop thread owns it."""

    def __init__(self, config: PoolConfig) -> None:
        """Opens a pool in which every block is free."""
        self.config = config
        self.store = BlockStore(
            num_blocks=config.num_blocks,
            num_groups=len(config.groups),
            unit_tokens=config.hash_unit_tokens,
            caching=config.enable_caching,
            num_reserved=config.num_reserved_low_blocks,
            report_events=config.report_events,
            num_ghosts=config.num_ghost_hashes,
            sample_every=config.residency_sample_every,
        )
        self.groups = Groups(config, self.store)
        self.admission = Admission(config, self.store, self.groups)
        self.tenures = Tenures(config, self.store)
        self._nothing: list[list[int]] = [[] for _ in config.groups]  # an answer; never changed
        self._zeroing = config.needs_zeroing or self.groups.has_states

    # ---------------------------------------------------------------- sessions
    def open_session(self) -> int:
        """Returns a new session's serial; serials are never reused."""
        return self.tenures.open().serial

    def close_session(self, session: int) -> None:
        """The client left in good order, all its steps complete: publishes what is provisional, frees its sequences.

        Nothing stays fenced. For a client that merely vanished use `kill_session`. Events: `take_events`.
        """
        self.tenures.close(self._alive(session))

    def kill_session(self, session: int) -> None:
        """The client is dead, its workers may not be; O(1).

        Its provisional hashes are invisible from now on, what it freed stays fenced, what it holds is quarantined;
        `reap` does the bookkeeping in slices.
        """
        self._alive(session).state = SessionState.DEAD

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
        """Applies a whole scheduler step: complete, free, extend, admit, lookup (design.md, "Steps").

        A refused extend leaves later extends and all admits NOT_TRIED; so does a refused admit the admits after it.
        Item errors are in `StepOutput.errors`. Raises UnknownPoolSession, StepOutOfOrder, TooManyOpenSteps.
        """
        self.store.residency.now_s = now_s
        owner = self._alive(session)
        if items.completed_step > items.step:
            raise StepOutOfOrder(items.step, items.completed_step, owner.step, owner.completed_step)
        if items.step == owner.step and not owner.open_steps:  # a further part of a step that named itself as complete
            owner.open_steps.append(OpenStep(owner.serial, owner.step))
            owner.completed_step = owner.step - 1
        completed = self._advance(owner, items.step, min(items.completed_step, items.step - 1))
        turn = self._turn(owner)
        output = turn.output  # empty: whoever fills it takes it away
        output.completed = completed
        if items.free.sequence_ids:
            self._step_free(turn, items)
        may_admit = self._step_extend(turn, items) if items.extend.sequence_ids else True
        if items.admit.sequence_ids:
            self._step_admit(turn, items, may_admit)
        if items.lookup.sequence_ids:
            self._step_lookup(turn, items)
        if turn.gained:
            turn.output = StepOutput()  # a further part of this step must know what it gained
        else:
            owner.turn = None
        if output.copies:
            output.copies.sort(key=lambda copy: copy.group)
        if items.completed_step == items.step:
            output.completed_last = self.tenures.complete(owner, owner.step)
        output.events = self.take_events()
        return output

    def begin_step(self, session: int, step: int, completed_step: int = 0, *, now_s: float = 0.0) -> None:
        """Begins a step by hand; the single verbs below then belong to it.

        The same step may be begun again (it goes on); a smaller one raises StepOutOfOrder.
        """
        self.store.residency.now_s = now_s
        self._advance(self._alive(session), step, completed_step)

    def end_step(self, session: int) -> StepOutput:
        """Drains copies, ids to zero and hand-offs gathered since the step began.

        Copy ends stay held until the step is complete.
        """
        turn = self._turn(self._alive(session))
        output, turn.output = turn.output, StepOutput()
        output.copies.sort(key=lambda copy: copy.group)
        return output

    def complete(self, session: int, completed_step: int) -> Completed:
        """All kernels of steps up to this one are done on all ranks.

        Publishes for everybody, lifts fences, lets go of copy ends. Idempotent. Returns what became provable, for
        recovery records (empty unless the pool is configured with report_completed).
        """
        owner = self._alive(session)
        if completed_step > owner.step:
            raise StepOutOfOrder(owner.step, completed_step, owner.step, owner.completed_step)
        return self.tenures.complete(owner, completed_step)

    def _advance(self, owner: PoolSession, step: int, completed_step: int) -> Completed | None:
        if step < owner.step or completed_step > step or step < 1:
            raise StepOutOfOrder(step, completed_step, owner.step, owner.completed_step)
        completed = None
        if completed_step > owner.completed_step:
            completed = self.tenures.complete(owner, min(completed_step, owner.step))
        if step > owner.step:
            if len(owner.open_steps) >= self.config.max_open_steps:
                raise TooManyOpenSteps(len(owner.open_steps), self.config.max_open_steps)
            owner.step = step
            owner.open_steps.append(OpenStep(owner.serial, step))
            owner.turn = None
        return completed

    def _turn(self, owner: PoolSession) -> Turn:
        turn = owner.turn
        if turn is None:
            if not owner.open_steps:  # verbs before the first step, or after all are complete: they belong to the next
                owner.step += 1
                owner.open_steps.append(OpenStep(owner.serial, owner.step))
            turn = owner.turn = Turn(
                self.store,
                owner,
                owner.open_steps[-1],
                StepOutput(),
                has_partials=self.groups.has_partials,
                zeroing=self._zeroing,
            )
        return turn

    # ------------------------------------------------------------ parts of a step
    def _step_free(self, turn: Turn, items: StepInput) -> None:
        columns = items.free
        output = turn.output
        num = len(columns.sequence_ids)
        cuts = cut(columns.hashes, columns.hash_counts or [0] * num)
        rows = zip(
            columns.sequence_ids,
            columns.computed_tokens or repeat(0),
            cuts,
            columns.fence_own or repeat(False),
            strict=False,
        )
        for i, (sequence_id, computed, hashes, fence_own) in enumerate(rows):
            num_free = self.store.free.count
            try:
                self._free(turn, sequence_id, computed, hashes, fence_own)
                output.free_status.append(Status.OK)
            except KvholdError as error:
                output.free_status.append(Status.ERROR)
                output.errors["free", i] = error
            output.free_counts.append(self.store.free.count - num_free)

    def _step_extend(self, turn: Turn, items: StepInput) -> bool:
        columns = items.extend
        groups = self.groups
        if groups.is_plain and is_plain(columns):
            config = self.config
            if extend_together(turn, columns, groups, config.max_model_len, publishes=config.enable_caching):
                return True
        output = turn.output
        status, counts, flat = output.extend_status, output.extend_counts, output.extend_blocks
        no_counts = [0] * len(self.groups.policies)
        nothing, ok = self._nothing, Status.OK
        num = len(columns.sequence_ids)
        cuts = cut(columns.hashes, columns.hash_counts) if columns.hashes else repeat([])
        rows = zip(
            columns.sequence_ids,
            columns.slots_needed,
            columns.processed_tokens,
            columns.publish_tokens or repeat(0),
            cuts,
            columns.num_lookahead_tokens or repeat(0),
            columns.computed_tokens or columns.processed_tokens,
            columns.num_encoder_tokens or repeat(0),
            columns.reserved_blocks or repeat(0),
            strict=False,
        )
        for row in rows:
            try:
                new = self._extend(turn, *row)
            except KvholdError as error:
                output.errors["extend", len(status)] = error
                status.append(Status.ERROR)
                counts += no_counts
                continue
            if new is None:
                status.append(Status.REFUSED)
                counts += no_counts
                num_left = num - len(status)
                status += [Status.NOT_TRIED] * num_left
                counts += no_counts * num_left
                return False
            status.append(ok)
            if new is nothing:
                counts += no_counts
            else:
                for blocks in new:
                    counts.append(len(blocks))
                    flat += blocks
        return True

    def _step_admit(self, turn: Turn, items: StepInput, may_admit: bool) -> None:
        output = turn.output
        no_counts = [0] * len(self.groups.policies)
        budget, num_admitted = items.token_budget, 0
        for i, item in enumerate(admit_items(items)):
            answer = None
            if may_admit and budget > 0 and num_admitted < items.max_admissions:
                try:
                    answer = self.admission.admit(turn, item, budget)
                except KvholdError as error:
                    output.errors["admit", i] = error
            elif item.hashes is not None:
                self._remember(turn.owner, item.sequence_id, item.hashes)
            status = answer.status if answer else Status.ERROR if ("admit", i) in output.errors else Status.NOT_TRIED
            output.admit_status.append(status)
            is_spent = may_admit and budget <= 0
            output.admit_bound.append(answer.bound if answer else Bound.BUDGET if is_spent else Bound.NONE)
            output.admit_hit_tokens.append(answer.hit_tokens if answer else 0)
            output.admit_own_hit_tokens.append(answer.own_hit_tokens if answer else 0)
            output.admit_new_tokens.append(answer.new_tokens if answer else 0)
            output.admit_boundary_tokens.append(answer.boundary_tokens if answer else 0)
            if answer is not None and status is Status.OK:
                budget -= answer.new_tokens + item.budget_overhead
                num_admitted += 1
                output.admit_counts += map(len, answer.tables)
                output.admit_hit_counts += answer.hit_counts
                for table in answer.tables:
                    output.admit_blocks += table
            else:
                output.admit_counts += no_counts
                output.admit_hit_counts += no_counts
                may_admit = False

    def _step_lookup(self, turn: Turn, items: StepInput) -> None:
        columns = items.lookup
        num = len(columns.sequence_ids)
        counts = columns.hash_counts or [0] * num
        cuts = cut(columns.hashes, counts)
        limits = columns.max_hit_tokens or repeat(-1)
        rows = zip(columns.sequence_ids, columns.num_tokens, counts, cuts, limits, strict=False)
        for i, (sequence_id, num_tokens, count, hashes, limit) in enumerate(rows):
            try:
                sequence = self._asked(turn.owner, sequence_id or None, None if count < 0 else hashes)
                hit = self._lookup(turn.owner, sequence, num_tokens, limit)
                tokens, boundary = hit.tokens, hit.boundary_tokens
            except KvholdError as error:
                turn.output.errors["lookup", i] = error
                tokens = boundary = 0
            turn.output.lookup_hit_tokens.append(tokens)
            turn.output.lookup_boundary_tokens.append(boundary)

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
        new = self._extend(
            self._turn(self._alive(session)),
            sequence_id,
            slots_needed,
            processed_tokens,
            publish_tokens,
            hashes or [],
            num_lookahead_tokens,
            processed_tokens if computed_tokens is None else computed_tokens,
            num_encoder_tokens,
            reserved_blocks,
        )
        if new is None:
            return Extended(status=Status.REFUSED, new_blocks=[])
        return Extended(status=Status.OK, new_blocks=[blocks.copy() for blocks in new])

    def _extend(
        self,
        turn: Turn,
        sequence_id: int,
        slots: int,
        processed: int,
        publish: int,
        hashes: list[bytes],
        lookahead: int,
        computed: int,
        num_encoder_tokens: int,
        reserved: int,
    ) -> list[list[int]] | None:
        """New table entries per group; None = refused."""
        sequence = turn.owner.sequences.get(sequence_id)
        if sequence is None:
            raise UnknownSequence(sequence_id)
        if slots < 0 or processed < 0 or publish < 0 or lookahead < 0 or num_encoder_tokens < 0 or reserved < 0:
            raise _bad_extend(slots, processed, publish, lookahead, num_encoder_tokens, reserved)
        if slots > self.config.max_model_len:
            slots = self.config.max_model_len
        if hashes:
            sequence.hashes += hashes
        groups = self.groups
        for policy in groups.skipping:
            policy.release_skipped(sequence, processed, turn)
        new: list[list[int]] | None
        if groups.plain_sizes:
            new = self._grow_plain(turn, sequence, slots, reserved)
        else:
            new = self._grow_each(turn, sequence, slots, slots - lookahead, computed, num_encoder_tokens, reserved)
        if new is None:
            if hashes:  # a refusal leaves no trace: the client sends them again when it asks again
                del sequence.hashes[-len(hashes) :]
            return None
        if publish and self.config.enable_caching and not sequence.is_stale:
            groups.publish(sequence, publish, turn)
        return new

    def _grow_plain(self, turn: Turn, sequence: Sequence, slots: int, reserved: int) -> list[list[int]] | None:
        """Tables that just grow with the sequence: one draw for all groups, cut in their order."""
        sizes = self.groups.plain_sizes
        if len(sizes) == 1:
            table = sequence.tables[0]
            need = -(-slots // sizes[0]) - len(table)
            if need <= 0:
                return self._nothing
            if need > self.store.available(turn.session) - reserved:
                return None
            blocks = self.store.take(need, turn.session)
            table += blocks
            if turn.zeroing:
                turn.output.zero_blocks += blocks
            return [blocks]
        missing = [-(-slots // size) - len(table) for size, table in zip(sizes, sequence.tables, strict=True)]
        if max(missing) <= 0:
            return self._nothing
        need = sum(missing) if min(missing) >= 0 else sum(num for num in missing if num > 0)
        if need > self.store.available(turn.session) - reserved:
            return None
        blocks = self.store.take(need, turn.session)
        if turn.zeroing:
            turn.output.zero_blocks += blocks
        new, start = [], 0
        for num, table in zip(missing, sequence.tables, strict=True):
            if num > 0:
                drawn = blocks[start : start + num]
                table += drawn
                new.append(drawn)
                start += num
            else:
                new.append([])
        return new

    def _grow_each(
        self, turn: Turn, sequence: Sequence, slots: int, main: int, computed: int, encoder: int, reserved: int
    ) -> list[list[int]] | None:
        """Any mixture of kinds: each counts, then each draws."""
        policies = self.groups.policies
        need = 0
        for policy in policies:
            need += policy.need_growth(sequence, encoder if policy.covers_encoder else slots, main, computed)
        if need > 0 and need > self.store.available(turn.session) - reserved:
            return None
        return [
            policy.grow(sequence, encoder if policy.covers_encoder else slots, main, computed, turn)
            for policy in policies
        ]

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
        """As one item of AdmitColumns; `hashes=None` = as sent before (R19).

        Raises SequenceExists, BadCount, HashesMissing, NeverFits. A changed hit is status CONFLICT.
        """
        item = AdmitItem(
            sequence_id=sequence_id,
            num_tokens=num_tokens,
            num_prompt_tokens=num_tokens if num_prompt_tokens is None else num_prompt_tokens,
            hashes=hashes,
            max_hit_tokens=max_hit_tokens,
            max_new_tokens=max_new_tokens,
            budget_overhead=budget_overhead,
            alignment=alignment,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_tokens=num_external_tokens,
            num_encoder_tokens=num_encoder_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            watermark_blocks=watermark_blocks,
            reserved_blocks=reserved_blocks,
            defer_publish=defer_publish,
            skip_lookup=skip_lookup,
            is_resumed=is_resumed,
            expect_hit_tokens=expect_hit_tokens,
        )
        return self.admission.admit(self._turn(self._alive(session)), item, token_budget)

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
        self._free(self._turn(self._alive(session)), sequence_id, computed_tokens, hashes or [], fence_own)

    def _free(self, turn: Turn, sequence_id: int, computed: int, hashes: list[bytes], fence_own: bool) -> None:
        owner = turn.owner
        sequence = owner.sequences.get(sequence_id)
        if sequence is None:
            if owner.refused.pop(sequence_id, None) is None:
                raise UnknownSequence(sequence_id)
            return
        if computed < 0:
            raise BadCount("computed_tokens", computed, "must not be negative")
        if hashes:
            sequence.hashes += hashes
        if computed and self.config.enable_caching and not sequence.is_stale:
            self.groups.publish(sequence, computed, turn)
        if fence_own:
            self.tenures.start_tracking()
        del owner.sequences[sequence_id]
        for table in sequence.tables:
            table.reverse()
            turn.let_go(table, fence_own=fence_own)
        if turn.output.hand_offs:
            turn.output.hand_offs = [h for h in turn.output.hand_offs if h.sequence_id != sequence_id]

    def publish(
        self, session: int, sequence_id: int, *, publish_tokens: int, hashes: list[bytes] | None = None
    ) -> None:
        """Publishes a running sequence's full blocks up to `publish_tokens` (after defer_publish, or late hashes)."""
        turn = self._turn(self._alive(session))
        sequence = self._running(turn.owner, sequence_id)
        if publish_tokens < 0:
            raise BadCount("publish_tokens", publish_tokens, "must not be negative")
        if hashes:
            sequence.hashes += hashes
        if self.config.enable_caching and not sequence.is_stale:
            self.groups.publish(sequence, publish_tokens, turn)

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
        owner = self._alive(session) if session else OBSERVER
        sequence = self._asked(owner, sequence_id if session else None, hashes)
        hit = self._lookup(owner, sequence, num_tokens, max_hit_tokens)
        limit = hit_limit(num_tokens, max_hit_tokens)
        return Hit(
            hit_tokens=hit.tokens,
            boundary_tokens=hit.boundary_tokens,
            blocks=hit.blocks,
            group_hit_tokens=self.groups.group_hit_tokens(sequence, session, limit)
            if self.config.enable_caching
            else [],
        )

    def _lookup(self, owner: PoolSession, sequence: Sequence, num_tokens: int, max_hit_tokens: int) -> HitResult:
        if num_tokens < 1:
            raise BadCount("num_tokens", num_tokens, "must be at least 1")
        if not self.config.enable_caching:
            return HitResult(0, [[] for _ in self.groups.policies])
        return self.groups.lookup(sequence, owner.serial, hit_limit(num_tokens, max_hit_tokens))

    def _asked(self, owner: PoolSession, sequence_id: int | None, hashes: list[bytes] | None) -> Sequence:
        """The sequence of a lookup: a running one, one that was asked for before, or just these hashes."""
        if sequence_id is None:
            sequence = Sequence(0, len(self.groups.policies))
            sequence.hashes = hashes or []
            return sequence
        running = owner.sequences.get(sequence_id)
        if running is not None:
            return running
        sequence = self.admission.waiting_sequence(owner, sequence_id, hashes)
        self.admission.remember(owner, sequence)
        return sequence

    def _remember(self, owner: PoolSession, sequence_id: int, hashes: list[bytes]) -> None:
        if sequence_id not in owner.sequences:
            self.admission.remember(owner, self.admission.waiting_sequence(owner, sequence_id, hashes))

    @staticmethod
    def _running(owner: PoolSession, sequence_id: int) -> Sequence:
        sequence = owner.sequences.get(sequence_id)
        if sequence is None:
            raise UnknownSequence(sequence_id)
        return sequence

    # ----------------------------------------------------------- cache upkeep
    def invalidate(self, session: int, sequence_id: int, blocks: list[int]) -> int:
        """Drops the hashes of these blocks of the sequence and of its later blocks in the same group (R10).

        They stay held, and are published again when the sequence says that they were computed. Returns how many blocks
        lost a hash.
        """
        sequence = self._running(self._alive(session), sequence_id)
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
        num_held = self.config.num_blocks - 1 - self.config.num_reserved_low_blocks - self.store.free.count
        if num_held and not force:
            raise BlocksInUse(num_held, ", ".join(f"{s}/{q}" for s, q in holders[:20]) or "a copy or a dead session")
        self.store.clear()
        if self.store.events is not None:
            self.store.events.append(Cleared())
        for owner in self.tenures.sessions.values():
            for sequence in owner.sequences.values():
                sequence.is_stale = True
            for open_step in owner.open_steps:
                self.tenures.drop_origins(open_step)
        return holders

    # ------------------------------------------------------------- inspection
    def holders(self) -> list[tuple[int, int]]:
        """The sequences that hold blocks, as (session, sequence id)."""
        return [(owner.serial, sid) for owner in self.tenures.sessions.values() for sid in owner.sequences]

    def take_events(self) -> list[Event]:
        """Events since they were last taken, oldest first. `step` takes its own."""
        events = self.store.events
        if not events:
            return []
        self.store.events = []
        return events

    def take_residency_samples(self) -> list[ResidencySample]:
        """Lives of watched blocks that ended; bounded, oldest dropped."""
        return self.store.residency.take_samples()

    def counts(self) -> Counts:
        """O(sessions)."""
        store, config = self.store, self.config
        sessions = self.tenures.sessions.values()
        quarantined = self.tenures.num_quarantined
        usable = config.num_blocks - 1 - config.num_reserved_low_blocks
        return Counts(
            free=store.free.count - store.num_cached,
            cached=store.num_cached,
            held=usable - store.free.count - quarantined,
            quarantined=quarantined,
            reserved=config.num_reserved_low_blocks,
            null=1,
            total=config.num_blocks,
            provisional=store.num_provisional_blocks,
            fenced=store.fences.total,
            sequences=sum(len(owner.sequences) for owner in sessions),
            sessions=sum(owner.state is SessionState.ALIVE for owner in sessions),
        )

    def available(self, session: int) -> int:
        """Free blocks that this session may take now (fences of others excluded). O(1)."""
        return self.store.available(session)

    def use_of(self, session: int) -> SessionUse:
        """What a session has, alive or dead. O(its blocks)."""
        owner = self.tenures.sessions.get(session)
        if owner is None:
            raise UnknownPoolSession(session)
        tables = (table for sequence in owner.sequences.values() for table in sequence.tables)
        held = Counter(block for table in tables for block in table if block)
        held.update(block for open_step in owner.open_steps for block in open_step.copy_ends)
        is_alive = owner.state is SessionState.ALIVE
        refs, dead_refs = self.store.refs, self.store.dead_refs
        # Nobody else's, or only of the dead: `reap` counts them one slice at a time, but they wait from the death on.
        only_its = 0 if is_alive else sum(refs[b] in (num, dead_refs.get(b)) for b, num in held.items())
        return SessionUse(
            num_sequences=len(owner.sequences),
            num_held_blocks=len(held) if is_alive else 0,
            num_quarantined_blocks=only_its,
        )

    def tables(self, session: int, sequence_id: int) -> list[list[int]]:
        """A copy of a sequence's tables, per group. UnknownSequence."""
        return [table.copy() for table in self._running(self._alive(session), sequence_id).tables]

    def num_common_prefix_blocks(self, session: int, sequence_id: int) -> list[int]:
        """Per group: leading blocks of this sequence that all sequences of the pool share (full attention; else 0)."""
        sequence = self._running(self._alive(session), sequence_id)
        num_sequences = sum(len(owner.sequences) for owner in self.tenures.sessions.values())
        common = []
        for policy, table in zip(self.groups.policies, sequence.tables, strict=True):
            num = 0
            if policy.is_full and self.config.enable_caching:
                num = next((i for i, b in enumerate(table) if self.store.refs[b] != num_sequences), len(table))
            common.append(num)
        return common

    def cached_tokens_estimate(self, session: int, sequence_id: int) -> int:
        """Prefix of this sequence that could be found again if it were freed now (§13 S7)."""
        sequence = self._running(self._alive(session), sequence_id)
        tokens = self.store.key_tokens
        reach = [
            max((tokens[block] for block in table if self.store.key_of[block] is not None), default=0)
            for policy, table in zip(self.groups.policies, sequence.tables, strict=True)
            if policy.config.prefix_cacheable
        ]
        return min(reach, default=0)

    def block_ids_for(self, session: int, sequence_id: int, computed_tokens: int) -> list[list[int]]:
        """Per group: ids that hold the first `computed_tokens` (state and encoder groups: all)."""
        sequence = self._running(self._alive(session), sequence_id)
        return [
            table.copy() if policy.is_indivisible else table[: -(-computed_tokens // policy.block_tokens)]
            for policy, table in zip(self.groups.policies, sequence.tables, strict=True)
        ]

    def prefix_statistics(self, session: int | None = None) -> PrefixStatistics:
        """Since the pool opened, of one session or of all. The live object: do not change it."""
        return self.admission.attribution.total if session is None else self._alive(session).statistics

    def published(self) -> Completed:
        """Blocks that every session can hit now, under their own hashes; O(blocks)."""
        return published_blocks(self)

    def describe(self) -> State:
        """Full dump; O(blocks)."""
        return describe_pool(self)

    def check_invariants(self) -> None:
        """Asserts every invariant of docs/blocks.md; O(blocks)."""
        check_pool(self)


def _bad_extend(slots: int, processed: int, publish: int, lookahead: int, encoder: int, reserved: int) -> BadCount:
    values = {
        "slots_needed": slots,
        "processed_tokens": processed,
        "publish_tokens": publish,
        "num_lookahead_tokens": lookahead,
        "num_encoder_tokens": encoder,
        "reserved_blocks": reserved,
    }
    name, value = next((name, value) for name, value in values.items() if value < 0)
    return BadCount(name, value, "must not be negative")
