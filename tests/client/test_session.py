"""Sessions against a small daemon made for the purpose: what is resent, what is resumed, what is fatal."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from kvhold.v1 import block_pb2, block_pb2_grpc, session_pb2, session_pb2_grpc
from kvhold_client.aio import AsyncClient, AsyncSession
from kvhold_client.calls import CallSettings
from kvhold_client.errors import InvalidField, ResumeRefused, SessionFenced, Unreachable
from kvhold_client.session import Session
from kvhold_client.session_core import SessionCore
from kvhold_client.shape import GroupShape, PoolShape

SHAPE = PoolShape(
    groups=(GroupShape(kind="full_attention", block_size_tokens=16),), hash_size_bytes=32, hash_block_size_tokens=16
)


def error_info(reason: str, **metadata: str) -> bytes:
    """grpc-status-details-bin with an ErrorInfo, written by hand: lengths below 128 are one byte."""

    def field(number: int, content: bytes) -> bytes:
        assert len(content) < 128
        return bytes([number << 3 | 2, len(content)]) + content

    info = field(1, reason.encode()) + field(2, b"kvhold.v1")
    for key, value in metadata.items():
        info += field(3, field(1, key.encode()) + field(2, value.encode()))
    any_message = field(1, b"type.googleapis.com/google.rpc.ErrorInfo") + field(2, info)
    status = b"\x08\x09" + field(2, b"text")
    return status + bytes([3 << 3 | 2, len(any_message) & 0x7F | 0x80, len(any_message) >> 7]) + any_message


class ScriptedDaemon(block_pb2_grpc.BlockServiceServicer, session_pb2_grpc.SessionServiceServicer):
    """Applies each (step, part) once, and fails as it is told to: `faults` are consumed one per Step call."""

    def __init__(self) -> None:
        self.boot_id = "boot"
        self.epoch = 0
        self.applied: list[tuple[int, int]] = []
        self.seen: list[tuple[int, int, int]] = []  # (epoch, step, part) of every Step call
        self.faults: list[str] = []
        self.resume_refused = False
        self.num_resumes = 0
        self.beats = 0
        self.closed = threading.Event()
        self.woken = threading.Event()
        self.resuming = threading.Event()

    def OpenSession(self, request, context):  # type: ignore[no-untyped-def]
        if request.resume_token:
            self.num_resumes += 1
            if self.resume_refused:
                self._fail(context, grpc.StatusCode.FAILED_PRECONDITION, "RESUME_REFUSED")
            assert request.resume_token == f"token-{self.epoch}"
            if self.boot_id == "next boot":
                self.resuming.set()
                time.sleep(0.3)  # meanwhile the former one's answer arrives
        self.epoch += 1
        response = session_pb2.OpenSessionResponse(
            boot_id=self.boot_id, session_id="session", epoch=self.epoch, resume_token=f"token-{self.epoch}"
        )
        response.lease_ttl.FromMilliseconds(300)
        response.grace_period.FromMilliseconds(1000)
        response.outcome = (
            session_pb2.OPEN_SESSION_OUTCOME_RESUMED
            if request.resume_token
            else session_pb2.OPEN_SESSION_OUTCOME_OPENED
        )
        return response

    def KeepAlive(self, requests, context):  # type: ignore[no-untyped-def]
        boot_id = self.boot_id
        for request in requests:
            if boot_id != self.boot_id:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the former daemon is gone")
            if request.epoch != self.epoch:
                self._fail(context, grpc.StatusCode.FAILED_PRECONDITION, "SESSION_FENCED")
            self.beats += 1
            yield session_pb2.KeepAliveResponse(boot_id="boot")

    def CloseSession(self, request, context):  # type: ignore[no-untyped-def]
        self.closed.set()
        return session_pb2.CloseSessionResponse(boot_id="boot")

    def Step(self, request, context):  # type: ignore[no-untyped-def]
        self.seen.append((request.epoch, request.step, request.part))
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "fenced":
            self._fail(context, grpc.StatusCode.FAILED_PRECONDITION, "SESSION_FENCED")
        if fault == "invalid":
            self._fail(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", field="extend.slots_needed")
        replayed = (request.step, request.part) in self.applied
        if not replayed:
            self.applied.append((request.step, request.part))
        if fault == "restarts":
            self.boot_id, self.applied = "next boot", []
            self.resuming.wait(10)
            return block_pb2.StepResponse(boot_id="boot")
        if fault == "hangs":
            self.woken.wait(10)
        if fault == "lost answer":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return block_pb2.StepResponse(boot_id=self.boot_id, replayed=replayed)

    def _fail(self, context, code, reason, **metadata):  # type: ignore[no-untyped-def]
        context.set_trailing_metadata((("grpc-status-details-bin", error_info(reason, **metadata)),))
        context.abort(code, reason)


class StreamingDaemon(ScriptedDaemon):
    """The same faults on a stream: a refusal does not end it, a lost answer does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_streams = 0

    def StepStream(self, requests, context):  # type: ignore[no-untyped-def]
        self.num_streams += 1
        for request in requests:
            try:
                answer = block_pb2.StepStreamResponse(step=self.Step(request, self))
            except _Refused as refused:
                refusal = block_pb2.StepRefusal(code=refused.code.value[0], status_details=refused.details)
                answer = block_pb2.StepStreamResponse(refusal=refusal)
            except _Lost:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
            yield answer

    # What Step asks of a call's context:
    def set_trailing_metadata(self, trailing):  # type: ignore[no-untyped-def]
        ((_, self._details),) = trailing

    def abort(self, code, _text):  # type: ignore[no-untyped-def]
        if code is grpc.StatusCode.UNAVAILABLE:
            raise _Lost
        raise _Refused(code, self._details)


