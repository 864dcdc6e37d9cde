"""One client process's tenure on one pool: who it is, where it is in its life, and what it already did."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.ids import Epoch, PoolName, SessionId
from kvhold_server.sessions.lease import SessionState
from kvhold_server.sessions.step_log import StepLog

StreamId = NewType("StreamId", int)  # counts the KeepAlive streams of one session
NO_STREAM = StreamId(0)
NO_SLOT = -1
FIRST_EPOCH = Epoch(1)

SHORT_ID_LENGTH = 8
MAX_CLIENT_NAME_LENGTH = 128
MAX_TENANT_LENGTH = 64
MAX_REQUEST_ID_LENGTH = 64

RequestKey = tuple[PoolName, str, str, str]


class EndCause(Enum):
    """Why a session ended. The value is also the word in metrics and logs."""

    CLOSED = "closed"  # by its client, every step complete: nothing can write to its blocks any more
    CLOSED_EARLY = "closed_early"  # by its client, with steps still running: as if it had died
    EXPIRED = "expired"  # its grace period ran out
    DIED = "died"  # its client's process is proven gone: nobody can come back
    KILLED = "killed"  # by the daemon: pool deleted, drain deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Fresh secrets for one open or resume, made by the shell (the core has no randomness)."""

    session_id: SessionId  # used if a session is opened, not if one is resumed
    resume_token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Who wants a session."""

    pool: PoolName
    client_name: str = ""
    tenant: str = "default"
    request_id: str = ""  # empty: every call opens a new session
    pid: int = 0  # a hint; 0: not said

    @property
    def key(self) -> RequestKey:
        """Equal for an open and its retry."""
        return self.pool, self.tenant, self.client_name, self.request_id

    def check(self) -> None:
        """Raises InvalidField."""
        bounds = (
            ("client_name", self.client_name, 0, MAX_CLIENT_NAME_LENGTH),
            ("tenant", self.tenant, 1, MAX_TENANT_LENGTH),
            ("request_id", self.request_id, 0, MAX_REQUEST_ID_LENGTH),
        )
        for name, value, low, high in bounds:
            if not low <= len(value) <= high:
                raise InvalidField(name, value[:high], f"must have {low}..{high} characters")
            if any(character < " " for character in value):  # six bytes each in a record of bounded size; and for logs
                raise InvalidField(name, value, "must not have control characters")
        if not 0 <= self.pid < 2**31:
            raise InvalidField("pid", self.pid, "must be 0..2147483647")


@dataclass(slots=True, kw_only=True)
class Session:
    """Mutable; only SessionTable changes what is not marked."""

    session_id: SessionId = field(repr=False)
    request: OpenRequest
    opened_at_s: float
    order: int  # of opening, for lists
    state: SessionState = SessionState.GRACE
    epoch: Epoch = FIRST_EPOCH
    steps: StepLog = field(default_factory=StepLog)  # the node's to use
    asked: object = field(default=None, repr=False)  # the node's: what its newest step was, to know a retry of it
    num_lookahead_blocks: int = 0  # the node's: given by its newest step while the one before was still computing
    slot: int = NO_SLOT  # the node's to set: the session's number inside its pool
    stream: StreamId = NO_STREAM  # the newest one
    heard_at_s: float  # last sign of life on the stream
    stream_ended_at_s: float  # while not LIVE: since when it has been without a stream
    ended_at_s: float = 0.0  # once dead
    end_cause: EndCause | None = None
    was_restored: bool = False  # a former daemon opened it: this one has not seen its earlier steps
    must_reassert: bool = False  # restored after a restart: its client has not yet said what it holds
    may_reassert_again: bool = False  # it said so, and was not heard since: the answer may be lost
    is_outdated: bool = False  # the node's to set: it may hold sequences of contents that were replaced
    token_digest: bytes = field(default=b"", repr=False)
    previous_token_digest: bytes = field(default=b"", repr=False)  # good until the newest one is known to have arrived
    fresh_token: str = field(default="", repr=False)  # kept only until the client uses the session: for a retried open

    @property
    def pool(self) -> PoolName:
        """The pool it works on."""
        return self.request.pool

    @property
    def short_id(self) -> str:
        """Enough to tell sessions apart in logs, too little to act for one."""
        return short_id(self.session_id)


def short_id(session_id: str) -> str:
    """First characters of a session id."""
    return session_id[:SHORT_ID_LENGTH]
