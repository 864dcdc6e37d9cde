"""The first moments of a pool after a restart: until its former sessions said what they hold, nothing is handed out.

    restart          sessions A, B of the former daemon may come back; any block without a record may be theirs
    A re-asserts     its blocks are held again                                  allocation still waits
    B never comes    its grace ends, its workers are proven gone or given up    allocation begins

Steps that allocate wait meanwhile (the shell holds them back, or they are told to try again); everything else is
served. With more than one former session, kernels of steps that were under way may still use blocks that one of them
had let go: allocation then also waits for `in_flight_s` after the restart.
"""

from dataclasses import dataclass

from kvhold_server.domain.errors import Unavailable
from kvhold_server.domain.ids import PoolName
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.step_values import StepCommand
from kvhold_server.pool.restore import HeldSequence, reassert
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
    """Pools in which nothing may be allocated yet."""

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions
        self.pools: dict[PoolName, float] = {}  # → not before this time

    def begin(self, pool: PoolName, now_s: float) -> None:
        """The pool's former sessions are restored. A pool without any is ready at once."""
        num_former = len(self._sessions.unasserted(pool))
        if num_former:
            self.pools[pool] = now_s + (IN_FLIGHT_S if num_former > 1 else 0.0)

    def settle(self, now_s: float) -> None:
        """Lets go of pools that have nobody to wait for any more."""
        for pool, not_before_s in list(self.pools.items()):
            if now_s >= not_before_s and not self._sessions.unasserted(pool):
                del self.pools[pool]

    def check(self, pool: PoolName, command: StepCommand, now_s: float) -> None:
        """Raises PoolRecovering for a step that would allocate too early."""
        if pool not in self.pools or not (command.items.extend.sequence_ids or command.items.admit.sequence_ids):
            return
        self.settle(now_s)
        if pool in self.pools:
            raise PoolRecovering(pool, len(self._sessions.unasserted(pool)))

    def take_up(self, live: LivePool, session: Session, held: list[HeldSequence]) -> tuple[int, ...]:
        """A former session says what it holds; returns the sequences that it lost."""
        result = reassert(live.pool, session.slot, held)
        live.note(result.completed, live.pool.take_events())
        self._sessions.reasserted(session.session_id)
        return tuple(result.lost)
