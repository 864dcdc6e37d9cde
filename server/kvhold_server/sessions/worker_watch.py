"""Which processes map which pool, for which session, and which of them are proven gone.

The shell reports what it sees (an export by name, a connection of the fd channel, a pidfd that fired); nothing here
asks the system. Read-only mappings are not reported: they cannot write.

    export by name            ─▶ UNWATCHED ─┐
    fd channel connects (pid) ─▶ RUNNING    ├─ gone(watch) ─▶ no longer delays the sessions that it was a witness of
    client proves its pid     ─▶ RUNNING   ─┘
A worker may come before its scheduler has a session (R16). Until it names one (`bind`), it is a witness of every
session of the pool that died after it came: it might have been that one's.
"""

from dataclasses import dataclass, replace
from typing import NewType

from kvhold_server.domain.ids import PoolName, SessionId
from kvhold_server.sessions.errors import TooManyWatches
from kvhold_server.sessions.quarantine import Evidence, Witness

WatchId = NewType("WatchId", int)
SETTLED = SessionId("")  # whose session is over; the process still maps the pool
CLIENT_RANK = -1  # a watch on the client process itself, which maps nothing by that


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

    def witness(self) -> Witness:
        """What it testifies while it is not gone."""
        what = "client" if self.rank == CLIENT_RANK else f"worker of rank {self.rank}"
        if self.session_id is None:
            what += " that named no session"
        return Witness(what=what, pid=self.pid, evidence=Evidence.RUNNING if self.is_watched else Evidence.UNWATCHED)


