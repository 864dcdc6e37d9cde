"""Sessions of a pool: opening, completing steps, closing, dying, and giving back in slices what a dead one held.

ALIVE ── close ─▶ gone                         everything is proven complete: published and freed at once
  │
  └─── kill ──▶ DEAD ── reap ─▶ quarantined ── release ─▶ gone
                its hashes of incomplete steps are dropped; its blocks wait until its workers are proven gone
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.errors import QuarantineOpen, UnknownPoolSession
from kvhold_server.pool.session import OpenStep, Origin, PoolSession, SessionState
from kvhold_server.pool.values import Completed

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

    @property
    def num_quarantined(self) -> int:
        """Blocks that only dead sessions hold."""
        return self.store.num_quarantined

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

    def complete(self, owner: PoolSession, completed_step: int) -> Completed:
        """Steps up to this one have left nothing in flight."""
        result = Completed(groups=[], blocks=[], hashes=[], key_tokens=[])
        steps = owner.open_steps
        if completed_step <= owner.completed_step:
            return result
        owner.completed_step = completed_step
        while steps and steps[0].step <= completed_step:
            open_step = steps.popleft()
            self._publish(open_step, result)
            self._lift(open_step)
            if open_step.copies:
                self.store.let_go(open_step.copy_ends, None)
        if not steps:
            owner.turn = None
        if self.store.tracking and len(self.sessions) == 1 and self.store.fences.is_quiet:
            self.store.tracking = False
            self.store.fences.forget_closed()
        self.store.version += 1
        return result

    def _publish(self, open_step: OpenStep, result: Completed) -> None:
        """Everybody may see what this step published."""
        store = self.store
        for origin in open_step.origins.values():
            origin.is_public = True
            store.num_provisional -= 1
            store.num_provisional_blocks -= origin.num_blocks
            if self.tells_completed:
                for part in origin.parts:
                    self._tell(origin, part, result)
            origin.parts = []
        open_step.origins = {}

    def _tell(self, origin: Origin, blocks: list[int], result: Completed) -> None:
        """Lists those blocks that still have the hash that this origin gave them."""
        key_of, origin_of = self.store.key_of, self.store.origin_of
        if any(origin_of[block] is not origin for block in blocks):
            blocks = [block for block in blocks if origin_of[block] is origin]
        result.groups.extend(repeat(origin.group, len(blocks)))
        result.blocks.extend(blocks)
        result.hashes.extend(map(key_of.__getitem__, blocks))  # type: ignore[arg-type]
        result.key_tokens.extend(map(self.store.key_tokens.__getitem__, blocks))

    def _lift(self, open_step: OpenStep) -> None:
        for fence in open_step.fences():
            self.store.fences.close(fence)
        open_step.released.clear()

    def drop_origins(self, open_step: OpenStep) -> None:
        """What this step published is gone already: nothing is left to become public."""
        for origin in open_step.origins.values():
            self.store.num_provisional -= 1
            self.store.num_provisional_blocks -= origin.num_blocks
            origin.num_blocks = 0
        open_step.origins = {}

    def close(self, owner: PoolSession) -> None:
        """A session that ends in good order."""
        self.complete(owner, owner.step)
        for sequence in owner.sequences.values():
            for table in sequence.tables:
                table.reverse()
                self.store.let_go(table, None)
        del self.sessions[owner.serial]

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
            store.quarantine(open_step.copy_ends)
        for sequence in owner.sequences.values():
            for table in sequence.tables:
                for i in range(0, len(table), _SLICE_BLOCKS):
                    store.quarantine(table[i : i + _SLICE_BLOCKS])
                    yield _SLICE_BLOCKS

    def _release(self, owner: PoolSession) -> Iterator[int]:
        store = self.store
        for open_step in owner.open_steps:
            self._lift(open_step)
            store.unquarantine(open_step.copy_ends)
        owner.open_steps.clear()
        while owner.sequences:
            sequence = owner.sequences[next(iter(owner.sequences))]
            for table in sequence.tables:
                while table:
                    deepest = table[-_SLICE_BLOCKS:]
                    del table[-_SLICE_BLOCKS:]
                    deepest.reverse()
                    store.unquarantine(deepest)
                    yield len(deepest)
            del owner.sequences[sequence.sequence_id]


def _work_off(work: Iterator[int], max_blocks: int) -> bool:
    """Runs the work for about `max_blocks` blocks; True if it came to its end."""
    while max_blocks > 0:
        done = next(work, None)
        if done is None:
            return True
        max_blocks -= done
    return False
