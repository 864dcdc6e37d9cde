"""All sessions of a daemon: opening, resuming, fencing, expiry, and the way of the dead.

Time and secrets are arguments. Every mutating RPC begins with `require`, which knows three answers: yours, fenced, unknown.
The shell drives it with four things: RPCs, stream events, a timer (`expire` at `next_deadline_s`), and the progress of the
pool's cleaning (`reaped`, `try_release`, `released`).
"""

from dataclasses import dataclass

from kvhold_server.domain.ids import Epoch, PoolName, SessionId
from kvhold_server.sessions.lease import LeaseTerms
from kvhold_server.sessions.quarantine import Verdict
from kvhold_server.sessions.session import Credentials, EndCause, OpenRequest, Session, StreamId
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
    must_reassert: bool = False  # a resume after a restart: apply what the client says it holds, then `reasserted`


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredSession:
    """A session of the daemon's former tenure, from its records."""

    session_id: SessionId
    pool: PoolName
    client_name: str
    tenant: str
    pid: int
    epoch: Epoch
    token_digest: bytes


class SessionTable:
    """Mutable; owned by one thread. O(1) per RPC; `expire` and lists are O(sessions), which are bounded."""

    def __init__(
        self,
        *,
        boot_id: str = "",
        terms: LeaseTerms | None = None,
        limits: SessionLimits | None = None,
        watch: WorkerWatch | None = None,
    ) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ clients
    def open(self, request: OpenRequest, credentials: Credentials, now_s: float) -> Opened:
        """Opens a session in GRACE (its stream must follow), or returns the one of the same `request_id`.

        Raises InvalidField (lengths; a request_id whose session is in use), TooManySessions.
        """
        raise NotImplementedError

    def resume(self, pool: PoolName, token: str, credentials: Credentials, now_s: float) -> Opened:
        """Starts the next epoch of a session and replaces its token; the old epoch is fenced from now on.

        The old token stays good until the new epoch is used, so that a lost answer does not lose the session.
        Raises ResumeRefused.
        """
        raise NotImplementedError

    def reasserted(self, session_id: SessionId) -> None:
        """What a restored session's client holds was applied."""
        raise NotImplementedError

    def restore(self, restored: RestoredSession, now_s: float) -> Session:
        """At start: a session of the former tenure may be resumed within grace. Raises TooManySessions."""
        raise NotImplementedError

    def require(self, session_id: str, epoch: int) -> Session:
        """The caller's open session. Raises UnknownSession, SessionFenced, BootIdMismatch (restored, not re-asserted)."""
        raise NotImplementedError

    def close(self, session_id: str, epoch: int, completed_step: int, now_s: float) -> Session | None:
        """Ends it for its client; None if it is gone already. `end_cause` says whether all steps were complete: only
        then may the pool publish and free everything at once. Raises SessionFenced, StepOutOfOrder."""
        raise NotImplementedError

    # ------------------------------------------------------------------ streams
    def attach_stream(self, session_id: str, epoch: int, now_s: float) -> StreamId:
        """A KeepAlive stream is up; it replaces an older one. Raises as `require` (a restored session may attach)."""
        raise NotImplementedError

    def keepalive(self, session_id: str, epoch: int, now_s: float) -> Session:
        """A message arrived on the stream. Raises UnknownSession, SessionFenced."""
        raise NotImplementedError

    def stream_broken(self, session_id: str, stream: StreamId, now_s: float) -> None:
        """Starts the grace period, unless a newer stream has taken over or the session has ended."""
        raise NotImplementedError

    # ------------------------------------------------------------------ deaths
    def expire(self, now_s: float) -> list[Session]:
        """Ends sessions whose grace is over (and first turns silent streams into broken ones). Returns those to reap."""
        raise NotImplementedError

    def kill(self, session_id: str, now_s: float) -> Session | None:
        """The daemon ends it: pool deleted by force, drain deadline passed. None if it has ended already."""
        raise NotImplementedError

    def reaped(self, session_id: str) -> None:
        """The pool has dropped its provisional hashes: REAPING → WAITING."""
        raise NotImplementedError

    def try_release(self, session_id: str, now_s: float) -> Verdict:
        """Asks whether a WAITING session's blocks may go; if so, WAITING → RELEASING."""
        raise NotImplementedError

    def released(self, session_id: str) -> None:
        """The pool has freed its blocks: RELEASING → GONE; the session is forgotten but for its fence."""
        raise NotImplementedError

    def next_deadline_s(self, now_s: float) -> float | None:
        """When `expire` or `try_release` may have something to do; None: nothing is due ever."""
        raise NotImplementedError

    # ------------------------------------------------------------------ questions
    def sessions(self, pool: PoolName | None = None) -> list[Session]:
        """Open and dead-but-waiting, in order of opening."""
        raise NotImplementedError

    def dead(self) -> list[Session]:
        """REAPING, WAITING, RELEASING, in order of opening."""
        raise NotImplementedError

    def num_open(self, pool: PoolName | None = None) -> int:
        """LIVE and GRACE."""
        raise NotImplementedError

    def quarantine_reason(self, session_id: str, now_s: float) -> str:
        """Why a dead session's blocks wait; empty if they do not."""
        raise NotImplementedError

    def grace_left_s(self, session: Session, now_s: float) -> float:
        """Time left to resume; 0 unless in GRACE."""
        raise NotImplementedError

    def unasserted(self, pool: PoolName) -> list[Session]:
        """Restored sessions that are not accounted for yet: while there are any, blocks without a record may be theirs
        and must not be handed out."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Asserts that all indexes agree and the bounds hold."""
        raise NotImplementedError
