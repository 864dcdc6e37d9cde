"""Sessions of a pool: opening, steps, closing, dying, and giving back in slices what a dead one held.

ALIVE ── close ─▶ gone                         everything is proven complete: published and freed at once
  │
  └─── kill ──▶ DEAD ── reap ─▶ quarantined ── release ─▶ gone
                its hashes of incomplete steps are dropped; its blocks wait until its workers are proven gone
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.errors import QuarantineOpen, StepOutOfOrder, TooManyOpenSteps, UnknownPoolSession
from kvhold_server.pool.open_step import OpenStep
from kvhold_server.pool.origin import Origin
from kvhold_server.pool.session import PoolSession, SessionState
from kvhold_server.pool.values import Completed, SessionUse

_SLICE_BLOCKS = 256


class Tenures:
    """All sessions of one pool that are not forgotten."""

    def __init__(self, config: PoolConfig, store: BlockStore) -> None:
        self.config = config
        self.store = store
        self.tells_completed = config.report_completed  # whoever takes the answers may do without
        self.sessions: dict[int, PoolSession] = {}
        self._last_serial = 0
        self._work: dict[int, Iterator[int]] = {}  # of dead sessions: yields how many blocks it has just worked off

    def open(self) -> PoolSession:
        """A new session."""
        if self.sessions:
            self.start_tracking()
        self._last_serial += 1
        self.store.has_others |= self._last_serial > 1
        owner = PoolSession(self._last_serial)
        self.sessions[owner.serial] = owner
        return owner

    def start_tracking(self) -> None:
        """From now on the fence of each block is recorded: somebody must respect it."""
        store = self.store
        if store.tracking:
            return
        store.tracking = True
        released: set[int] = set()
        for owner in self.sessions.values():
            for open_step in owner.open_steps:
                for blocks in open_step.released:
                    store.fences.let_go(open_step.fence_for(fence_own=False), blocks)
                    released.update(blocks)
                open_step.released.clear()
        store.fences.enter_free(block for block in released if not store.refs[block])

    # ------------------------------------------------------------ steps
    def advance(self, owner: PoolSession, step: int, completed_step: int) -> Completed | None:
        """The session's next step, or more of the last one; steps up to `completed_step` are complete.

        Raises StepOutOfOrder, TooManyOpenSteps. None: nothing has been completed.
        """
        if step < owner.step or completed_step > step or step < 1:
            raise StepOutOfOrder(step, completed_step, owner.step, owner.completed_step)
        completed = None
        if completed_step > owner.completed_step:
            completed = self.complete(owner, completed_step if completed_step < owner.step else owner.step)
        if step > owner.step:
            if len(owner.open_steps) >= self.config.max_open_steps:
                raise TooManyOpenSteps(len(owner.open_steps), self.config.max_open_steps)
            owner.begin(step)
        return completed

    def complete(self, owner: PoolSession, completed_step: int) -> Completed:
        """Steps up to this one have left nothing in flight."""
        result = Completed(groups=[], blocks=[], hashes=[], key_tokens=[])
        steps, prefixes = owner.open_steps, self.store.prefixes
        if completed_step <= owner.completed_step:
            return result
        owner.completed_step = completed_step
        while steps and steps[0].step <= completed_step:
            open_step = steps.popleft()
            prefixes.reveal(open_step.origins.values(), result if self.tells_completed else None)
            open_step.origins = {}
            self._lift(open_step)
            if open_step.copies:
                self.store.let_go(open_step.copy_ends, None)
        if self.store.tracking and len(self.sessions) == 1 and self.store.fences.is_quiet:
            self.store.tracking = False
            self.store.fences.forget_closed()
        self.store.version += 1
        return result

    def _lift(self, open_step: OpenStep) -> None:
        for fence in open_step.fences():
            self.store.fences.close(fence)
        open_step.released.clear()

    def drop_origins(self, open_step: OpenStep) -> None:
        """What this step published is gone already."""
        self.store.prefixes.abandon(open_step.origins.values())
        open_step.origins = {}

    def close(self, owner: PoolSession) -> None:
        """A session that ends in good order."""
        self.complete(owner, owner.step)
        for sequence in owner.sequences.values():
            for table in sequence.tables:
                table.reverse()
                self.store.let_go(table, None)
        self.store.let_go(owner.set_aside, None)
        del self.sessions[owner.serial]

    def go_stale(self) -> None:
        """The cache was reset: what runs now publishes nothing any more, and what it published is gone."""
        for owner in self.sessions.values():
            for sequence in owner.sequences.values():
                sequence.is_stale = True
            for open_step in owner.open_steps:
                self.drop_origins(open_step)

    # ------------------------------------------------------------ dead sessions
    def reap(self, session: int, max_blocks: int) -> bool:
        """Works on a dead session for about `max_blocks` blocks; True = all is quarantined."""
        owner = self._dead(session, SessionState.DEAD)
        work = self._work.get(session)
        if work is None:
            work = self._work[session] = self._reap(owner)
        return _work_off(work, max_blocks)

    def release(self, session: int, max_blocks: int) -> bool:
        """Frees a dead session's blocks, about `max_blocks` per call; True = forgotten."""
        owner = self._dead(session, SessionState.DEAD, SessionState.RELEASED)
        if owner.state is SessionState.DEAD:
            if not self.reap(session, max_blocks):
                return False
            owner.state = SessionState.RELEASED
            self._work[session] = self._release(owner)
        if not _work_off(self._work[session], max_blocks):
            return False
        del self._work[session]
        del self.sessions[session]
        return True

    def _dead(self, session: int, *states: SessionState) -> PoolSession:
        owner = self.sessions.get(session)
        if owner is None:
            raise UnknownPoolSession(session)
        if owner.state not in states:
            raise QuarantineOpen(session, owner.state.value)
        return owner

    def _reap(self, owner: PoolSession) -> Iterator[int]:
        store = self.store
        owner.refused.clear()
        for open_step in owner.open_steps:
            for origin in open_step.origins.values():
                for part in origin.parts:
                    for i in range(0, len(part), _SLICE_BLOCKS):
                        for block in part[i : i + _SLICE_BLOCKS]:
                            if store.origin_of[block] is origin:
                                store.drop_keys(block)
                        yield _SLICE_BLOCKS
            self.drop_origins(open_step)
            store.quarantine.enter(open_step.copy_ends)
        store.quarantine.enter(owner.set_aside)
        for sequence in owner.sequences.values():
            for table in sequence.tables:
                for i in range(0, len(table), _SLICE_BLOCKS):
                    store.quarantine.enter(table[i : i + _SLICE_BLOCKS])
                    yield _SLICE_BLOCKS

    def _release(self, owner: PoolSession) -> Iterator[int]:
        store = self.store
        for open_step in owner.open_steps:
            self._lift(open_step)
            store.let_go_of_dead(open_step.copy_ends)
        owner.open_steps.clear()
        store.let_go_of_dead(owner.set_aside)
        owner.set_aside = []
        while owner.sequences:
            sequence = owner.sequences[next(iter(owner.sequences))]
            for table in sequence.tables:
                while table:
                    deepest = table[-_SLICE_BLOCKS:]
                    del table[-_SLICE_BLOCKS:]
                    deepest.reverse()
                    store.let_go_of_dead(deepest)
                    yield len(deepest)
            del owner.sequences[sequence.sequence_id]

    # ------------------------------------------------------------ who holds what
    def holders(self) -> list[tuple[int, int]]:
        """The sequences that hold blocks, as (session, sequence id)."""
        return [(owner.serial, sequence_id) for owner in self.sessions.values() for sequence_id in owner.sequences]

    def use_of(self, session: int) -> SessionUse:
        """What a session has, alive or dead. O(its blocks). Raises UnknownPoolSession."""
        owner = self.sessions.get(session)
        if owner is None:
            raise UnknownPoolSession(session)
        held = owner.held()
        is_alive = owner.state is SessionState.ALIVE
        refs, dead_refs = self.store.refs, self.store.dead_refs
        # Nobody else's, or only of the dead: `reap` counts them one slice at a time, but they wait from the death on.
        only_its = 0 if is_alive else sum(refs[b] in (num, dead_refs.get(b)) for b, num in held.items())
        return SessionUse(
            num_sequences=len(owner.sequences),
            num_held_blocks=len(held) if is_alive else 0,
            num_quarantined_blocks=only_its,
        )

    def check_invariants(self) -> None:
        """Each session's own, and those of the blocks that they hold together. O(blocks)."""
        held: Counter[int] = Counter()
        provisional: set[Origin] = set()
        for owner in self.sessions.values():
            owner.check_invariants()
            held.update(owner.held())
            provisional.update(origin for step in owner.open_steps for origin in step.origins.values())
        for session in self._work:
            assert self.sessions[session].state is not SessionState.ALIVE, "the living are not reaped"
        self.store.check_invariants(held, provisional)


def _work_off(work: Iterator[int], max_blocks: int) -> bool:
    """Runs the work for about `max_blocks` blocks; True if it came to its end."""
    while max_blocks > 0:
        done = next(work, None)
        if done is None:
            return True
        max_blocks -= done
    return False
