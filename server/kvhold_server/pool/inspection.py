"""Full dumps of a pool's blocks and tables; O(blocks)."""

from __future__ import annotations

from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.tenure import Tenures
from kvhold_server.pool.values import Completed, State


def describe_pool(store: BlockStore, tenures: Tenures) -> State:
    """Everything that decides what happens next."""
    cache = []
    for gid, index in enumerate(store.index):
        for key, block in index.items():
            cache.append((key, gid, list(store.copies[gid].get(key, [block]))))
    tables = {
        (owner.serial, sequence_id): [table.copy() for table in sequence.tables]
        for owner in tenures.sessions.values()
        for sequence_id, sequence in owner.sequences.items()
    }
    primaries = [
        (block, key, store.origin_of[block].group, store.key_tokens[block])  # type: ignore[union-attr]
        for block, key in enumerate(store.key_of)
        if key is not None
    ]
    return State(
        free_order=list(store.free.order()), refs=store.refs[1:], cache=cache, tables=tables, primaries=primaries
    )


def published_blocks(store: BlockStore) -> Completed:
    """Blocks whose hash is public, by id."""
    found = Completed(groups=[], blocks=[], hashes=[], key_tokens=[])
    for block, (key, origin) in enumerate(zip(store.key_of, store.origin_of, strict=True)):
        if key is not None and origin is not None and origin.is_public:
            found.groups.append(origin.group)
            found.blocks.append(block)
            found.hashes.append(key)
            found.key_tokens.append(store.key_tokens[block])
    return found
