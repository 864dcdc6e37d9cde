"""Which processes map which pool, for which session, and which of them are proven gone.

The shell reports what it sees (an export by name, a connection of the fd channel, a pidfd that fired); nothing here asks
the system. Read-only mappings are not watched: they cannot write.

    export by name            ─▶ UNWATCHED ┐
    fd channel connects (pid) ─▶ RUNNING   ├─ gone(watch) ─▶ forgotten, and sessions that waited for it are asked again
                                           ┘
A worker may come before its scheduler has a session (R16). Until it names one (`bind`), it is a witness of every session of
the pool that died after it came: it might have been that one's.
"""

from dataclasses import dataclass
from typing import NewType

from kvhold_server.domain.ids import PoolName, SessionId
from kvhold_server.sessions.quarantine import Witness

WatchId = NewType("WatchId", int)
CLIENT_RANK = -1  # a watch on the client process itself, which maps nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """One process and what it maps."""

    id: WatchId
    pool: PoolName
    rank: int  # CLIENT_RANK: the session's own process
    session_id: SessionId | None  # None: it has not said
    pid: int  # 0: unknown
    is_watched: bool  # the shell will report its end
    since_s: float


class WorkerWatch:
    """Mutable; O(watches of the pool) per question. Bounded by `max_watches`."""

    def __init__(self, *, max_watches: int = 65_536) -> None:
        raise NotImplementedError

    def add(
        self, *, pool: PoolName, rank: int, session_id: SessionId | None, pid: int, is_watched: bool, now_s: float
    ) -> Watch:
        """A process got the memory, or (CLIENT_RANK) proved to be a session's client. Raises TooManyWatches."""
        raise NotImplementedError

    def bind(self, watch_id: WatchId, session_id: SessionId) -> None:
        """A worker says whose it is. Unknown watches are ignored: it is gone."""
        raise NotImplementedError

    def gone(self, watch_id: WatchId) -> None:
        """Its process ended or its connection closed. Repeating is harmless."""
        raise NotImplementedError

    def forget_unwatched(self, session_id: SessionId) -> None:
        """The session is settled: drops the watches that nobody will report on."""
        raise NotImplementedError

    def drop_pool(self, pool: PoolName) -> None:
        """The pool is deleted."""
        raise NotImplementedError

    def witnesses(self, pool: PoolName, session_id: SessionId, died_at_s: float) -> tuple[Witness, ...]:
        """Who could still write to this session's blocks."""
        raise NotImplementedError

    def num_mappings(self, pool: PoolName) -> int:
        """Processes that map the pool, as far as is known (for DeletePool's refusal)."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Asserts that the index by pool and the table agree."""
        raise NotImplementedError
