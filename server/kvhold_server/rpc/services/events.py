"""EventService: a snapshot, then what changed, then a heartbeat; a reader that lags too far starts over.

Readers hold a number, not a buffer: each reads from the pool's one ring, at its own pace (gRPC's flow control stops the
loop below while a reader does not read). Whoever falls out of the ring gets `lost` and a new snapshot.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from kvhold.v1 import event_pb2 as pb
from kvhold.v1 import event_pb2_grpc
from kvhold_server.domain.errors import InvalidField
from kvhold_server.node.annotations import Annotation
from kvhold_server.node.errors import TooManyWatchers
from kvhold_server.node.event_log import ClearedAll, NumberedChange, RemovedRun, StoredRun
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.node import Node

NOTHING_KNOWN = Annotation()
MAX_EVENTS_IN_MESSAGE = 1024
MAX_DIGESTS_IN_CHUNK = 4096
MIN_HEARTBEAT_MS, MAX_HEARTBEAT_MS, DEFAULT_HEARTBEAT_MS = 100, 60_000, 5_000


class EventService(event_pb2_grpc.EventServiceServicer):
    """See the proto."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._num_watchers = 0

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        node = self._node
        heartbeat_ms = request.heartbeat_interval_ms or DEFAULT_HEARTBEAT_MS
        if not MIN_HEARTBEAT_MS <= heartbeat_ms <= MAX_HEARTBEAT_MS:
            rule = f"must be {MIN_HEARTBEAT_MS}..{MAX_HEARTBEAT_MS}, or 0"
            raise InvalidField("heartbeat_interval_ms", heartbeat_ms, rule)
        live = node.pool(request.pool)
        node.check_admitting()
        if self._num_watchers >= node.limits.max_watchers:
            raise TooManyWatchers(self._num_watchers, node.limits.max_watchers)
        self._num_watchers += 1
        try:
            async for message in self._follow(live, request.after, heartbeat_ms / 1000):
                yield message
        finally:
            self._num_watchers -= 1

    async def _follow(
        self, live: LivePool, after: pb.EventCursor, heartbeat_s: float
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        log = live.events
        live.follow()
        woken = asyncio.Event()
        log.watchers.append(woken.set)
        position = after.sequence if after.boot_id == self._node.boot_id else None
        try:
            while True:
                woken.clear()
                events = log.since(position) if position is not None else None
                if events is None:
                    position, is_lost = log.last_number, after.boot_id == self._node.boot_id or position is not None
                    log.num_losses += is_lost
                    for message in self._snapshot(live, position, is_lost):
                        yield message
                    continue
                for begin in range(0, len(events), MAX_EVENTS_IN_MESSAGE):
                    batch = events[begin : begin + MAX_EVENTS_IN_MESSAGE]
                    position = batch[-1].number
                    yield self._message(position, events=[encode_event(event, live) for event in batch])
                if live.is_deleted and position == log.last_number:
                    return
                if log.last_number == position and not await _woken_within(woken, heartbeat_s):
                    yield self._message(position)
        finally:
            log.watchers.remove(woken.set)

    def _snapshot(self, live: LivePool, number: int, is_lost: bool) -> Iterator[pb.WatchEventsResponse]:
        """The index as of `number`, in chunks; the first says that it begins, the last that it ends."""
        chunks, begins = _chunks(live.events.snapshot()), True
        chunk: list[StoredRun] | None = next(chunks, [])
        while chunk is not None:
            following = next(chunks, None)
            stored = [encode_stored(run, live) for run in chunk]
            snapshot = pb.SnapshotChunk(begins=begins, ends=following is None, stored=stored)
            yield self._message(number, lost=is_lost and begins, snapshot=snapshot)
            begins, chunk = False, following

    def _message(self, number: int, **fields: Any) -> pb.WatchEventsResponse:
        sent_at = Timestamp()
        sent_at.GetCurrentTime()
        cursor = pb.EventCursor(boot_id=self._node.boot_id, sequence=number)
        return pb.WatchEventsResponse(cursor=cursor, sent_at=sent_at, **fields)


async def _woken_within(woken: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(woken.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True


def _chunks(runs: Iterable[StoredRun]) -> Iterator[list[StoredRun]]:
    """Runs in lists of at most MAX_DIGESTS_IN_CHUNK digests."""
    chunk: list[StoredRun] = []
    size = 0
    for run in runs:
        if chunk and size + len(run.hashes) > MAX_DIGESTS_IN_CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(run)
        size += len(run.hashes)
    if chunk:
        yield chunk


def encode_stored(run: StoredRun, live: LivePool) -> pb.BlocksStored:
    """A run of digests that can be hit."""
    source = run.source or NOTHING_KNOWN
    return pb.BlocksStored(
        block_hashes=run.hashes,
        parent_block_hash=run.parent or b"",
        parent_unknown=run.parent is None,
        group_id=run.group,
        block_size_tokens=live.config.groups[run.group].block_size_tokens,
        block_indexes=run.indexes,
        block_ids=run.blocks,
        token_ids=run.token_ids,
        extra_keys=run.extra_keys,
        lora_id=source.lora_id,
        lora_name=source.lora_name,
        session_label=source.session_label,
    )


def encode_event(event: NumberedChange, live: LivePool) -> pb.CacheEvent:
    """One change with its number."""
    change = event.change
    if isinstance(change, StoredRun):
        return pb.CacheEvent(sequence=event.number, stored=encode_stored(change, live))
    if isinstance(change, RemovedRun):
        removed = pb.BlocksRemoved(block_hashes=change.hashes, group_id=change.group)
        return pb.CacheEvent(sequence=event.number, removed=removed)
    assert isinstance(change, ClearedAll)
    return pb.CacheEvent(sequence=event.number, cleared=pb.CacheCleared(reason=change.reason))
