"""Our events as the engines' own event streams have them, so that routers written for those need no change.

    batch   [seconds, [event, …], data-parallel rank]        an array
    event   {"type": "BlockStored", …}                       a map; fields without a default always, others if set
            {"type": "BlockRemoved", …}
            {"type": "AllBlocksCleared"}
    hash    unsigned integer of a digest's last eight bytes, or the digest

Differences that a reader may notice, all on purpose: removed means that the last copy is gone; stored means that every
session can hit it; `token_ids` are those of exactly the blocks named, and empty where the pool's events carry none.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvhold.v1 import event_pb2
from kvhold_client.bridge.cbor_values import cbor_value
from kvhold_client.hashing import event_hash
from kvhold_client.shape import GroupShape

EngineEvent: TypeAlias = dict[str, Any]
CLEARED: EngineEvent = {"type": "AllBlocksCleared"}
# Where a kind has two names: the engines' one.
KIND_WORDS = {
    "full": "full_attention",
    "mla": "mla_attention",
    "sink_full": "sink_full_attention",
    "rswa": "full_attention",
    "chunked_local": "chunked_local_attention",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFormat:
    """What the messages of one pool have in common."""

    groups: tuple[GroupShape, ...]
    medium: str = "GPU"
    hash_of: Callable[[bytes], int | bytes] = event_hash

    def stored(self, run: event_pb2.BlocksStored) -> EngineEvent:
        """A run of one prompt's blocks."""
        group = self.groups[run.group_id]
        event: EngineEvent = {
            "type": "BlockStored",
            "block_hashes": [self.hash_of(block_hash) for block_hash in run.block_hashes],
            "parent_block_hash": self.hash_of(run.parent_block_hash) if run.parent_block_hash else None,
            "token_ids": list(run.token_ids),
            "block_size": run.block_size_tokens,
            "lora_id": run.lora_id or None,
            "medium": self.medium,
            "lora_name": run.lora_name or None,
        }
        if run.extra_keys:
            event["extra_keys"] = [cbor_value(key) if key else None for key in run.extra_keys]
        event["group_idx"] = run.group_id
        event["kv_cache_spec_kind"] = KIND_WORDS.get(group.kind, group.kind)
        if group.sliding_window_tokens:
            event["kv_cache_spec_sliding_window"] = group.sliding_window_tokens
        if run.session_label:
            event["session_id"] = run.session_label
        return event

    def removed(self, run: event_pb2.BlocksRemoved) -> EngineEvent:
        """Hashes that can no longer be hit."""
        hashes = [self.hash_of(block_hash) for block_hash in run.block_hashes]
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": self.medium, "group_idx": run.group_id}

    def events_of(self, message: event_pb2.WatchEventsResponse) -> list[EngineEvent]:
        """One message of the stream. A snapshot begins by clearing what the reader had."""
        events: list[EngineEvent] = [CLEARED] if message.snapshot.begins else []
        events += map(self.stored, message.snapshot.stored)
        events += self._changes(message.events)
        return events

    def _changes(self, changes: Iterable[event_pb2.CacheEvent]) -> Iterable[EngineEvent]:
        for change in changes:
            if change.HasField("stored"):
                yield self.stored(change.stored)
            elif change.HasField("removed"):
                yield self.removed(change.removed)
            else:
                yield CLEARED


def raw_hash(block_hash: bytes) -> bytes:
    """For streams that carry whole digests."""
    return block_hash
