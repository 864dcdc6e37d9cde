"""Steps on a stream when something goes wrong with the stream: what the step gets, and that the next one works."""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import FrameType

import grpc
import pytest

from kvhold.v1 import block_pb2, block_pb2_grpc
from kvhold_client import step_stream
from kvhold_client.aio_steps import AsyncSteps
from kvhold_client.calls import CallSettings
from kvhold_client.errors import Exhausted, Unreachable
from kvhold_client.step_senders import StreamSteps

MAX_MESSAGE_BYTES = 10_000


class Peer(block_pb2_grpc.BlockServiceServicer):
    """Answers with the step's number in `num_freed_blocks`. Steps below 0 are held back until `release`."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.num_streams = 0
        self.num_calls = 0
        self.came = threading.Event()  # one that is held back

    def Step(self, request, context):  # type: ignore[no-untyped-def]
        self.num_calls += 1
        return block_pb2.StepResponse(num_freed_blocks=[request.step])

    def StepStream(self, requests, context):  # type: ignore[no-untyped-def]
        self.num_streams += 1
        for request in requests:
            if request.step < 0:
                self.came.set()
                self.release.wait(10)
            yield block_pb2.StepStreamResponse(step=block_pb2.StepResponse(num_freed_blocks=[request.step]))


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[Peer, str]]:
    scripted = Peer()
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    server = grpc.server(futures.ThreadPoolExecutor(8), options=options)
    block_pb2_grpc.add_BlockServiceServicer_to_server(scripted, server)
    target = f"unix:{tmp_path}/d.sock"
    server.add_insecure_port(target)
    server.start()
    yield scripted, target
    scripted.release.set()
    server.stop(0)


@pytest.fixture
def channel(peer: tuple[Peer, str]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(peer[1]) as opened:
        yield opened


def steps_of(peer: tuple[Peer, str], channel: grpc.Channel, timeout_s: float = 10.0) -> StreamSteps:
    return StreamSteps(channel, CallSettings(target=peer[1], timeout_s=timeout_s))


def echo(steps: StreamSteps, number: int, **fields: str) -> int:
    (answer,) = steps.call(block_pb2.StepRequest(step=number, **fields)).num_freed_blocks  # type: ignore[arg-type]
    return answer


def test_all_steps_share_one_stream(peer: tuple[Peer, str], channel: grpc.Channel) -> None:
    steps = steps_of(peer, channel)
    assert [echo(steps, number) for number in range(1, 50)] == list(range(1, 50))
    assert (peer[0].num_streams, peer[0].num_calls) == (1, 0)
    steps.close()


def test_an_answer_that_does_not_come_in_time_is_unreachable(peer: tuple[Peer, str], channel: grpc.Channel) -> None:
    steps = steps_of(peer, channel, timeout_s=0.2)
    echo(steps, 1)
    stop = threading.Event()

    def look() -> None:  # what the session's keep-alive does
        while not stop.wait(0.05):
            steps.give_up_late()

    thread = threading.Thread(target=look)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(Unreachable, match="did not answer in time"):
        echo(steps, -1)
    assert 0.2 <= time.monotonic() - begun < 5.0
    peer[0].release.set()
    assert echo(steps, 2) == 2, "on another stream"
    stop.set()
    thread.join()
    steps.close()


def test_an_aborted_wait_ends_and_nothing_is_sent_any_more(peer: tuple[Peer, str], channel: grpc.Channel) -> None:
    steps = steps_of(peer, channel)
    threading.Thread(target=lambda: (peer[0].came.wait(10), steps.abort())).start()
    with pytest.raises(Unreachable):
        echo(steps, -1)
    with pytest.raises(Unreachable):
        echo(steps, 2)
    assert peer[0].num_streams == 1


def test_an_interrupted_step_leaves_no_answer_to_the_next(peer: tuple[Peer, str], channel: grpc.Channel) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    steps = steps_of(peer, channel)
    echo(steps, 1)
    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    threading.Thread(target=lambda: (peer[0].came.wait(10), signal.pthread_kill(main, signal.SIGUSR1))).start()
    try:
        with pytest.raises(Interrupted):
            echo(steps, -1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    peer[0].release.set()
    assert echo(steps, 2) == 2
    steps.close()


def test_a_step_beyond_the_transports_bound_is_refused_and_the_next_one_works(
    peer: tuple[Peer, str], channel: grpc.Channel
) -> None:
    steps = steps_of(peer, channel)
    echo(steps, 1)
    with pytest.raises(Exhausted):
        echo(steps, 2, session_id="x" * MAX_MESSAGE_BYTES)
    assert echo(steps, 3) == 3 and steps.transport == "grpc"
    steps.close()


def test_another_grpcio_without_the_stream_sends_calls(
    peer: tuple[Peer, str], channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_stream, "cygrpc", None)
    steps = steps_of(peer, channel)
    assert [echo(steps, 1), echo(steps, 2)] == [1, 2]
    assert (steps.transport, peer[0].num_streams, peer[0].num_calls) == ("grpc-unary", 0, 2)


def test_a_closed_channel_is_unreachable(peer: tuple[Peer, str], channel: grpc.Channel) -> None:
    steps = steps_of(peer, channel)
    channel.close()
    with pytest.raises(Unreachable):
        echo(steps, 1)


def test_closing_again_and_again_is_fine(peer: tuple[Peer, str], channel: grpc.Channel) -> None:
    steps = steps_of(peer, channel)
    echo(steps, 1)
    steps.close()
    steps.close()
    with pytest.raises(Unreachable):
        echo(steps, 2)


# ------------------------------------------------------------------------------------------------------------- asyncio
def with_asyncio(peer: tuple[Peer, str], scenario: Callable[[AsyncSteps], "object"], timeout_s: float = 10.0) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(peer[1]) as channel:
            steps = AsyncSteps(channel, CallSettings(target=peer[1], timeout_s=timeout_s))
            await scenario(steps)  # type: ignore[misc]
            steps.close()

    asyncio.run(run())


async def aecho(steps: AsyncSteps, number: int, **fields: str) -> int:
    (answer,) = (await steps.call(block_pb2.StepRequest(step=number, **fields))).num_freed_blocks  # type: ignore[arg-type]
    return answer


def test_asyncio_a_cancelled_step_leaves_no_answer_to_the_next(peer: tuple[Peer, str]) -> None:
    async def scenario(steps: AsyncSteps) -> None:
        assert [await aecho(steps, number) for number in range(1, 9)] == list(range(1, 9))
        assert peer[0].num_streams == 1
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(aecho(steps, -1), 0.1)
        peer[0].release.set()
        assert await aecho(steps, 9) == 9

    with_asyncio(peer, scenario)


def test_asyncio_an_answer_that_does_not_come_in_time_is_unreachable(peer: tuple[Peer, str]) -> None:
    async def scenario(steps: AsyncSteps) -> None:
        with pytest.raises(Unreachable, match="no answer in time"):
            await aecho(steps, -1)
        peer[0].release.set()
        assert await aecho(steps, 2) == 2

    with_asyncio(peer, scenario, timeout_s=0.3)


def test_asyncio_an_aborted_wait_is_unreachable(peer: tuple[Peer, str]) -> None:
    async def scenario(steps: AsyncSteps) -> None:
        asyncio.get_running_loop().call_later(0.1, steps.abort)
        with pytest.raises(Unreachable):
            await aecho(steps, -1)

    with_asyncio(peer, scenario)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio does not count cancellations before 3.11")
@pytest.mark.parametrize("is_aborted_first", [True, False])
def test_asyncio_who_is_cancelled_ends_also_if_the_wait_is_aborted_at_once(
    peer: tuple[Peer, str], is_aborted_first: bool
) -> None:
    async def scenario(steps: AsyncSteps) -> None:
        waiting = asyncio.create_task(aecho(steps, -1))
        await asyncio.sleep(0.1)
        both = [steps.abort, waiting.cancel]
        for end in both if is_aborted_first else reversed(both):
            end()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        peer[0].release.set()
        assert await aecho(steps, 2) == 2

    with_asyncio(peer, scenario)


def test_asyncio_a_step_beyond_the_transports_bound_is_refused_and_the_next_one_works(peer: tuple[Peer, str]) -> None:
    async def scenario(steps: AsyncSteps) -> None:
        with pytest.raises(Exhausted):
            await aecho(steps, 2, session_id="x" * MAX_MESSAGE_BYTES)
        assert await aecho(steps, 3) == 3

    with_asyncio(peer, scenario)
