"""The same client for asyncio: AsyncClient, AsyncPool, AsyncSession. `client.py` and `session.py` say what they mean.

async with AsyncClient() as client:
    pool = await client.open_pool(request)
    async with await pool.open_session() as session:
        session.begin_step()
        …
        outcome = await session.flush(token_budget=8192)
"""

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from types import TracebackType

import grpc
import grpc.aio

from kvhold.v1 import (
    block_pb2,
    plan_pb2,
    plan_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from kvhold_client.aio_steps import AsyncSteps
from kvhold_client.calls import CallSettings, aio_call
from kvhold_client.channels import open_aio_channel
from kvhold_client.codec import decode_capabilities, decode_plan_response, decode_session_info
from kvhold_client.errors import KvholdError, PoolNotFound, ResumeRefused, SessionFenced, Unreachable
from kvhold_client.plan import Plan
from kvhold_client.pools import PoolInfo, PoolRequest, decode_pool
from kvhold_client.results import Capabilities, SessionInfo
from kvhold_client.sequence_table import SequenceTable
from kvhold_client.session import MAX_RETRY_PAUSE_S, RESTART_ALLOWANCE_S, RETRY_PAUSE_S
from kvhold_client.session_core import MAX_TRIES, Credentials, Resumption, SessionCore, endless
from kvhold_client.shape import PoolShape
from kvhold_client.step import decode_step
from kvhold_client.step_outcome import StepOutcome
from kvhold_client.step_reply import StepReply
from kvhold_client.target import default_target, normal_target


class AsyncClient:
    """One connection to one daemon, for one event loop."""

    def __init__(self, target: str | None = None, *, timeout_s: float = 30.0) -> None:
        self.target = default_target() if target is None else normal_target(target)
        self._settings = CallSettings(target=self.target, timeout_s=timeout_s)
        self._channel = open_aio_channel(self.target)

    async def capabilities(self) -> Capabilities:
        """What the daemon can do, and its bounds."""
        stub = plan_pb2_grpc.PlanServiceStub(self._channel)
        request = plan_pb2.GetCapabilitiesRequest()
        return decode_capabilities(await aio_call(stub.GetCapabilities, request, self._settings))

    async def plan(self, request: plan_pb2.PlanRequest) -> Plan:
        """Plans without allocating anything."""
        stub = plan_pb2_grpc.PlanServiceStub(self._channel)
        return decode_plan_response(await aio_call(stub.Plan, request, self._settings))

    async def open_pool(self, request: PoolRequest) -> "AsyncPool":
        """Makes the pool or attaches to it."""
        message = request.message()
        response = await self._open_pool(message)
        return AsyncPool(self, decode_pool(response.pool, response.outcome, response.recovery), opened_with=message)

    async def _open_pool(self, message: pool_pb2.OpenPoolRequest) -> pool_pb2.OpenPoolResponse:
        stub = pool_pb2_grpc.PoolServiceStub(self._channel)
        return await aio_call(stub.OpenPool, message, self._settings)

    async def get_pool(self, name: str) -> "AsyncPool":
        """Attaches to a pool that somebody opened. Raises PoolNotFound."""
        stub = pool_pb2_grpc.PoolServiceStub(self._channel)
        response = await aio_call(stub.GetPool, pool_pb2.GetPoolRequest(name=name), self._settings)
        return AsyncPool(self, decode_pool(response.pool))

    async def list_sessions(self, pool: str = "") -> list[SessionInfo]:
        """Sessions of a pool, or of all."""
        stub = session_pb2_grpc.SessionServiceStub(self._channel)
        response = await aio_call(stub.ListSessions, session_pb2.ListSessionsRequest(pool=pool), self._settings)
        return [decode_session_info(session) for session in response.sessions]

    async def close(self) -> None:
        """Closes the connection; sessions first."""
        await self._channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncPool:
    """An open pool."""

    def __init__(
        self, client: AsyncClient, info: PoolInfo, opened_with: pool_pb2.OpenPoolRequest | None = None
    ) -> None:
        self.info = info
        self._client = client
        self._opened_with = opened_with

    @property
    def name(self) -> str:
        """Its name."""
        return self.info.name

    async def open_session(
        self,
        *,
        client_name: str = "",
        tenant: str = "",
        on_lost: Callable[[list[int]], None] | None = None,
    ) -> "AsyncSession":
        """Opens a session and keeps it alive in a background task."""
        core = SessionCore(
            pool=self.name,
            client_name=client_name or f"pid-{os.getpid()}",
            tenant=tenant,
            request_id=uuid.uuid4().hex,
            pid=os.getpid(),
        )
        session = AsyncSession(self._client, core, self.info.shape, on_lost, self._opened_with)
        await session._open()
        return session


class AsyncSession:
    """A session for one event loop; steps are sent one after the other."""

    def __init__(
        self,
        client: AsyncClient,
        core: SessionCore,
        shape: PoolShape,
        on_lost: Callable[[list[int]], None] | None,
        opened_with: pool_pb2.OpenPoolRequest | None = None,
    ) -> None:
        self._client = client
        self._opened_with = opened_with
        self.shape = shape
        self.table = SequenceTable(shape)
        self.draining = False
        self._core = core
        self._settings = client._settings
        self._on_lost = on_lost
        self._steps = AsyncSteps(client._channel, self._settings)
        self._sessions = session_pb2_grpc.SessionServiceStub(client._channel)
        self._lock = asyncio.Lock()
        self._dead: KvholdError | None = None
        self._task: asyncio.Task[None] | None = None

    async def _open(self) -> None:
        self._core.opened(await aio_call(self._sessions.OpenSession, self._core.open_request(), self._settings))
        self._task = asyncio.create_task(self._keep_alive(), name="kvhold-keepalive")

    @property
    def session_id(self) -> str:
        """Secret."""
        return self._core.current.session_id

    @property
    def epoch(self) -> int:
        """Grows with each resume."""
        return self._core.current.epoch

    def begin_step(self, completed_step: int | None = None) -> int:
        """As Session.begin_step."""
        step = self._core.begin_step(completed_step)
        self.table.begin_step(step, self._core.completed_step)
        return step

    async def step(self, request: block_pb2.StepRequest) -> StepReply:
        """As Session.step: exactly once."""
        self._core.number(request)
        last: KvholdError | None = None
        for _ in range(MAX_TRIES):
            if self._dead is not None:
                raise self._dead
            used, steps = self._core.stamp(request), self._steps
            try:
                answer = await steps.call(request)
            except KvholdError as error:
                if not self._core.may_recover(error, used):
                    raise self._died(error) if error.is_fatal else error from None
                await self._resume(used)
                last = error
                continue
            async with self._lock:  # a resume under way has said what the table holds, without this step
                if not self._core.is_past(used):
                    return decode_step(answer)
        raise endless(last)

    async def flush(self, *, token_budget: int = 0, force: bool = False) -> StepOutcome:
        """The table's queue: planned, sent, applied."""
        request = self.table.plan_step(token_budget=token_budget, force=force)
        return self.table.take_known() if request is None else self.table.apply(await self.step(request))

    async def idle(self) -> None:
        """As Session.idle."""
        self.begin_step()
        if self.table.has_drawn:
            await self.flush(force=True)
            self.begin_step()
        await self.flush(force=True)

    def _died(self, error: KvholdError) -> KvholdError:
        self._dead = self._dead or error
        return self._dead

    async def _resume(self, used: Credentials) -> None:
        async with self._lock:
            if self._dead is not None:
                raise self._dead
            if self._core.current is not used:
                return
            deadline = time.monotonic() + used.grace_period_s + RESTART_ALLOWANCE_S
            pause = RETRY_PAUSE_S
            while True:
                try:
                    took = await self._try_to_resume()
                    break
                except KvholdError as error:
                    if isinstance(error, ResumeRefused | SessionFenced):
                        raise self._died(error) from None
                    if time.monotonic() + pause > deadline:
                        text = f"the session could not be resumed: {error}"
                        raise Unreachable(text) from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, MAX_RETRY_PAUSE_S)
            self._steps.abort()  # somebody may be waiting in it
            self._steps = AsyncSteps(self._client._channel, self._settings)
            lost = self.table.lose(took.lost_sequence_ids) if took.daemon_restarted else []
            if lost and self._on_lost is not None:
                self._on_lost([sequence.sequence_id for sequence in lost])

    async def _try_to_resume(self) -> Resumption:
        request = self._core.resume_request(self.table.held_sequences())
        try:
            return self._core.opened(await aio_call(self._sessions.OpenSession, request, self._settings))
        except PoolNotFound:  # the daemon restarted, and nobody has opened the pool since
            if self._opened_with is None:
                raise
            await self._client._open_pool(self._opened_with)
            return self._core.opened(await aio_call(self._sessions.OpenSession, request, self._settings))

    async def _beats(self, used: Credentials) -> AsyncIterator[session_pb2.KeepAliveRequest]:
        beat = session_pb2.KeepAliveRequest(session_id=used.session_id, epoch=used.epoch)
        while self._core.credentials is used:
            yield beat
            await asyncio.sleep(used.lease_ttl_s / 3)

    async def _keep_alive(self) -> None:
        """Body of the background task: one stream per set of credentials."""
        while (used := self._core.credentials) is not None and self._dead is None:
            try:
                async for answer in self._sessions.KeepAlive(self._beats(used)):
                    self.draining = answer.draining
            except grpc.aio.AioRpcError:
                pass  # whatever broke it, resuming finds out what it means
            try:
                if self._core.credentials is used:
                    await self._resume(used)
            except KvholdError as error:
                if error.is_fatal:
                    return
                await asyncio.sleep(RETRY_PAUSE_S)

    async def close(self) -> None:
        """Ends the session in order. Idempotent."""
        if self._core.credentials is None:
            return
        may_close = self._dead is None and await self._tell_what_was_drawn()
        used, self._core.credentials = self._core.credentials, None
        if used is None:
            return
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._steps.close()
        request = session_pb2.CloseSessionRequest(
            session_id=used.session_id, epoch=used.epoch, completed_step=self._core.completed_sent_step
        )
        try:
            if may_close:
                await aio_call(self._sessions.CloseSession, request, self._settings)
        except (Unreachable, SessionFenced):
            pass  # it is gone, or goes by itself

    async def _tell_what_was_drawn(self) -> bool:
        """As Session does, before it closes."""
        try:
            request = self.table.plan_step(force=True) if self.table.has_drawn else None
            if request is not None:
                self._core.number_last(request, self.table.last_drawn_step)
                self._core.stamp(request)
                self.table.apply(decode_step(await self._steps.call(request)))
        except KvholdError:
            return False
        return True

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