class WorkerWatch:
    """Mutable; a question costs O(watches of that session + watches of that pool that named none)."""

    def __init__(self, *, max_watches: int = 65_536) -> None:
        self._max_watches = max_watches
        self._next_id = 1
        self._watches: dict[WatchId, Watch] = {}
        self._groups: dict[tuple[PoolName, SessionId | None], set[WatchId]] = {}
        self._gone_clients: dict[SessionId, int] = {}  # session → pid of its client, proven gone
        self._num_alike: dict[WatchId, int] = {}  # unwatched → how many exports it stands for

    def add(
        self, *, pool: PoolName, rank: int, session_id: SessionId | None, pid: int, is_watched: bool, now_s: float
    ) -> Watch:
        """A process got the memory, or (CLIENT_RANK) proved to be a session's client. Raises TooManyWatches.

        Unwatched processes that look alike are one watch: nothing can tell them apart. One that then takes the memory
        in a way that can be watched is no longer among them.
        """
        alike = self._unwatched(pool, rank, session_id)
        if alike is not None and not is_watched:
            self._num_alike[alike.id] += 1
            return alike
        if alike is not None:
            self._num_alike[alike.id] -= 1
            if not self._num_alike[alike.id]:
                self._remove(alike)
        if len(self._watches) >= self._max_watches:
            raise TooManyWatches(len(self._watches), self._max_watches)
        watch = Watch(
            id=WatchId(self._next_id),
            pool=pool,
            rank=rank,
            session_id=session_id,
            pid=pid,
            is_watched=is_watched,
            since_s=now_s,
        )
        self._next_id += 1
        self._insert(watch)
        if not is_watched:
            self._num_alike[watch.id] = 1
        return watch

    def get(self, watch_id: WatchId) -> Watch | None:
        """None: it is gone."""
        return self._watches.get(watch_id)

    def has_unwatched(self, pool: PoolName, rank: int, session_id: SessionId | None) -> bool:
        """Whether some process took this rank by name, for this session, and has not been watched since."""
        return self._unwatched(pool, rank, session_id) is not None

    def client_gone(self, session_id: SessionId, pid: int) -> None:
        """The session's client is proven gone."""
        self._gone_clients[session_id] = pid

    def bind(self, watch_id: WatchId, session_id: SessionId) -> None:
        """A watched worker says whose it is. Unknown watches are ignored: it is gone."""
        watch = self._watches.get(watch_id)
        if watch is not None and watch.is_watched:
            self._remove(watch)
            self._insert(replace(watch, session_id=session_id))

    def gone(self, watch_id: WatchId) -> None:
        """Its process ended or its connection closed. Repeating is harmless."""
        watch = self._watches.get(watch_id)
        if watch is None:
            return
        self._remove(watch)
        if watch.rank == CLIENT_RANK and watch.session_id is not None:
            self._gone_clients[watch.session_id] = watch.pid

    def forget_session(self, pool: PoolName, session_id: SessionId) -> None:
        """The session is settled. Its workers that still run may serve a later session of the same process."""
        self._gone_clients.pop(session_id, None)
        for watch_id in list(self._groups.get((pool, session_id), ())):
            watch = self._watches[watch_id]
            self._remove(watch)
            if watch.is_watched and watch.rank != CLIENT_RANK:
                self._insert(replace(watch, session_id=SETTLED))

    def drop_pool(self, pool: PoolName) -> None:
        """The pool is deleted."""
        for watch in [watch for watch in self._watches.values() if watch.pool == pool]:
            self._remove(watch)

    def witnesses(
        self, pool: PoolName, session_id: SessionId, died_at_s: float, client_pid: int = 0
    ) -> tuple[Witness, ...]:
        """Who could still write to this session's blocks, its client first."""
        own = [self._watches[watch_id] for watch_id in sorted(self._groups.get((pool, session_id), ()))]
        unbound = [self._watches[watch_id] for watch_id in sorted(self._groups.get((pool, None), ()))]
        found = [watch.witness() for watch in own]
        found += [watch.witness() for watch in unbound if watch.since_s <= died_at_s]
        settled = [self._watches[watch_id] for watch_id in sorted(self._groups.get((pool, SETTLED), ()))]
        found += [watch.witness() for watch in settled if client_pid and watch.pid == client_pid]
        if session_id in self._gone_clients:
            found.insert(0, Witness(what="client", pid=self._gone_clients[session_id], evidence=Evidence.GONE))
        elif not any(watch.rank == CLIENT_RANK for watch in own):
            found.insert(0, Witness(what="client", pid=0, evidence=Evidence.UNWATCHED))
        return tuple(found)

    def num_mappings(self, pool: PoolName) -> int:
        """Processes that are known to map the pool now (for DeletePool's refusal). O(watches)."""
        return sum(
            watch.pool == pool and watch.is_watched and watch.rank != CLIENT_RANK for watch in self._watches.values()
        )

    def check_invariants(self) -> None:
        """Asserts that the groups partition the table."""
        grouped = [watch_id for group in self._groups.values() for watch_id in group]
        assert sorted(grouped) == sorted(self._watches)
        assert len(self._watches) <= self._max_watches
        assert self._num_alike.keys() == {watch.id for watch in self._watches.values() if not watch.is_watched}
        assert all(num > 0 for num in self._num_alike.values())
        assert all(self._groups.values()), "no empty group is kept"
        for (pool, session_id), group in self._groups.items():
            for watch_id in group:
                watch = self._watches[watch_id]
                assert (watch.pool, watch.session_id) == (pool, session_id)

    def _unwatched(self, pool: PoolName, rank: int, session_id: SessionId | None) -> Watch | None:
        for watch_id in self._groups.get((pool, session_id), ()):
            watch = self._watches[watch_id]
            if watch.rank == rank and not watch.is_watched:
                return watch
        return None

    def _insert(self, watch: Watch) -> None:
        self._watches[watch.id] = watch
        self._groups.setdefault((watch.pool, watch.session_id), set()).add(watch.id)

    def _remove(self, watch: Watch) -> None:
        del self._watches[watch.id]
        self._num_alike.pop(watch.id, None)
        group = self._groups[watch.pool, watch.session_id]
        group.discard(watch.id)
        if not group:
            del self._groups[watch.pool, watch.session_id]
