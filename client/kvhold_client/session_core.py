"""What a session must remember and decide, without any transport: credentials, numbering, and what to do on an error.

                 ┌──────────── resumed (new epoch) ◀──────────┐
    open ─▶ LIVE ┤ rpc failed: no answer, fenced by our own    ├─ resume ─▶ refused ─▶ dead (ResumeRefused)
                 │ older epoch, other boot id, unknown session │
                 └─────────────────────────────────────────────┘

Exactly once: a request keeps its (step, part) through every retry; the daemon answers a pair that it has applied with
the first answer. That pair is its only way to tell a retry from a second wish: it is never reused for other contents.

    former daemon   applies step 7 ─▶ answers ── killed            the answer waits, unread
    resume          what is held, as of step 6 ─▶ its successor
    client          reads the answer: a former daemon's ─▶ sends step 7 again, which the successor applies once
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvhold.v1 import block_pb2, session_pb2
from kvhold_client.errors import BootIdMismatch, Draining, KvholdError, SessionFenced, UnknownSession, Unreachable
from kvhold_client.sequence import HeldSequence

MAX_PARTS = 1024  # of one step; the contract's bound
MAX_TRIES = 64  # of one request, each with a resume in between that went well


def endless(error: KvholdError | None) -> Unreachable:
    """The connection breaks each time with this request, and with nothing else."""
    return Unreachable(f"{MAX_TRIES} times there was no answer to this request, though the session resumed: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What OpenSession gave; replaced as a whole by each resume."""

    session_id: str
    epoch: int
    resume_token: str
    boot_id: str
    lease_ttl_s: float
    grace_period_s: float
    local_socket_path: str = ""  # of the local transport, if it was asked for and is offered
    local_token: bytes = b""  # opens one connection there


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """How a session came back. After a daemon's restart some sequences may be lost: preempt and admit them again."""

    credentials: Credentials
    daemon_restarted: bool
    lost_sequence_ids: tuple[int, ...]


class SessionCore:
    """State of one session. Not thread-safe: the owner guards it."""

    def __init__(
        self, *, pool: str, client_name: str, tenant: str, request_id: str, pid: int, local: bool = False
    ) -> None:
        self.pool = pool
        self.client_name = client_name
        self.tenant = tenant
        self.request_id = request_id
        self.pid = pid
        self.local = local
        self.credentials: Credentials | None = None
        self.step = 0
        self.sent_step = 0  # last step that the daemon was told of: silent ones may have followed
        self.part = -1  # of the last request of this step
        self.completed_step = 0

    def open_request(self) -> session_pb2.OpenSessionRequest:
        """Opens a new session; repeated with the same request id it returns the same one."""
        return session_pb2.OpenSessionRequest(
            pool=self.pool,
            client_name=self.client_name,
            tenant=self.tenant,
            request_id=self.request_id,
            pid=self.pid,
            want_local_transport=self.local,
        )

    def resume_request(self, held: Iterable[HeldSequence]) -> session_pb2.OpenSessionRequest:
        """Takes the session up again. What is held matters only if the daemon restarted."""
        request = self.open_request()
        request.request_id = ""
        request.resume_token = self.current.resume_token
        for sequence in held:
            request.held.add(
                sequence_id=sequence.sequence_id,
                num_tokens=sequence.num_tokens,
                num_prompt_tokens=sequence.num_prompt_tokens,
                publish_tokens=sequence.publish_tokens,
                num_blocks=[len(table) for table in sequence.tables],
                block_ids=[block for table in sequence.tables for block in table],
                hashes=sequence.hashes,
            )
        return request

    @property
    def current(self) -> Credentials:
        """Raises SessionFenced before opening and after closing."""
        if self.credentials is None:
            raise SessionFenced("the session is closed", reason="SESSION_CLOSED")
        return self.credentials

    def opened(self, response: session_pb2.OpenSessionResponse) -> Resumption:
        """Takes new credentials."""
        ttl, grace = response.lease_ttl, response.grace_period
        self.credentials = Credentials(
            session_id=response.session_id,
            epoch=response.epoch,
            resume_token=response.resume_token,
            boot_id=response.boot_id,
            lease_ttl_s=ttl.seconds + ttl.nanos / 1e9,
            grace_period_s=grace.seconds + grace.nanos / 1e9,
            local_socket_path=response.local_transport.socket_path,
            local_token=response.local_transport.token,
        )
        return Resumption(
            credentials=self.credentials,
            daemon_restarted=response.outcome == session_pb2.OPEN_SESSION_OUTCOME_REASSERTED,
            lost_sequence_ids=tuple(response.lost_sequence_ids),
        )

    def begin_step(self, completed_step: int | None) -> int:
        """Returns the new step's number. `completed_step` None: every earlier step is complete."""
        self.step += 1
        self.part = -1
        completed = self.step - 1 if completed_step is None else completed_step
        if not self.completed_step <= completed < self.step:
            raise ValueError(f"completed_step {completed} must be {self.completed_step}..{self.step - 1}")
        self.completed_step = completed
        return self.step

    @property
    def completed_sent_step(self) -> int:
        """The last completed step that the daemon has heard of: what may be said when closing."""
        return min(self.completed_step, self.sent_step)

    def number_last(self, request: block_pb2.StepRequest, last_drawn_step: int) -> None:
        """As `number`, before the end. A step in which nothing was drawn or said launched nothing: it is complete."""
        if last_drawn_step < self.step and self.sent_step < self.step:
            self.completed_step = self.step
        self.number(request)

    def number(self, request: block_pb2.StepRequest) -> None:
        """Gives the request its (step, part), once; retries keep it."""
        if self.step < 1:
            raise ValueError("begin_step comes before the first request")
        if self.part + 1 >= MAX_PARTS:
            raise ValueError(f"a step has at most {MAX_PARTS} requests")
        self.part += 1
        request.step, request.part, request.completed_step = self.step, self.part, self.completed_step
        self.sent_step = self.step

    def stamp(self, request: block_pb2.StepRequest) -> Credentials:
        """Fills in the credentials of now: those change when a retry follows a resume."""
        now = self.current
        request.session_id, request.epoch, request.boot_id = now.session_id, now.epoch, now.boot_id
        return now

    def is_past(self, used: Credentials) -> bool:
        """Whether the answer to a request with `used` comes too late: its daemon is a former one, and the successor was
        told what is held, without this step.
        """
        return self.credentials is not None and used.boot_id != self.credentials.boot_id

    def may_recover(self, error: KvholdError, used: Credentials) -> bool:
        """Can a resume, or one that somebody else already made, help a request that was sent with `used`?"""
        if error.is_fatal:
            # Fenced by our own resume, in another thread, while the request was under way.
            return isinstance(error, SessionFenced) and used is not self.credentials and self.credentials is not None
        return isinstance(error, Unreachable | UnknownSession | BootIdMismatch | Draining)
