"""All sessions of a daemon: opening, resuming, fencing, expiry, and the way of the dead.

Time and secrets are arguments. Every mutating RPC begins with `require`, which knows three answers: yours, fenced,
unknown. The shell drives the table with RPCs, stream events, a timer that calls `expire` every TICK_S, and the progress
of the pool's cleaning:

    for session in table.expire(now): pool.kill_session(session.slot)
    for session in table.dead():                                     # a bounded slice of work each
        REAPING    pool.reap(slot, n)               done → table.reaped(id)
        WAITING    table.try_release(id, now)       yes → RELEASING; no → say why
        RELEASING  pool.release_quarantine(slot, n) done → table.released(id)
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.ids import Epoch, PoolName, SessionId
from kvhold_server.sessions.errors import (
    BootIdMismatch,
    ResumeRefused,
    SessionFenced,
    TooManySessions,
    UnknownSession,
)
from kvhold_server.sessions.lease import LeaseTerms, SessionEvent, SessionState, after
from kvhold_server.sessions.quarantine import DeathFacts, Verdict, judge
from kvhold_server.sessions.resume_tokens import ResumeTokens
from kvhold_server.sessions.session import Credentials, EndCause, OpenRequest, RequestKey, Session, StreamId, short_id
from kvhold_server.sessions.worker_watch import WorkerWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Bounds, so that a flood of clients cannot exhaust the daemon."""

    max_sessions: int = 4096  # open and dead-but-waiting together
    max_sessions_per_tenant: int = 4096
    max_remembered_ends: int = 65_536  # ended sessions whose late calls are answered "fenced" rather than "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session and what its client must learn."""

    session: Session
    resume_token: str
    is_new: bool  # False: a retried open, or a resume
    must_reassert: bool = False  # a resume after a restart: apply what the client says it holds, then `reasserted`;
    # said again, since the answer was lost: compare
    lost_sequence_ids: tuple[int, ...] = ()  # what could not be given back to it then


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredSession:
    """A session of the daemon's former tenure, from its records."""

    session_id: SessionId
    request: OpenRequest
    epoch: Epoch
    token_digest: bytes
    previous_token_digest: bytes = b""  # whether the newest token arrived is not known any more


@dataclass(frozen=True, slots=True)
class _End:
    """What is remembered of a session that is gone."""

    epoch: Epoch
    cause: EndCause