class _Lost(Exception):
    pass


class _Refused(Exception):
    def __init__(self, code: grpc.StatusCode, details: bytes) -> None:
        self.code, self.details = code, details


@pytest.fixture(params=["unary", "stream"])
def daemon(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[ScriptedDaemon, str]]:
    """One that knows no stream, as earlier ones, and one that does."""
    scripted = StreamingDaemon() if request.param == "stream" else ScriptedDaemon()
    server = grpc.server(futures.ThreadPoolExecutor(8))
    block_pb2_grpc.add_BlockServiceServicer_to_server(scripted, server)
    session_pb2_grpc.add_SessionServiceServicer_to_server(scripted, server)
    target = f"unix:{tmp_path}/d.sock"
    server.add_insecure_port(target)
    server.start()
    yield scripted, target
    scripted.woken.set()
    server.stop(0)


@pytest.fixture
def session(daemon: tuple[ScriptedDaemon, str]) -> Iterator[Session]:
    channel = grpc.insecure_channel(daemon[1])
    opened = open_session(channel, daemon[1])
    yield opened
    opened.close()
    channel.close()


def open_session(channel: grpc.Channel, target: str, timeout_s: float = 5.0) -> Session:
    core = SessionCore(pool="p", client_name="c", tenant="", request_id="r", pid=1)
    return Session(channel, core, SHAPE, CallSettings(target=target, timeout_s=timeout_s))


def test_a_step_whose_answer_was_lost_is_applied_once(daemon: tuple[ScriptedDaemon, str], session: Session) -> None:
    scripted, _ = daemon
    scripted.faults = ["lost answer"]
    session.begin_step()
    reply = session.step(block_pb2.StepRequest())
    assert reply.replayed
    assert scripted.applied == [(1, 0)]
    assert scripted.num_resumes == 1
    first, second = scripted.seen
    assert first[1:] == second[1:]
    assert second[0] > first[0]  # the retry carries the epoch of the resume


