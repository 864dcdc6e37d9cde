"""What WatchEvents must tell during a replay, derived from the recorded events by the three rules that part the two:

    told when the step is complete    not when the hash is given: nobody else can hit it before
    told once a hash                  stored with its first block, removed with its last one
    whole blocks only                 the hash of a part of a block is not told

The recorded events themselves are compared with those of the pool in this process, operation by operation.
"""

import time
from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc

from kvhold.v1 import event_pb2, event_pb2_grpc
from kvhold_server.pool.values import Event, Removed, Stored

HEARTBEAT_MS = 100
Change: TypeAlias = tuple[Any, ...]  # ("stored", group, hash, index), ("removed", group, hash), ("cleared",)


class ExpectedChanges:
    """Applies the rules."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], tuple[bytes, int]] = {}  # (group, block) → hash, index
        self._visible: dict[tuple[int, bytes], set[int]] = {}  # → blocks

    def of(self, events: Iterable[Event], *, is_complete: bool) -> list[Change]:
        """`is_complete`: everything published before these events is complete now."""
        changes: list[Change] = []
        if is_complete:
            for (group, block), (key, index) in self._pending.items():
                blocks = self._visible.setdefault((group, key), set())
                if not blocks:
                    changes.append(("stored", group, key, index))
                blocks.add(block)
            self._pending.clear()
        for event in events:
            if isinstance(event, Stored):
                if not event.is_partial:
                    for key, block, index in zip(event.hashes, event.blocks, event.indices, strict=True):
                        self._pending[event.group, block] = (key, index)
            elif isinstance(event, Removed):
                changes += self._removed(event)
            else:
                self._pending.clear()
                self._visible.clear()
                changes.append(("cleared",))
        return changes

    def _removed(self, event: Removed) -> Iterable[Change]:
        for key, block in zip(event.hashes, event.blocks, strict=True):
            if self._pending.get((event.group, block), (b"", 0))[0] == key:
                del self._pending[event.group, block]
                continue
            blocks = self._visible.get((event.group, key), set())
            if block in blocks:
                blocks.remove(block)
                if not blocks:
                    yield ("removed", event.group, key)


class StreamReader:
    """One WatchEvents stream and the index that it describes."""

    def __init__(self, channel: grpc.Channel, pool: str) -> None:
        request = event_pb2.WatchEventsRequest(pool=pool, heartbeat_interval_ms=HEARTBEAT_MS)
        self._stream = event_pb2_grpc.EventServiceStub(channel).WatchEvents(request)
        self.index: set[tuple[int, bytes]] = set()
        self._sequence = 0
        while not self._snapshot(next(self._stream)):
            pass

    def read(self, num_changes: int) -> list[Change]:
        """So many changes, or what comes until the daemon says that there is nothing more."""
        changes: list[Change] = []
        asked_at_ns = time.time_ns()
        while len(changes) < num_changes:
            message = next(self._stream)
            if not message.events and message.sent_at.ToNanoseconds() > asked_at_ns:
                break  # a heartbeat
            for event in message.events:
                assert event.sequence == self._sequence + 1, "a gap"
                self._sequence = event.sequence
                changes += self._applied(event)
        return changes

    def close(self) -> None:
        self._stream.cancel()

    def _snapshot(self, message: event_pb2.WatchEventsResponse) -> bool:
        self._sequence = message.cursor.sequence
        for run in message.snapshot.stored:
            self.index |= {(run.group_id, key) for key in run.block_hashes}
        return message.snapshot.ends

    def _applied(self, event: event_pb2.CacheEvent) -> Iterable[Change]:
        if event.HasField("cleared"):
            self.index.clear()
            yield ("cleared",)
        elif event.HasField("removed"):
            for key in event.removed.block_hashes:
                self.index.remove((event.removed.group_id, key))
                yield ("removed", event.removed.group_id, key)
        else:
            stored = event.stored
            for key, index in zip(stored.block_hashes, stored.block_indexes, strict=True):
                assert (stored.group_id, key) not in self.index, "stored twice"
                self.index.add((stored.group_id, key))
                yield ("stored", stored.group_id, key, index)