class SessionTable:
    """Mutable; owned by one thread. O(1) per RPC; `expire` and lists are O(sessions), which are bounded."""

    def __init__(
        self,
        *,
        boot_id: str = "",
        terms: LeaseTerms | None = None,
        limits: SessionLimits | None = None,
        watch: WorkerWatch | None = None,
        on_change: Callable[[Session], None] | None = None,
        on_gone: Callable[[Session], None] | None = None,
    ) -> None:
        """`on_change`: a session was opened, resumed or ended; `on_gone`: it is settled. Both must not fail."""
        self.terms = terms or LeaseTerms()
        self.limits = limits or SessionLimits()
        self.watch = watch or WorkerWatch()
        self._boot_id = boot_id
        self._on_change = on_change or _nobody
        self._on_gone = on_gone or _nobody
        self._sessions: dict[str, Session] = {}  # in order of opening
        self._tokens = ResumeTokens()
        self._by_request: dict[RequestKey, Session] = {}
        self._dead: dict[str, Session] = {}
        self._unasserted: dict[str, Session] = {}
        self._ends: dict[str, _End] = {}  # oldest first
        self._num_opened = 0
        self._last_expire_s: float | None = None

    # ------------------------------------------------------------------ clients
    def open(self, request: OpenRequest, credentials: Credentials, now_s: float) -> Opened:
        """Opens a session in GRACE (its stream must follow), or returns the one of the same `request_id`.

        Raises InvalidField (lengths; a request_id whose session is in use), TooManySessions.
        """
        request.check()
        earlier = self._by_request.get(request.key) if request.request_id else None
        if earlier is not None:
            return self._opened_before(earlier, now_s)
        self._check_room(request.tenant)
        session = self._admit(request, credentials.session_id, now_s)
        self._tokens.give(session, credentials.resume_token)
        if request.request_id:
            self._by_request[request.key] = session
        self._on_change(session)
        return Opened(session=session, resume_token=credentials.resume_token, is_new=True)

    def resume(self, pool: PoolName, token: str, credentials: Credentials, now_s: float) -> Opened:
        """Starts the next epoch of a session and replaces its token; the old epoch is fenced from now on.

        The old token stays good until the new epoch is used, so that a lost answer does not lose the session.
        Raises ResumeRefused.
        """
        session = self._tokens.find(token)
        if session is None:
            raise ResumeRefused("the token is unknown: the session ended, or was resumed by somebody else")
        if session.pool != pool:
            raise ResumeRefused(f"the session works on another pool than {pool}")
        self._move(session, SessionEvent.RESUMED)
        session.epoch = Epoch(session.epoch + 1)
        session.stream = StreamId(session.stream + 1)  # whatever the old streams still report is past
        session.stream_ended_at_s = now_s
        self._tokens.give(session, credentials.resume_token, shown=token)
        self._on_change(session)
        return Opened(
            session=session,
            resume_token=credentials.resume_token,
            is_new=False,
            must_reassert=session.must_reassert or session.may_reassert_again,
        )

    def reasserted(self, session_id: str) -> None:
        """What a restored session's client holds was applied. Until it acts, it may say so again."""
        session = self._unasserted.pop(session_id, None)
        if session is not None:
            session.must_reassert, session.may_reassert_again = False, True

    def restore(self, restored: RestoredSession, now_s: float) -> Session:
        """At start: a session of the former tenure may be resumed within grace. There is room for it, whatever the
        bound is by now: nobody may be given what it holds.
        """
        session = self._admit(restored.request, restored.session_id, now_s)
        session.epoch = restored.epoch
        session.must_reassert = session.was_restored = True
        self._tokens.restore(session, restored.token_digest, restored.previous_token_digest)
        self._unasserted[session.session_id] = session
        return session

    def require(self, session_id: str, epoch: int) -> Session:
        """The caller's open session. Raises UnknownSession, SessionFenced, BootIdMismatch (not re-asserted yet)."""
        session = self._owned(session_id, epoch)
        if session.must_reassert:
            raise BootIdMismatch(self._boot_id)
        return session

    def close(self, session_id: str, epoch: int, completed_step: int, now_s: float) -> Session | None:
        """Ends it for its client; None if it is gone already. `end_cause` says whether all steps were complete: only
        then may the pool publish and free everything at once. Raises SessionFenced, UnknownSession, InvalidField."""
        session = self._sessions.get(session_id)
        if session is None and session_id in self._ends and epoch >= self._ends[session_id].epoch:
            return None
        if session is not None and not session.state.is_open and epoch == session.epoch:
            return None
        session = self._owned(session_id, epoch)
        last_step = session.steps.last_step
        # Steps that a former daemon saw are complete, too, if a later one is; if there was none, nobody here can tell.
        session.steps.complete(min(completed_step, last_step) if session.was_restored else completed_step)
        in_order = session.steps.all_completed and not (session.was_restored and not last_step)
        self._end(session, EndCause.CLOSED if in_order else EndCause.CLOSED_EARLY, now_s)
        return session

    # ------------------------------------------------------------------ streams
    def attach_stream(self, session_id: str, epoch: int, now_s: float) -> StreamId:
        """A KeepAlive stream is up; it replaces an older one. Raises UnknownSession, SessionFenced."""
        session = self._owned(session_id, epoch)
        self._move(session, SessionEvent.ATTACHED)
        session.stream = StreamId(session.stream + 1)
        session.heard_at_s = now_s
        return session.stream

    def keepalive(self, session_id: str, epoch: int, stream: StreamId, now_s: float) -> Session:
        """A message arrived on the stream; a silent one that speaks again in time is up again.

        Raises UnknownSession, SessionFenced: end the stream with it.
        """
        session = self._owned(session_id, epoch)
        if session.state is SessionState.GRACE:
            self._move(session, SessionEvent.ATTACHED)
            session.stream = stream
        session.heard_at_s = now_s
        return session

    def stream_broken(self, session_id: str, stream: StreamId, now_s: float) -> None:
        """Starts the grace period, unless a newer stream has taken over or the session has ended."""
        session = self._sessions.get(session_id)
        if session is not None and session.state is SessionState.LIVE and session.stream == stream:
            self._break(session, now_s)

    # ------------------------------------------------------------------ deaths
    def expire(self, now_s: float) -> list[Session]:
        """Ends sessions whose grace is over, after turning silent streams into broken ones. Returns those to reap.

        Time in which the daemon itself did not run counts for nobody: its clients' messages wait in the sockets.
        """
        self._forgive_sleep(now_s)
        expired = []
        for session in [session for session in self._sessions.values() if session.state.is_open]:
            if session.state is SessionState.LIVE and now_s - session.heard_at_s > self.terms.lease_ttl_s:
                self._break(session, now_s)
            elif session.state is SessionState.GRACE and now_s - session.stream_ended_at_s > self.terms.grace_s:
                self._end(session, EndCause.EXPIRED, now_s)
                expired.append(session)
        return expired

    def kill(self, session_id: str, now_s: float) -> Session | None:
        """The daemon ends it: pool deleted by force, drain deadline passed. None if it has ended already."""
        session = self._sessions.get(session_id)
        if session is None or not session.state.is_open:
            return None
        self._end(session, EndCause.KILLED, now_s)
        return session

    def client_died(self, session_id: str, pid: int, now_s: float) -> Session | None:
        """A process is proven gone. If it was the session's client, nobody waits for its grace: returns it to reap."""
        session = self._sessions.get(session_id)
        if session is None or not session.state.is_open or not pid or session.request.pid != pid:
            return None
        self.watch.client_gone(session.session_id, pid)
        self._end(session, EndCause.DIED, now_s)
        return session

    def reaped(self, session_id: str) -> None:
        """The pool has dropped its provisional hashes: REAPING → WAITING."""
        self._move(self._dead[session_id], SessionEvent.REAPED)

    def try_release(self, session_id: str, now_s: float) -> Verdict:
        """Asks whether a WAITING session's blocks may go; if so, WAITING → RELEASING."""
        session = self._dead[session_id]
        verdict = self._judge(session, now_s)
        if verdict.may_release:
            self._move(session, SessionEvent.PROVEN)
        return verdict

    def released(self, session_id: str) -> None:
        """The pool has freed its blocks: RELEASING → GONE; the session is forgotten but for its fence."""
        session = self._dead.pop(session_id)
        self._move(session, SessionEvent.RELEASED)
        del self._sessions[session_id]
        self._unasserted.pop(session_id, None)
        self.watch.forget_session(session.pool, session.session_id)
        assert session.end_cause is not None
        self._ends[session_id] = _End(session.epoch, session.end_cause)
        if len(self._ends) > self.limits.max_remembered_ends:
            del self._ends[next(iter(self._ends))]
        self._on_gone(session)

    # ------------------------------------------------------------------ questions
    def sessions(self, pool: PoolName | None = None) -> list[Session]:
        """Open and dead-but-waiting, in order of opening."""
        return [session for session in self._sessions.values() if pool in (None, session.pool)]

    def dead(self) -> list[Session]:
        """REAPING, WAITING, RELEASING, in order of death."""
        return list(self._dead.values())

    def num_open(self, pool: PoolName | None = None) -> int:
        """LIVE and GRACE."""
        return sum(session.state.is_open and pool in (None, session.pool) for session in self._sessions.values())

    def quarantine_reason(self, session_id: str, now_s: float) -> str:
        """Why a dead session's blocks wait; empty if they do not."""
        session = self._dead.get(session_id)
        return self._judge(session, now_s).reason if session is not None else ""

    def grace_left_s(self, session: Session, now_s: float) -> float:
        """Time left to resume; 0 unless in GRACE."""
        if session.state is not SessionState.GRACE:
            return 0.0
        return max(0.0, session.stream_ended_at_s + self.terms.grace_s - now_s)

    def unasserted(self, pool: PoolName) -> list[Session]:
        """Restored sessions that are not accounted for yet: while there are any, blocks without a record may be theirs
        and must not be handed out."""
        return [session for session in self._unasserted.values() if session.pool == pool]

    def check_invariants(self) -> None:
        """Asserts that all indexes agree and the bounds hold."""
        assert len(self._sessions) <= self.limits.max_sessions
        assert len(self._ends) <= self.limits.max_remembered_ends
        assert self._dead.keys() == {key for key, session in self._sessions.items() if not session.state.is_open}
        assert self._unasserted.keys() == {key for key, session in self._sessions.items() if session.must_reassert}
        assert not self._ends.keys() & self._sessions.keys()
        for key, session in self._sessions.items():
            session.steps.check_invariants()
            assert key == session.session_id and session.state is not SessionState.GONE
            assert (session.end_cause is None) == session.state.is_open
        assert all(session.state.is_open and session.request.key == key for key, session in self._by_request.items())
        self._tokens.check_invariants(list(self._sessions.values()))
        self.watch.check_invariants()

    # ------------------------------------------------------------------ private
    def _admit(self, request: OpenRequest, session_id: SessionId, now_s: float) -> Session:
        assert session_id not in self._sessions and session_id not in self._ends, "session ids are never reused"
        self._num_opened += 1
        session = Session(
            session_id=session_id,
            request=request,
            opened_at_s=now_s,
            order=self._num_opened,
            heard_at_s=now_s,
            stream_ended_at_s=now_s,
        )
        self._sessions[session_id] = session
        return session

    def _check_room(self, tenant: str) -> None:
        if len(self._sessions) >= self.limits.max_sessions:
            raise TooManySessions("all tenants", len(self._sessions), self.limits.max_sessions)
        if self.limits.max_sessions_per_tenant < self.limits.max_sessions:
            num_own = sum(session.request.tenant == tenant for session in self._sessions.values())
            if num_own >= self.limits.max_sessions_per_tenant:
                raise TooManySessions(f"tenant {tenant}", num_own, self.limits.max_sessions_per_tenant)

    def _opened_before(self, session: Session, now_s: float) -> Opened:
        if not session.fresh_token:
            raise InvalidField("request_id", session.request.request_id, "its session is in use: take a new one")
        session.stream_ended_at_s = now_s
        return Opened(session=session, resume_token=session.fresh_token, is_new=False)

    def _owned(self, session_id: str, epoch: int) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            end = self._ends.get(session_id)
            if end is None:
                raise UnknownSession(short_id(session_id))
            raise SessionFenced(short_id(session_id), epoch, end.epoch, f"the session ended ({end.cause.value})")
        if epoch != session.epoch:
            never = f"nobody was ever given this epoch, the newest is {session.epoch}"
            why = "the session was resumed since" if epoch < session.epoch else never
            raise SessionFenced(short_id(session_id), epoch, session.epoch, why)
        if session.end_cause is not None:
            why = f"the session ended ({session.end_cause.value})"
            raise SessionFenced(short_id(session_id), epoch, session.epoch, why)
        if session.fresh_token:
            self._tokens.arrived(session)
            session.may_reassert_again = False
        return session

    def _break(self, session: Session, now_s: float) -> None:
        self._move(session, SessionEvent.BROKEN)
        session.stream_ended_at_s = now_s

    def _end(self, session: Session, cause: EndCause, now_s: float) -> None:
        if session.state is SessionState.LIVE:
            session.stream_ended_at_s = now_s
        self._move(session, SessionEvent.ENDED)
        session.end_cause = cause
        session.ended_at_s = now_s
        self._dead[session.session_id] = session
        self._tokens.forget(session)
        self._by_request.pop(session.request.key, None)
        self._on_change(session)

    def _judge(self, session: Session, now_s: float) -> Verdict:
        facts = DeathFacts(
            ended_in_order=session.end_cause is EndCause.CLOSED,
            stream_ended_at_s=session.stream_ended_at_s,
            witnesses=self.watch.witnesses(session.pool, session.session_id, session.ended_at_s, session.request.pid),
        )
        return judge(facts, self.terms, now_s)

    def _forgive_sleep(self, now_s: float) -> None:
        last_s, self._last_expire_s = self._last_expire_s, now_s
        slept_s = now_s - last_s - self.terms.max_tick_s if last_s is not None else 0.0
        if slept_s > 0:
            for session in self._sessions.values():
                session.heard_at_s += slept_s
                session.stream_ended_at_s += slept_s

    def _move(self, session: Session, event: SessionEvent) -> None:
        session.state = after(session.state, event)


def _nobody(session: Session) -> None:
    """Who follows the sessions, if nobody does."""
