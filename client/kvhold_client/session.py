"""A session: one scheduler process's tenure on one pool. Blocking; `aio.py` has the same for asyncio.

    step(request) ─▶ number (step, part) ─▶ rpc ─▶ answer
                                       ▲     │ no answer / restarted
                                       └─ resume ◀── also when the keep-alive stream breaks

A background thread keeps the session alive. When the connection breaks, whoever notices first resumes the session
inside its grace period, and requests under way are sent again with the same (step, part): nothing is applied twice.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import grpc

from kvhold.v1 import block_pb2, session_pb2, session_pb2_grpc
from kvhold_client.calls import CallSettings, call
from kvhold_client.errors import KvholdError, PoolNotFound, ResumeRefused, SessionFenced, Unreachable
from kvhold_client.local_channel import LocalChannel
from kvhold_client.sequence_table import SequenceTable
from kvhold_client.session_core import MAX_TRIES, Credentials, Resumption, SessionCore, endless
from kvhold_client.shape import PoolShape
from kvhold_client.step import StepBuilder, decode_step
from kvhold_client.step_reply import StepReply
from kvhold_client.step_senders import StepSender, StreamSteps, UnarySteps
from kvhold_client.target import beside

RETRY_PAUSE_S = 0.05
MAX_RETRY_PAUSE_S = 1.0
RESTART_ALLOWANCE_S = 10.0  # the grace period runs only while there is a daemon: one that restarts needs its time, too


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """A request on its way, and whence its answer comes."""

    request: block_pb2.StepRequest
    used: Credentials
    answer: Callable[[], block_pb2.StepResponse]


class Session:
    """Made by `Pool.open_session`. Also a context manager, which closes it. One thread steps; any may read.

    `guard` is held while credentials change. Whoever sends a table's request and applies the answer by hand holds it
    around both, so that a resume in the background never sees a mirror between the two; `table.flush` does so itself.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        core: SessionCore,
        shape: PoolShape,
        settings: CallSettings,
        on_lost: Callable[[list[int]], None] | None = None,
        reopen_pool: Callable[[], None] | None = None,
        step_stream: bool = True,
    ) -> None:
        self.shape = shape
        self.guard = threading.RLock()
        self.table = SequenceTable(shape, send=self.step, ahead=self, guard=self.guard)
        self._flight: Flight | None = None
        self.draining = False
        self._channel = channel
        self._core = core
        self._settings = settings
        self._on_lost = on_lost
        self._reopen_pool = reopen_pool
        self._grpc_steps = StreamSteps if step_stream else UnarySteps
        self._sessions = session_pb2_grpc.SessionServiceStub(channel)
        self._dead: KvholdError | None = None
        self._closing = threading.Event()
        self._stream: Any = None
        self._sender: StepSender = self._grpc_steps(channel, settings)
        self._took(core.opened(call(self._sessions.OpenSession, core.open_request(), settings)))
        self._thread = threading.Thread(target=self._keep_alive, name="kvhold-keepalive", daemon=True)
        self._thread.start()

    # --------------------------------------------------------------------------------------------------- identity
    @property
    def session_id(self) -> str:
        """Secret: it names the session in requests. `short_id` is for people."""
        return self._core.current.session_id

    @property
    def short_id(self) -> str:
        """As `kvhold sessions` shows it."""
        return self._core.current.session_id[:8]

    @property
    def epoch(self) -> int:
        """Grows with each resume."""
        return self._core.current.epoch

    @property
    def boot_id(self) -> str:
        """The daemon's tenure that it is with: another one after the daemon restarted."""
        return self._core.current.boot_id

    @property
    def grace_period_s(self) -> float:
        """How long the daemon keeps this session for resuming after a break."""
        return self._core.current.grace_period_s

    @property
    def pool_name(self) -> str:
        """The pool it works on."""
        return self._core.pool

    # ------------------------------------------------------------------------------------------------------ steps
    def begin_step(self, completed_step: int | None = None) -> int:
        """Starts a scheduler step and returns its number.

        `completed_step`: the last step of which every kernel that writes cache has finished on all ranks. None: all
        earlier ones, for engines that run one step at a time.
        """
        step = self._core.begin_step(completed_step)
        self.table.begin_step(step, self._core.completed_step)
        return step

    def builder(self) -> StepBuilder:
        """For callers that keep no table: fill it, then `session.step(builder.encode())`."""
        return StepBuilder(self.shape.hash_size_bytes)

    def step(self, request: block_pb2.StepRequest) -> StepReply:
        """Sends one request as the next part of the current step and returns its answer, exactly once through breaks.

        Raises SessionFenced or ResumeRefused (fatal: stop using everything held), InvalidRequest (nothing applied),
        Unreachable when the daemon stays away longer than the grace period.
        """
        self._core.number(request)
        last: KvholdError | None = None
        for _ in range(MAX_TRIES):
            if self._dead is not None:
                raise self._dead
            with self.guard:
                used, sender = self._core.stamp(request), self._sender
            try:
                answer = sender.call(request)
            except KvholdError as error:
                self._recover(error, used)
                last = error
                continue
            if not self._core.is_past(used):
                return decode_step(answer)
        raise endless(last)

    def submit(self, request: block_pb2.StepRequest) -> None:
        """`step` in two halves: sends the request and returns; `collect` must follow. One at a time.

        The request must not change until then: it is sent again, under the same number, if its answer is lost.
        """
        assert self._flight is None, "collect the answer of the last one first"
        self._core.number(request)
        self._flight = self._launch(request)

    def collect(self) -> StepReply:
        """The answer to what was submitted. Raises what `step` does."""
        flight, self._flight = self._flight, None
        assert flight is not None, "nothing was submitted"
        last: KvholdError | None = None
        for _ in range(MAX_TRIES):
            if self._dead is not None:
                raise self._dead
            try:
                answer = flight.answer()
                if not self._core.is_past(flight.used):
                    return decode_step(answer)
            except KvholdError as error:
                self._recover(error, flight.used)
                last = error
            flight = self._launch(flight.request)
        raise endless(last)

    def _launch(self, request: block_pb2.StepRequest) -> Flight:
        """Sends; a connection that is found broken is dealt with by whoever wants the answer."""
        with self.guard:
            used, sender = self._core.stamp(request), self._sender
        try:
            sender.send(request)
        except Unreachable as error:
            return Flight(request=request, used=used, answer=partial(_raise, error))
        return Flight(request=request, used=used, answer=sender.receive)

    def idle(self) -> None:
        """Says what is still unsaid before a pause (R8): frees, draws, and steps that are complete meanwhile."""
        self.begin_step()
        if self.table.has_drawn:  # what they fill belongs to the step that tells of them; the next one completes it
            self.table.flush(force=True)
            self.begin_step()
        self.table.flush(force=True)

    # ------------------------------------------------------------------------------------------- staying connected
    def _recover(self, error: KvholdError, used: Credentials) -> None:
        """Makes a request that failed with `error` worth sending again, by a resume; raises if none can help."""
        if not self._core.may_recover(error, used):
            raise self._died(error) if error.is_fatal else error from None
        self._resume(used)

    def _died(self, error: KvholdError) -> KvholdError:
        self._dead = self._dead or error
        self._closing.set()
        return self._dead

    def _resume(self, used: Credentials) -> None:
        """Resumes, unless somebody did since `used`. Raises what ended the session."""
        with self.guard:
            if self._dead is not None:
                raise self._dead
            if self._core.current is not used:
                return
            deadline = time.monotonic() + used.grace_period_s + RESTART_ALLOWANCE_S
            pause = RETRY_PAUSE_S
            while True:
                try:
                    self._try_to_resume()
                    return
                except KvholdError as error:
                    if isinstance(error, ResumeRefused | SessionFenced):
                        raise self._died(error) from None
                    if self._closing.is_set() or time.monotonic() + pause > deadline:
                        raise Unreachable(f"the session could not be resumed: {error}") from error
                self._closing.wait(pause)
                pause = min(pause * 2, MAX_RETRY_PAUSE_S)

    @property
    def transport(self) -> str:
        """What steps travel over: "local", "grpc" (a stream), or "grpc-unary" where the daemon has no stream."""
        return self._sender.transport

    def _make_sender(self, credentials: Credentials) -> StepSender:
        """The local transport, if it is offered and within reach; else gRPC."""
        if credentials.local_socket_path:
            path = beside(self._settings.target, credentials.local_socket_path)
            try:
                return LocalChannel(path, credentials.local_token, timeout_s=self._settings.timeout_s)
            except Unreachable:
                pass
        return self._grpc_steps(self._channel, self._settings)

    def _try_to_resume(self) -> None:
        request = self._core.resume_request(self.table.held_sequences())
        try:
            response = call(self._sessions.OpenSession, request, self._settings)
        except PoolNotFound:  # the daemon restarted, and nobody has opened the pool since
            if self._reopen_pool is None:
                raise
            self._reopen_pool()
            response = call(self._sessions.OpenSession, request, self._settings)
        self._took(self._core.opened(response))

    def _took(self, resumption: Resumption) -> None:
        self._sender.abort()  # its thread may be waiting in it: that one closes it
        self._sender = self._make_sender(resumption.credentials)
        if resumption.daemon_restarted:
            lost = self.table.lose(resumption.lost_sequence_ids)
            if lost and self._on_lost is not None:
                self._on_lost([sequence.sequence_id for sequence in lost])

    def _beats(self, used: Credentials) -> Iterator[session_pb2.KeepAliveRequest]:
        beat = session_pb2.KeepAliveRequest(session_id=used.session_id, epoch=used.epoch)
        pause_s = min(used.lease_ttl_s / 3, self._settings.timeout_s)
        while not self._closing.is_set() and self._core.credentials is used:
            yield beat
            self._closing.wait(pause_s)
            self._sender.give_up_late()

    def _keep_alive(self) -> None:
        """Body of the background thread: one stream per set of credentials."""
        while not self._closing.is_set():
            used = self._core.credentials
            if used is None:
                return
            try:
                self._listen(used)
            except (KvholdError, grpc.RpcError):
                if self._closing.is_set():
                    return
            try:
                with self._guard_in_time():
                    self._resume(used)
            except KvholdError as error:
                if error.is_fatal:
                    return
                self._closing.wait(RETRY_PAUSE_S)

    @contextmanager
    def _guard_in_time(self) -> Iterator[None]:
        """The guard, for the background thread. Its holder may be waiting for an answer: no longer than allowed."""
        while not self.guard.acquire(timeout=self._settings.timeout_s):
            self._sender.give_up_late()
        try:
            yield
        finally:
            self.guard.release()

    def _listen(self, used: Credentials) -> None:
        self._stream = self._sessions.KeepAlive(self._beats(used))
        for answer in self._stream:
            self.draining = answer.draining

    # ----------------------------------------------------------------------------------------------------- the end
    def close(self) -> None:
        """Ends the session in order: what it holds is released, what it completed stays cached. Idempotent."""
        with self.guard:
            if self._core.credentials is None:
                return
            self._closing.set()
            may_close = self._dead is None and self._tell_what_was_drawn()
            used, self._core.credentials = self._core.credentials, None
        try:
            if may_close:
                request = session_pb2.CloseSessionRequest(
                    session_id=used.session_id, epoch=used.epoch, completed_step=self._core.completed_sent_step
                )
                call(self._sessions.CloseSession, request, self._settings)
        except (Unreachable, SessionFenced):
            pass  # it is gone, or goes by itself
        finally:
            if self._stream is not None:
                self._stream.cancel()
            self._thread.join(timeout=2.0)
            self._sender.close()

    def _tell_what_was_drawn(self) -> bool:
        """So that it is published, or not reused while kernels write to it, and the rest stays cached.

        Tried once: whoever closes does not wait for a daemon. False: it was not told, so that only the grace period may
        end the session.
        """
        try:
            request = self.table.plan_step(force=True) if self.table.has_drawn else None
            if request is not None:
                self._core.number_last(request, self.table.last_drawn_step)
                self._core.stamp(request)
                self.table.apply(decode_step(self._sender.call(request)))
        except KvholdError:
            return False
        return True

    def abandon(self) -> None:
        """Drops the connection without a word, as a crash would: the daemon's grace period begins. For tests."""
        self._closing.set()
        if self._stream is not None:
            self._stream.cancel()
        self._thread.join(timeout=2.0)
        with self.guard:
            self._core.credentials = None
            self._sender.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _raise(error: KvholdError) -> block_pb2.StepResponse:
    raise error
