"""The step stream's own rules; what a step does is test_blocks.py's subject, on every way to send it."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from kvhold.v1 import block_pb2 as pb
from kvhold_server.node.recovering import PoolRecovering
from kvhold_server.rpc.framed_calls import OK, Answer, step_stream_response
from kvhold_server.rpc.services import blocks
from tests.rpc.harness import ClientSession, RunningDaemon, refused

PATH = "/kvhold.v1.BlockService/StepStream"


class Stream:
    """One stream, in bytes where that matters."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.call: Any = daemon.channel.stream_stream(PATH)()  # type: ignore[no-untyped-call, unused-ignore]

    async def send(self, request: "pb.StepRequest | bytes") -> None:
        await self.call.write(request if isinstance(request, bytes) else request.SerializeToString())

    async def receive(self) -> pb.StepStreamResponse:
        data = await asyncio.wait_for(self.call.read(), 10)
        assert data is not grpc.aio.EOF, "the stream ended"
        return pb.StepStreamResponse.FromString(data)

    async def ask(self, request: "pb.StepRequest | bytes") -> pb.StepStreamResponse:
        await self.send(request)
        return await self.receive()

    async def finish(self) -> grpc.StatusCode:
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF
        code: grpc.StatusCode = await self.call.code()
        return code


@pytest.fixture
async def stream(daemon: RunningDaemon) -> Stream:
    return Stream(daemon)


@pytest.fixture
async def session(daemon: RunningDaemon) -> ClientSession:
    await daemon.open_pool()
    return await daemon.open_session()


def step(session: ClientSession, number: int, **parts: Any) -> pb.StepRequest:
    return pb.StepRequest(**session.head, step=number, **parts)


def reason(answer: pb.StepStreamResponse) -> str:
    status, info = Status.FromString(answer.refusal.status_details), ErrorInfo()
    assert status.code == answer.refusal.code
    assert status.details[0].Unpack(info)
    return info.reason


async def test_requests_sent_ahead_are_answered_in_order(stream: Stream, session: ClientSession) -> None:
    for number in range(1, 6):
        admit = pb.AdmitItems(sequence_ids=[number], num_tokens=[16 * number])
        await stream.send(step(session, number, admit=admit))
    for number in range(1, 6):
        assert list((await stream.receive()).step.admit.num_blocks) == [number]
    assert await stream.finish() is grpc.StatusCode.OK


async def test_a_refused_step_says_what_a_call_says_and_the_stream_goes_on(
    daemon: RunningDaemon, stream: Stream, session: ClientSession
) -> None:
    wrong = (
        step(session, 0),
        pb.StepRequest(session_id="nobody", epoch=1, step=1),
        pb.StepRequest(session_id=session.opened.session_id, epoch=0, step=1),
        step(session, 1, boot_id="another"),
        step(session, 1, extend=pb.ExtendItems(sequence_ids=[1], slots_needed=[])),
        step(session, 1, free=pb.FreeItems(sequence_ids=[0] * 65537)),
    )
    for request in wrong:
        answer, call = await stream.ask(request), daemon.blocks.Step(request)
        refusal = await refused(call)
        assert (answer.refusal.code, reason(answer)) == (refusal.code.value[0], refusal.reason)
        (unary_details,) = [value for key, value in await call.trailing_metadata() if key == "grpc-status-details-bin"]
        assert answer.refusal.status_details == unary_details
    assert (await stream.ask(step(session, 1))).HasField("step")
    assert await stream.finish() is grpc.StatusCode.OK


async def test_an_unknown_session_is_refused_for_itself_alone(stream: Stream, session: ClientSession) -> None:
    """A stream is bound to no session: each request is fenced by itself."""
    stranger = await stream.ask(pb.StepRequest(session_id="nobody", epoch=1, step=1))
    assert reason(stranger) == "UNKNOWN_SESSION"
    assert (await stream.ask(step(session, 1))).HasField("step")


async def test_a_session_that_is_resumed_elsewhere_is_fenced_on_an_open_stream(
    daemon: RunningDaemon, stream: Stream, session: ClientSession
) -> None:
    assert (await stream.ask(step(session, 1))).HasField("step")
    later = await daemon.open_session(resume_token=session.opened.resume_token)
    assert reason(await stream.ask(step(session, 2))) == "SESSION_FENCED"
    assert (await stream.ask(step(later, 2))).HasField("step")


async def test_a_repeated_step_on_another_stream_gets_the_first_answer(
    daemon: RunningDaemon, stream: Stream, session: ClientSession
) -> None:
    """The stream broke before its answer was read; the next one gives it."""
    request = step(session, 1, admit=pb.AdmitItems(sequence_ids=[1], num_tokens=[40]))
    await stream.send(request)
    await daemon.until(lambda: daemon.node.telemetry.method("BlockService/Step").codes["OK"] == 1)
    stream.call.cancel()
    again = (await Stream(daemon).ask(request)).step
    assert again.replayed and list(again.admit.block_ids) == [1, 2, 3]
    by_call = await daemon.blocks.Step(request)
    assert by_call == again, "and a call the same"


async def test_junk_and_oversize_get_typed_refusals_and_the_stream_goes_on(
    daemon: RunningDaemon, stream: Stream, session: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    junk = await stream.ask(b"\xff\xff\xff")
    assert (junk.refusal.code, reason(junk)) == (3, "MALFORMED_MESSAGE")
    large = step(session, 1)
    large.admit.hashes = bytes(daemon.node.limits.max_message_bytes)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"unix:{daemon.daemon.config.socket}", options=options) as channel:
        wide = Stream(daemon)
        wide.call = channel.stream_stream(PATH)()  # type: ignore[no-untyped-call, unused-ignore]
        oversize = await wide.ask(large)
        assert (oversize.refusal.code, reason(oversize)) == (3, "MESSAGE_TOO_LARGE")
        assert (await wide.ask(step(session, 1))).HasField("step")


