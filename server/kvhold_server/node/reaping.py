"""Cleaning up after sessions that ended, in slices that never hold up another session's step.

    REAPING ── pool.reap ──▶ WAITING ── table.try_release ──▶ RELEASING ── pool.release_quarantine ──▶ gone

One call of `work` touches at most about MAX_BLOCKS_PER_SLICE blocks, whoever they belonged to.
"""

from kvhold_server.domain.ids import PoolName
from kvhold_server.node.live_pool import LivePool
from kvhold_server.pool.pool import Pool
from kvhold_server.sessions.lease import SessionState
from kvhold_server.sessions.session import EndCause, Session
from kvhold_server.sessions.session_table import SessionTable

MAX_BLOCKS_PER_SLICE = 1000


class Reaper:
    """Moves dead sessions on. Shares the node's tables."""

    def __init__(self, sessions: SessionTable, pools: dict[PoolName, LivePool]) -> None:
        self._sessions = sessions
        self._pools = pools

    def began(self, session: Session) -> None:
        """The session has just ended. One that closed in order is done with at once: its pool has let everything go."""
        if session.end_cause is EndCause.CLOSED and session.state is SessionState.REAPING:
            self._sessions.reaped(session.session_id)

    def work(self, now_s: float) -> bool:
        """One slice. True: more could be done at once."""
        for session in self._sessions.dead():
            live = self._pools.get(session.pool)
            pool = live.pool if live is not None and session.session_id in live.members else None
            if session.state is SessionState.REAPING:
                if pool is None or pool.reap(session.slot, MAX_BLOCKS_PER_SLICE):
                    self._sessions.reaped(session.session_id)
                if live is not None:
                    live.note(None, live.pool.take_events())
                return True
            if session.state is SessionState.WAITING:
                self._sessions.try_release(session.session_id, now_s)
            if session.state is SessionState.RELEASING:
                if self._is_released(pool, session):
                    self._sessions.released(session.session_id)
                    if live is not None:
                        live.members.discard(session.session_id)
                return True
        return False

    def _is_released(self, pool: Pool | None, session: Session) -> bool:
        """A session that closed in order has nothing left; nor has one whose pool was deleted."""
        if pool is None or session.end_cause is EndCause.CLOSED:
            return True
        return pool.release_quarantine(session.slot, MAX_BLOCKS_PER_SLICE)
