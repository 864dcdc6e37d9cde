"""The first moments of a pool after a restart: until its former sessions said what they hold, nothing is handed out.

    restart          sessions A, B of the former daemon may come back; any block without a record may be theirs
    A re-asserts     its blocks are held again                                  allocation still waits
    B never comes    its grace ends, its workers are proven gone or given up    allocation begins

Steps that allocate wait meanwhile (the shell holds them back, or they are told to try again); everything else is
served. Kernels of steps that were under way may still use blocks that a former session had let go, and nobody remembers
which: whoever is not alone with his own kernels also waits for IN_FLIGHT_S after the restart.

Contents that are replaced while sequences run (UpdateContent, a forced reset) make these outdated: they publish nothing
any more. A successor must not take their blocks for new contents, and their clients know of nothing. So the session is
marked in its record before the contents change, until its outdated sequences are gone; what it re-asserts with the
mark is outdated, too.

    run a b   contents change: a b outdated, session marked   c admitted   restart: a b c outdated   they end: no mark
"""

from dataclasses import dataclass
from itertools import islice

from kvhold_server.domain.errors import Unavailable
from kvhold_server.domain.ids import PoolName, SessionId
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.step_values import StepCommand
from kvhold_server.node.warm_restart import WarmRestart
from kvhold_server.pool.restore import HeldSequence, reassert, reassert_again
from kvhold_server.sessions.session import Session
from kvhold_server.sessions.session_table import SessionTable

IN_FLIGHT_S = 1.0  # longer than a step's kernels take
RETRY_AFTER_S = 0.02


@dataclass(eq=False)
class PoolRecovering(Unavailable):
    """The daemon restarted, and not all sessions have come back yet."""

    template = "pool {pool!r} waits for {num_sessions} sessions of before the restart; try again in {retry_after_s} s"
    pool: str
    num_sessions: int
    retry_after_s: float = RETRY_AFTER_S


def no_sequences(live: LivePool) -> list[HeldSequence]:
    """What a session holds that does not say so."""
    return []


class Recovering:
    """Pools in which nothing may be allocated yet, and sessions that hold what no successor may publish."""

    def __init__(self, sessions: SessionTable, warm: WarmRestart | None) -> None:
        self._sessions = sessions
        self._warm = warm
        self.pools: dict[PoolName, float] = {}  # → not before this time
        self._alone: dict[PoolName, SessionId] = {}  # the only session that there was
        self._marked: dict[SessionId, tuple[Session, LivePool]] = {}  # hold, or may hold, outdated sequences

    def begin(self, live: LivePool, session: Session, now_s: float) -> None:
        """One more of the pool's former sessions is restored. A pool without any is ready at once."""
        self._alone.pop(live.name, None)
        if live.name not in self.pools:
            self._alone[live.name] = session.session_id
        self.pools[live.name] = now_s + IN_FLIGHT_S
        if session.is_outdated:
            self._marked[session.session_id] = session, live

    def settle(self, now_s: float) -> None:
        """Lets go of pools that have nobody to wait for any more, and of marks that nothing deserves any more."""
        for pool, not_before_s in list(self.pools.items()):
            if now_s >= not_before_s and not self._sessions.unasserted(pool):
                del self.pools[pool]
        for session, live in list(self._marked.values()):
            if not session.state.is_open:
                del self._marked[session.session_id]
            elif not session.must_reassert and not _holds_outdated(live, session):
                del self._marked[session.session_id]
                self._mark(session, is_outdated=False)

    def check(self, session: Session, command: StepCommand, now_s: float) -> None:
        """Raises PoolRecovering for a step that would allocate too early."""
        pool = session.pool
        if pool not in self.pools or not (command.items.extend.sequence_ids or command.items.admit.sequence_ids):
            return
        self.settle(now_s)
        if pool in self.pools:
            num_missing = len(self._sessions.unasserted(pool))
            if num_missing or self._alone.get(pool) != session.session_id:
                raise PoolRecovering(pool, num_missing)

    def take_up(self, live: LivePool, session: Session, held: list[HeldSequence]) -> tuple[int, ...]:
        """A former session says what it holds, perhaps again; returns the sequences that it lost."""
        if not session.must_reassert:
            return tuple(reassert_again(live.pool, session.slot, held))
        result = reassert(live.pool, session.slot, held, is_outdated=session.is_outdated)
        live.note(None, live.pool.take_events())  # hashes behind a gap go before they are published again
        live.note(result.completed, ())
        self._sessions.reasserted(session.session_id)
        return tuple(result.lost)

    def contents_change(self, live: LivePool) -> None:
        """Before they do: marks the sessions that hold sequences of the old ones, or have not said what they hold."""
        for session in self._sessions.sessions(live.name):
            owner = live.pool.tenures.sessions.get(session.slot)
            if session.must_reassert or (owner is not None and owner.sequences):
                self._marked[session.session_id] = session, live
                self._mark(session, is_outdated=True)

    def _mark(self, session: Session, *, is_outdated: bool) -> None:
        if session.is_outdated != is_outdated:
            session.is_outdated = is_outdated
            if self._warm is not None:
                self._warm.session_changed(session)


def _holds_outdated(live: LivePool, session: Session) -> bool:
    """Its oldest sequence is the last to be up to date. O(1)."""
    owner = live.pool.tenures.sessions.get(session.slot)
    return owner is not None and any(sequence.is_stale for sequence in islice(owner.sequences.values(), 1))
