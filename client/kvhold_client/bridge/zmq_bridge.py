"""Publishes a pool's events over ZeroMQ as engines do, from a process of its own: the daemon knows nothing of it.

    daemon ──WatchEvents──▶ bridge ──PUB────▶ [topic, sequence (8 bytes, big-endian), batch]   every subscriber
                               └────ROUTER──▶ [topic, sequence, batch] … ["", −1, ""]          whoever asks for a replay

Sequences count from 0 in each life of the bridge, without gaps. **After a restart** of the daemon, when events were
lost, and as the first thing that a new bridge says, the stream has an AllBlocksCleared and then everything cached now,
so a reader that applies all of it in order is right again. A replay from a sequence that is still remembered
(`buffer_steps` batches) sends the batches from there. From one that is older, or of an earlier bridge's life, silence
would leave a hole: the answer is one batch with AllBlocksCleared and all that is cached, under the latest sequence.
What is published later may repeat a change that it contains already; adding or removing a hash twice is harmless.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import msgpack
import zmq
import zmq.asyncio

from kvhold.v1 import event_pb2, event_pb2_grpc, pool_pb2, pool_pb2_grpc
from kvhold_client.bridge.engine_events import CLEARED, EngineEvent, EventFormat, raw_hash
from kvhold_client.calls import typed_error
from kvhold_client.channels import open_aio_channel
from kvhold_client.codec import decode_shape
from kvhold_client.errors import KvholdError, NotFound, Unavailable, Unreachable
from kvhold_client.hashing import event_hash

END = (-1).to_bytes(8, "big", signed=True)
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0
HIGH_WATER_MARK = 100_000  # messages queued for a slow subscriber; then it misses some, and sees that by the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings:
    """What one bridge is told."""

    target: str
    pool: str
    publish: str = "tcp://*:5557"
    replay: str = ""  # empty: no replays
    topic: str = ""
    data_parallel_rank: int = 0
    buffer_steps: int = 10_000
    medium: str = "GPU"
    raw_hashes: bool = False
    replay_with_topic: bool = True  # False: [sequence, batch], as older engines


class EndpointTaken(Exception):
    """Somebody else listens there."""


@dataclass(slots=True, kw_only=True)
class ZmqBridge:
    """One pool's bridge; owned by one event loop. Sockets are bound by the constructor, or it raises EndpointTaken."""

    settings: BridgeSettings
    note: Callable[[str], None]
    next_sequence: int = 0
    publish_endpoint: str = ""  # as bound
    replay_endpoint: str = ""
    _buffer: deque[tuple[int, bytes]] = field(init=False)
    _context: Any = field(init=False)
    _pub: Any = field(init=False)
    _router: Any = None
    _channel: grpc.aio.Channel | None = None

    def __post_init__(self) -> None:
        self._buffer = deque(maxlen=self.settings.buffer_steps)
        self._context = zmq.asyncio.Context()
        self._pub = self._bound(zmq.PUB, self.settings.publish)
        self.publish_endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.settings.replay:
            self._router = self._bound(zmq.ROUTER, self.settings.replay)
            self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    async def run(self) -> None:
        """Until cancelled. Raises KvholdError for what waiting cannot heal."""
        self._channel = open_aio_channel(self.settings.target)
        tasks = [asyncio.create_task(self._publish_all())]
        if self._router is not None:
            tasks += [asyncio.create_task(self._serve_replays())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.close()
            self.close()

    def close(self) -> None:
        """Gives the ports back. Idempotent."""
        self._context.destroy(linger=0)

    # ---------------------------------------------------------------- publishing
    async def _publish_all(self) -> None:
        cursor = event_pb2.EventCursor()
        pause_s = FIRST_PAUSE_S
        is_told = False
        while True:
            try:
                form = await self._event_format()
                async for message in self._watch(cursor):
                    await self._publish(message, form)
                    cursor, pause_s, is_told = message.cursor, FIRST_PAUSE_S, False
            except (Unreachable, Unavailable, NotFound) as error:
                if not is_told:
                    self.note(f"waiting: {error}")
                is_told = True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _publish(self, message: event_pb2.WatchEventsResponse, form: EventFormat) -> None:
        events = form.events_of(message)
        if not events:
            return
        payload = self._batch(message, events)
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        self._buffer.append((sequence, payload))
        await self._pub.send_multipart([self.settings.topic.encode(), sequence.to_bytes(8, "big"), payload])

    def _batch(self, message: event_pb2.WatchEventsResponse, events: list[EngineEvent]) -> bytes:
        batch = [message.sent_at.ToNanoseconds() / 1e9, events, self.settings.data_parallel_rank]
        packed: bytes = msgpack.packb(batch, use_bin_type=True)
        return packed

    # ------------------------------------------------------------------- replays
    async def _serve_replays(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                self.note(f"a replay request of {len(frames)} frames is not [id, empty, 8 bytes]: dropped")
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for sequence, payload in await self._since(start):
                await self._reply(client, self.settings.topic.encode(), sequence.to_bytes(8, "big"), payload)
            await self._reply(client, b"", END, b"")

    async def _since(self, start: int) -> list[tuple[int, bytes]]:
        """What brings a reader up to date that has everything before `start`."""
        oldest = self._buffer[0][0] if self._buffer else self.next_sequence
        if oldest <= start <= self.next_sequence:
            return list(self._buffer)[start - oldest :]
        try:
            return [(self.next_sequence - 1, await self._snapshot())] if self.next_sequence else []
        except KvholdError as error:
            self.note(f"no snapshot for a replay from {start}: {error}")
            return []

    async def _snapshot(self) -> bytes:
        """All that is cached, as one batch."""
        form = await self._event_format()
        events: list[EngineEvent] = []
        async for message in self._watch(event_pb2.EventCursor()):
            events += form.events_of(message)
            if message.snapshot.ends:
                return self._batch(message, events)
        return self._batch(event_pb2.WatchEventsResponse(), [CLEARED])

    async def _reply(self, client: bytes, topic: bytes, sequence: bytes, payload: bytes) -> None:
        head = [client, b"", topic] if self.settings.replay_with_topic else [client, b""]
        await self._router.send_multipart([*head, sequence, payload])

    # -------------------------------------------------------------------- daemon
    async def _event_format(self) -> EventFormat:
        """Groups may have changed: the pool may be another one of the same name."""
        assert self._channel is not None
        stub = pool_pb2_grpc.PoolServiceStub(self._channel)
        try:
            answer = await stub.GetPool(pool_pb2.GetPoolRequest(name=self.settings.pool), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise typed_error(error, self.settings.target) from None
        hash_of = raw_hash if self.settings.raw_hashes else event_hash
        return EventFormat(groups=decode_shape(answer.pool).groups, medium=self.settings.medium, hash_of=hash_of)

    async def _watch(self, after: event_pb2.EventCursor) -> AsyncIterator[event_pb2.WatchEventsResponse]:
        assert self._channel is not None
        request = event_pb2.WatchEventsRequest(pool=self.settings.pool)
        if after.boot_id:
            request.after.CopyFrom(after)
        stream = event_pb2_grpc.EventServiceStub(self._channel).WatchEvents(request)
        try:
            async for message in stream:
                yield message
        except grpc.aio.AioRpcError as error:
            raise typed_error(error, self.settings.target) from None
        finally:
            stream.cancel()

    def _bound(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointTaken(f"cannot listen on {endpoint}: {error}; choose another port, or 0 for any") from None
        return socket
