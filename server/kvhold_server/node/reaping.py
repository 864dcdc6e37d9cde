"""Cleaning up after sessions that ended, in slices that never hold up another session's step.

    REAPING ── pool.reap ──▶ WAITING ── table.try_release ──▶ RELEASING ── pool.release_quarantine ──▶ gone

A session without a slot has nothing in a pool any more: it closed in order. One call of `work` touches at most about
MAX_BLOCKS_PER_SLICE blocks, whoever they belonged to.
"""

from kvhold_server.domain.ids import PoolName
from kvhold_server.node.live_pool import LivePool
from kvhold_server.sessions.lease import SessionState
from kvhold_server.sessions.session import NO_SLOT, Session
from kvhold_server.sessions.session_table import SessionTable

MAX_BLOCKS_PER_SLICE = 1000


class Reaper:
    """Moves dead sessions on. Shares the node's tables."""

    def __init__(self, sessions: SessionTable, pools: dict[PoolName, LivePool]) -> None:
        self._sessions = sessions
        self._pools = pools

    def began(self, session: Session) -> None:
        """The session has just ended. One that its pool has let go of already has nothing left to clean up."""
        if session.slot == NO_SLOT and session.state is SessionState.REAPING:
            self._sessions.reaped(session.session_id)

    def work(self, now_s: float) -> bool:
        """One slice. True: more could be done at once."""
        for session in self._sessions.dead():
            live = self._pools.get(session.pool)
            is_here = live is not None and session.session_id in live.members and session.slot != NO_SLOT
            pool = live.pool if live is not None and is_here else None
            if session.state is SessionState.REAPING:
                if pool is None or pool.reap(session.slot, MAX_BLOCKS_PER_SLICE):
                    self._sessions.reaped(session.session_id)
                if live is not None:
                    live.note(None, live.pool.take_events())
                return True
            if session.state is SessionState.WAITING:
                self._sessions.try_release(session.session_id, now_s)
            if session.state is SessionState.RELEASING:
                if pool is None or pool.release_quarantine(session.slot, MAX_BLOCKS_PER_SLICE):
                    self._sessions.released(session.session_id)
                    if live is not None:
                        live.members.discard(session.session_id)
                return True
        return False