async def test_a_fault_of_the_daemons_own_is_a_refusal_that_names_no_secret(
    daemon: RunningDaemon, stream: Stream, session: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("internal detail")

    with monkeypatch.context() as patch:
        patch.setattr(daemon.node, "step", broken)
        fault = await stream.ask(step(session, 1))
    assert (fault.refusal.code, reason(fault)) == (13, "UNEXPECTED_FAULT")
    assert b"internal detail" not in fault.refusal.status_details
    assert daemon.node.telemetry.num_unexpected_errors == 1
    assert (await stream.ask(step(session, 1))).HasField("step")


async def test_steps_are_counted_as_steps_and_the_stream_as_one_call(
    daemon: RunningDaemon, stream: Stream, session: ClientSession
) -> None:
    steps, streams = (daemon.node.telemetry.method(f"BlockService/{name}") for name in ("Step", "StepStream"))
    for number in (1, 2, 2):
        await stream.ask(step(session, number))
    await stream.ask(step(session, 0))
    assert steps.codes == {"OK": 3, "INVALID_ARGUMENT": 1} and sum(steps.durations.buckets) == 4
    assert (streams.in_flight, streams.codes) == (1, {"OK": 0})
    await stream.finish()
    await daemon.until(lambda: streams.in_flight == 0)
    assert streams.codes == {"OK": 1}
    other = Stream(daemon)
    await other.ask(step(session, 3))
    other.call.cancel()
    await daemon.until(lambda: streams.in_flight == 0)
    assert sum(streams.codes.values()) == 2 and set(streams.codes) <= {"OK", "CANCELLED"}


async def test_a_step_waits_while_the_pool_recovers(
    daemon: RunningDaemon, stream: Stream, session: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = daemon.node.step, iter(range(3))

    def recovering(*args: Any) -> Any:
        if next(refusals, None) is not None:
            raise PoolRecovering("p", 1, retry_after_s=0.01)
        return real(*args)

    monkeypatch.setattr(daemon.node, "step", recovering)
    assert (await stream.ask(step(session, 1))).HasField("step")
    assert next(refusals, None) is None


async def test_a_client_that_hangs_up_before_its_answer_is_no_fault(
    daemon: RunningDaemon, session: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It broke at any time: while a step waits, in the midst of large answers, or idle."""
    streams, num_waits = daemon.node.telemetry.method("BlockService/StepStream"), 0
    real = daemon.node.step

    def slow(*args: Any) -> Any:
        nonlocal num_waits
        num_waits += 1
        if num_waits % 3:
            raise PoolRecovering("p", 1, retry_after_s=0.01)
        return real(*args)

    question = pb.LookupItems(num_tokens=[1] * 20_000, num_hashes=[0] * 20_000)
    monkeypatch.setattr(daemon.node, "step", slow)
    for number in range(1, 40):
        stream = Stream(daemon)
        await stream.send(step(session, number, lookup=question))
        await asyncio.sleep(number / 1000)
        stream.call.cancel()
    await daemon.until(lambda: streams.in_flight == 0)
    assert daemon.node.telemetry.num_unexpected_errors == 0
    assert set(streams.codes) <= {"OK", "CANCELLED"}


async def test_a_pool_that_recovers_for_too_long_is_a_refusal(
    daemon: RunningDaemon, stream: Stream, session: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recovering(*args: Any) -> Any:
        raise PoolRecovering("p", 1, retry_after_s=0.001)

    monkeypatch.setattr(blocks, "MAX_RECOVERY_POLLS", 3)
    with monkeypatch.context() as patch:
        patch.setattr(daemon.node, "step", recovering)
        answer = await stream.ask(step(session, 1))
    assert (answer.refusal.code, reason(answer)) == (14, "POOL_RECOVERING")
    assert (await stream.ask(step(session, 1))).HasField("step")


async def test_a_client_that_does_not_read_is_not_read_from(
    daemon: RunningDaemon, stream: Stream, session: ClientSession
) -> None:
    num_items, num_requests = 60_000, 120
    request = step(session, 1, free=pb.FreeItems(sequence_ids=range(num_items)))
    steps = daemon.node.telemetry.method("BlockService/Step")

    async def flood() -> None:
        for _ in range(num_requests):
            await stream.send(request)  # the same one: its first answer, 60 kB, 7 MB in all

    sending = asyncio.create_task(flood())
    await daemon.until(lambda: steps.codes["OK"] > 1)
    before = 0
    while before != steps.codes["OK"]:
        before = steps.codes["OK"]
        await asyncio.sleep(0.3)
    assert before < num_requests * 0.8, "what the transport takes, and no more"
    assert not sending.done(), "nor does the client get rid of its requests"
    for _ in range(num_requests):
        assert len((await stream.receive()).step.num_freed_blocks) == num_items
    await sending
    assert await stream.finish() is grpc.StatusCode.OK


async def test_a_daemon_that_stops_ends_the_stream(
    daemon: RunningDaemon, stream: Stream, session: ClientSession
) -> None:
    await stream.ask(step(session, 1))
    await daemon.daemon.close()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(stream.call.read(), 10)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@given(st.integers(0, 1 << 15))
def test_an_answer_is_framed_as_protobuf_would(num_freed: int) -> None:
    response = pb.StepResponse(boot_id="b", num_freed_blocks=range(num_freed))
    framed = step_stream_response(Answer(OK, response.SerializeToString()))
    assert framed == pb.StepStreamResponse(step=response).SerializeToString()