def test_a_request_that_breaks_the_connection_each_time_is_given_up(
    daemon: tuple[ScriptedDaemon, str], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhold_client.session.MAX_TRIES", 3)
    servicer, _ = daemon
    servicer.faults = ["lost answer"] * 20
    session.begin_step()
    with pytest.raises(Unreachable, match="no answer to this request"):
        session.step(session.builder().encode())
    assert servicer.num_resumes == 3
    session.begin_step()
    session.submit(session.builder().encode())
    with pytest.raises(Unreachable, match="no answer to this request"):
        session.collect()
    servicer.faults = []
    session.begin_step()
    session.step(session.builder().encode())


def test_a_step_that_hangs_is_sent_again_when_its_time_is_over(daemon: tuple[ScriptedDaemon, str]) -> None:
    scripted, target = daemon
    with grpc.insecure_channel(target) as channel, open_session(channel, target, timeout_s=0.5) as opened:
        scripted.faults = ["hangs"]
        opened.begin_step()
        begun = time.monotonic()
        assert opened.step(block_pb2.StepRequest()).replayed
        assert 0.5 <= time.monotonic() - begun < 8
    assert scripted.applied == [(1, 0)]


def test_steps_go_over_the_stream_where_the_daemon_has_one(
    daemon: tuple[ScriptedDaemon, str], session: Session
) -> None:
    scripted, _ = daemon
    for _ in range(3):
        session.begin_step()
        session.step(block_pb2.StepRequest())
    if isinstance(scripted, StreamingDaemon):
        assert (session.transport, scripted.num_streams) == ("grpc", 1)
    else:
        assert session.transport == "grpc-unary"
    assert scripted.applied == [(1, 0), (2, 0), (3, 0)] and scripted.num_resumes == 0


def test_a_step_in_two_halves_whose_answer_was_lost_is_applied_once(
    daemon: tuple[ScriptedDaemon, str], session: Session
) -> None:
    scripted, _ = daemon
    scripted.faults = ["", "lost answer"]
    for _ in range(2):
        session.begin_step()
        session.submit(block_pb2.StepRequest())
        reply = session.collect()
    assert reply.replayed and scripted.applied == [(1, 0), (2, 0)]


def test_parts_count_up_within_a_step_and_start_again_in_the_next(session: Session) -> None:
    numbers = []
    for _ in range(2):
        session.begin_step()
        for _ in range(2):
            request = block_pb2.StepRequest()
            session.step(request)
            numbers.append((request.step, request.part, request.completed_step))
    assert numbers == [(1, 0, 0), (1, 1, 0), (2, 0, 1), (2, 1, 1)]


def test_fencing_is_fatal_and_final(daemon: tuple[ScriptedDaemon, str], session: Session) -> None:
    scripted, _ = daemon
    scripted.faults = ["fenced"]
    session.begin_step()
    with pytest.raises(SessionFenced) as caught:
        session.step(block_pb2.StepRequest())
    assert caught.value.is_fatal
    calls = len(scripted.seen)
    with pytest.raises(SessionFenced):
        session.step(block_pb2.StepRequest())
    assert len(scripted.seen) == calls, "a fenced session must not be used again"


def test_a_refused_resume_is_fatal(daemon: tuple[ScriptedDaemon, str], session: Session) -> None:
    scripted, _ = daemon
    scripted.resume_refused = True
    scripted.faults = ["lost answer"]
    session.begin_step()
    with pytest.raises(ResumeRefused):
        session.step(block_pb2.StepRequest())


def test_an_invalid_request_names_its_field_and_the_session_goes_on(
    daemon: tuple[ScriptedDaemon, str], session: Session
) -> None:
    scripted, _ = daemon
    scripted.faults = ["invalid"]
    session.begin_step()
    with pytest.raises(InvalidField) as caught:
        session.step(block_pb2.StepRequest())
    assert caught.value.metadata["field"] == "extend.slots_needed"
    assert session.step(block_pb2.StepRequest()).boot_id == "boot"


def test_the_session_is_kept_alive_and_closed(daemon: tuple[ScriptedDaemon, str]) -> None:
    scripted, target = daemon
    channel = grpc.insecure_channel(target)
    opened = open_session(channel, target)
    time.sleep(0.5)  # the lease is 300 ms: a beat every 100 ms
    assert scripted.beats >= 3
    opened.close()
    assert scripted.closed.is_set()
    channel.close()
    with pytest.raises(SessionFenced):
        opened.begin_step()
        opened.step(block_pb2.StepRequest())


async def open_async_session(client: AsyncClient) -> AsyncSession:
    core = SessionCore(pool="p", client_name="c", tenant="", request_id="r", pid=1)
    opened = AsyncSession(client, core, SHAPE, None)
    await opened._open()
    return opened


def test_the_asyncio_session_resends_exactly_once_too(daemon: tuple[ScriptedDaemon, str]) -> None:
    scripted, target = daemon

    async def scenario() -> bool:
        async with AsyncClient(target) as client, await open_async_session(client) as opened:
            scripted.faults = ["lost answer"]
            opened.begin_step()
            return (await opened.step(block_pb2.StepRequest())).replayed

    assert asyncio.run(scenario())
    assert scripted.applied == [(1, 0)]
    assert scripted.closed.is_set()


def test_the_asyncio_session_survives_a_refused_step(daemon: tuple[ScriptedDaemon, str]) -> None:
    scripted, target = daemon

    async def scenario() -> str:
        async with AsyncClient(target) as client, await open_async_session(client) as opened:
            scripted.faults = ["invalid"]
            opened.begin_step()
            with pytest.raises(InvalidField) as caught:
                await opened.step(block_pb2.StepRequest())
            await opened.step(block_pb2.StepRequest())
            return caught.value.metadata["field"]

    assert asyncio.run(scenario()) == "extend.slots_needed"
    assert scripted.applied == [(1, 1)] and scripted.num_resumes == 0
    if isinstance(scripted, StreamingDaemon):
        assert scripted.num_streams == 1


def test_an_answer_that_arrives_while_the_asyncio_session_moves_to_another_daemon_is_not_taken(
    daemon: tuple[ScriptedDaemon, str],
) -> None:
    """Its step is not in what the resume under way says that we hold."""
    scripted, target = daemon

    async def scenario() -> "tuple[str, int]":
        async with AsyncClient(target) as client, await open_async_session(client) as opened:
            scripted.faults = ["restarts"]
            opened.begin_step()
            reply = await opened.step(block_pb2.StepRequest())
            return reply.boot_id, opened.epoch

    assert asyncio.run(scenario()) == ("next boot", 2)
    assert scripted.seen == [(1, 1, 0), (2, 1, 0)]
    assert scripted.applied == [(1, 0)]
