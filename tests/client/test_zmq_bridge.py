"""The ZeroMQ bridge with a real subscriber: what a router built for engines would see."""

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from kvhold.v1 import admin_pb2, block_pb2
from kvhold_client import Client, LocalDaemon
from kvhold_client.bridge.zmq_bridge import BridgeSettings, EndpointTaken, ZmqBridge
from kvhold_client.cli.exits import FAILED, USAGE
from kvhold_client.cli.main import main
from kvhold_client.hashing import event_hash
from kvhold_client.pools import PoolRequest
from kvhold_client.shape import GroupShape
from tests.rpc.harness import ClientSession, RunningDaemon, digest, running

TOPIC = "kv@10.0.0.1:8000@llama"
WAIT_S = 20.0


@pytest.fixture
def short_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvb-") as path:
        yield Path(path)


def number(key: int) -> int:
    return event_hash(digest(key))


class Router:
    """Subscribes, replays, and applies what it hears, as a router would."""

    def __init__(self, bridge: ZmqBridge) -> None:
        self.bridge = bridge
        self.context = zmq.asyncio.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self.sub.connect(bridge.publish_endpoint)
        self.index: set[int] = set()
        self.next_sequence = 0
        self.kinds: list[str] = []

    def apply(self, frames: list[bytes]) -> list[Any]:
        topic, sequence, payload = frames
        assert topic.decode() == TOPIC
        seen = int.from_bytes(sequence, "big")
        if seen < self.next_sequence:
            return []  # replayed already
        self.next_sequence = seen + 1
        sent_at_s, events, rank = msgpack.unpackb(payload)
        assert sent_at_s > 1e9 and rank == 3
        for event in events:
            self.kinds.append(event["type"])
            if event["type"] == "BlockStored":
                self.index.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                self.index.difference_update(event["block_hashes"])
            else:
                assert event["type"] == "AllBlocksCleared"
                self.index.clear()
        return list(events)

    async def hear(self) -> list[Any]:
        return self.apply(await asyncio.wait_for(self.sub.recv_multipart(), WAIT_S))

    async def replay(self, start: int) -> list[int]:
        """Applies a replay; returns its sequences."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.bridge.replay_endpoint)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        sequences = []
        while True:
            empty, topic, sequence, payload = await asyncio.wait_for(dealer.recv_multipart(), WAIT_S)
            assert empty == b""
            if sequence == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                dealer.close(linger=0)
                return sequences
            sequences.append(int.from_bytes(sequence, "big"))
            self.apply([topic, sequence, payload])

    def forget(self) -> None:
        self.index, self.next_sequence = {-1}, 0

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def bridged(directory: Path, **settings: Any) -> AsyncIterator[tuple[ZmqBridge, Router]]:
    """A bridge to the daemon at `directory` and a router that is already subscribed."""
    defaults: dict[str, Any] = {"target": f"unix:{directory}/k.sock", "pool": "p", "topic": TOPIC}
    endpoints = {"publish": "tcp://127.0.0.1:0", "replay": "tcp://127.0.0.1:0", "data_parallel_rank": 3}
    bridge = ZmqBridge(settings=BridgeSettings(**defaults | endpoints | settings), note=lambda text: None)
    router = Router(bridge)
    await asyncio.sleep(0.2)  # a subscription takes a moment, and nobody says when it is there
    task = asyncio.create_task(bridge.run())
    try:
        yield bridge, router
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        router.close()


async def started(daemon: RunningDaemon, **options: Any) -> ClientSession:
    await daemon.open_pool(**options)
    session = await daemon.open_session()
    await session.keep_alive()
    return session


async def test_a_subscriber_hears_what_is_cached_and_what_changes(short_dir: Path) -> None:
    """EVT-04: a reset is told although no step follows it."""
    async with running(short_dir) as daemon:
        session = await started(daemon, events_carry_tokens=True)
        await session.admit(1, 33, 1, 2)
        await session.step()
        async with bridged(short_dir) as (_, router):
            snapshot = await router.hear()
            assert snapshot[0]["type"] == "AllBlocksCleared"
            assert router.index == {number(1), number(2)} and router.next_sequence == 1
            about = block_pb2.SequenceMetadata(
                token_ids=range(48), lora_id=3, lora_name="poet", extra_keys=[b"", b"\x81\x61x"]
            )
            admit = block_pb2.AdmitItems(
                sequence_ids=[2], num_tokens=[48], num_hashes=[2], hashes=digest(5, 6), metadata=[about]
            )
            await session.step(admit=admit)
            await session.step()
            (event,) = await router.hear()
            assert event["block_hashes"] == [number(5), number(6)] and event["parent_block_hash"] is None
            assert (event["token_ids"], event["block_size"]) == (list(range(32)), 16)
            assert (event["lora_name"], event["extra_keys"]) == ("poet", [None, ["x"]])
            await session.step(invalidate=block_pb2.InvalidateItems(sequence_ids=[2]))
            removed = await router.hear()
            assert {event["type"] for event in removed} == {"BlockRemoved"} and router.index == {number(1), number(2)}
            await daemon.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(pool="p", force=True))
            assert await router.hear() == [{"type": "AllBlocksCleared"}] and not router.index


async def test_a_late_subscriber_replays_what_is_remembered(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        session = await started(daemon)
        async with bridged(short_dir) as (bridge, router):
            await router.hear()
            for sequence in range(1, 6):
                await session.admit(sequence, 17, sequence)
                await session.step()
                await router.hear()
            expected = set(router.index)
            assert expected == {number(key) for key in range(1, 6)}
            router.forget()
            assert await router.replay(0) == list(range(bridge.next_sequence)) and router.index == expected
            assert await router.replay(4) == list(range(4, bridge.next_sequence))
            assert await router.replay(bridge.next_sequence) == []


async def test_evt_06_a_replay_from_before_the_buffer_is_a_snapshot_and_no_silent_hole(short_dir: Path) -> None:
    """EVT-06: what is gone cannot be repeated; the reader is told to start over, with everything."""
    async with running(short_dir) as daemon:
        session = await started(daemon)
        async with bridged(short_dir, buffer_steps=4) as (bridge, router):
            await router.hear()
            for sequence in range(1, 11):
                await session.admit(sequence, 17, sequence)
                await session.step()
                await router.hear()
            router.forget()
            assert await router.replay(2) == [bridge.next_sequence - 1]
            assert router.index == {number(key) for key in range(1, 11)}, "the -1 went with AllBlocksCleared"
            assert await router.replay(10**9) == [bridge.next_sequence - 1], "a sequence of a life before"
            await session.admit(99, 17, 99)
            await session.step()
            await router.hear()
            assert number(99) in router.index


async def test_evt_05_after_a_daemons_restart_the_first_message_clears_what_readers_have(short_dir: Path) -> None:
    """EVT-05: no reader goes on with the dead cache."""
    async with running(short_dir) as daemon:
        session = await started(daemon)
        await session.admit(1, 33, 1, 2)
        await session.step()
        bridge_context = bridged(short_dir)
        _, router = await bridge_context.__aenter__()
        try:
            await router.hear()
            assert router.index == {number(1), number(2)}
            await session.close()
            await daemon.daemon.close()
            async with running(short_dir) as successor:
                session = await started(successor)
                await session.admit(1, 17, 7)
                await session.step()
                router.kinds.clear()
                while router.index != {number(7)}:
                    await router.hear()
                assert router.kinds[0] == "AllBlocksCleared"
        finally:
            await bridge_context.__aexit__(None, None, None)


async def test_evt_07_a_port_that_is_taken_is_named(short_dir: Path) -> None:
    """EVT-07: the second bridge says which endpoint it could not have, and gives the other one back."""
    async with bridged(short_dir) as (bridge, _):
        with pytest.raises(EndpointTaken, match=bridge.replay_endpoint.rpartition(":")[2]):
            ZmqBridge(
                settings=BridgeSettings(
                    target="unix:/nowhere", pool="p", publish="tcp://127.0.0.1:0", replay=bridge.replay_endpoint
                ),
                note=print,
            )


async def test_older_engines_frames_and_whole_digests(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        session = await started(daemon)
        await session.admit(1, 17, 1)
        await session.step()
        async with bridged(short_dir, replay_with_topic=False, raw_hashes=True) as (bridge, router):
            await router.hear()
            assert router.index == {digest(1)}
            dealer = router.context.socket(zmq.DEALER)
            dealer.connect(bridge.replay_endpoint)
            await dealer.send_multipart([b"", bytes(8)])
            frames = [await asyncio.wait_for(dealer.recv_multipart(), WAIT_S) for _ in range(2)]
            assert [frame[:2] for frame in frames] == [[b"", bytes(8)], [b"", b"\xff" * 8]]
            await dealer.send_multipart([b"nonsense"])
            await dealer.send_multipart([b"", bytes(8)])
            assert (await asyncio.wait_for(dealer.recv_multipart(), WAIT_S))[1] == bytes(8), "it goes on serving"


def test_evt_07_the_command_refuses_ports_that_overlap_or_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """EVT-07: with the ports, before anything is published."""
    ranks = ["--dp-size", "4", "--publish", "tcp://127.0.0.1:5557", "--replay", "tcp://127.0.0.1:5558"]
    assert main(["bridge", "zmq", "--pool", "p", *ranks]) == USAGE
    assert "5557..5560" in capsys.readouterr().err
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind("tcp://127.0.0.1:0")
        taken = other.getsockopt_string(zmq.LAST_ENDPOINT)
        assert main(["bridge", "zmq", "--pool", "p", "--publish", taken]) == FAILED
        assert f"cannot listen on {taken}" in capsys.readouterr().err


def test_the_command_publishes_until_it_is_terminated(short_dir: Path) -> None:
    """As a container runs it: endpoints on stdout, what it waits for on stderr, exit code 0 after SIGTERM."""
    with LocalDaemon() as daemon, Client(daemon.target) as client, zmq.Context() as context:
        command = [sys.executable, "-m", "kvhold_client", "bridge", "zmq", "--pool", "late", "--topic", "t"]
        command += ["--publish", "tcp://127.0.0.1:0", "--target", daemon.target]
        bridge = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert bridge.stdout is not None and bridge.stderr is not None
            endpoint = bridge.stdout.readline().split()[1]
            assert "POOL_NOT_FOUND" in bridge.stderr.readline()
            with context.socket(zmq.SUB) as subscriber:
                subscriber.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
                subscriber.setsockopt_string(zmq.SUBSCRIBE, "t")
                subscriber.connect(endpoint)
                time.sleep(0.5)  # a subscription takes a moment
                request = PoolRequest(
                    name="late",
                    backend="fake",
                    simulated_groups=(GroupShape(kind="full", block_size_tokens=16),),
                    simulated_num_blocks=10,
                    max_model_len_tokens=1024,
                )
                client.open_pool(request)
                topic, sequence, payload = subscriber.recv_multipart()
            assert (topic, sequence) == (b"t", bytes(8))
            assert msgpack.unpackb(payload)[1:] == [[{"type": "AllBlocksCleared"}], 0]
            bridge.terminate()
            assert bridge.wait(WAIT_S) == 0
        finally:
            bridge.kill()
            bridge.communicate()
