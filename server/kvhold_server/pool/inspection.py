"""Full dumps of a pool, and the invariants that every test checks after every step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvhold_server.pool.session import SessionState
from kvhold_server.pool.values import Completed, State

if TYPE_CHECKING:
    from kvhold_server.pool.pool import Pool


def describe_pool(pool: Pool) -> State:
    """Everything that decides what happens next; O(blocks)."""
    store = pool.store
    cache = []
    for gid, index in enumerate(store.index):
        for key, block in index.items():
            cache.append((key, gid, list(store.copies[gid].get(key, [block]))))
    tables = {
        (owner.serial, sequence_id): [table.copy() for table in sequence.tables]
        for owner in pool.tenures.sessions.values()
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


def published_blocks(pool: Pool) -> Completed:
    """Blocks whose hash is public, by id."""
    store = pool.store
    found = Completed(groups=[], blocks=[], hashes=[], key_tokens=[])
    for block, (key, origin) in enumerate(zip(store.key_of, store.origin_of, strict=True)):
        if key is not None and origin is not None and origin.is_public:
            found.groups.append(origin.group)
            found.blocks.append(block)
            found.hashes.append(key)
            found.key_tokens.append(store.key_tokens[block])
    return found


def check_pool(pool: Pool) -> None:
    """Asserts the invariants I1 to I10 of docs/blocks.md; O(blocks)."""
    store = pool.store
    store.free.check_invariants()
    free = set(store.free.order())
    assert 0 not in free, "the null block is free"
    assert store.refs[0] == 0, "the null block is referenced"
    assert store.key_of[0] is None, "the null block has a hash"
    usable = range(1 + store.num_reserved, store.num_blocks)
    for block in usable:
        assert (store.refs[block] == 0) == (block in free), f"block {block}: {store.refs[block]} references"
    held: Counter[int] = Counter()
    for owner in pool.tenures.sessions.values():
        for sequence in owner.sequences.values():
            for table in sequence.tables:
                held.update(block for block in table if block)
        for open_step in owner.open_steps:
            held.update(open_step.copy_ends)
    for block in usable:
        assert store.refs[block] == held[block], f"block {block}: {store.refs[block]} references, {held[block]} holders"
    _check_index(pool, free)
    store.fences.check_invariants(free)
    dead: Counter[int] = store.dead_refs
    assert store.num_quarantined == sum(store.refs[block] == num for block, num in dead.items())
    counts = pool.counts()
    parts = counts.free + counts.cached + counts.held + counts.quarantined + counts.reserved + counts.null
    assert parts == counts.total and min(counts.free, counts.cached, counts.held, counts.quarantined) >= 0, counts


def _check_index(pool: Pool, free: set[int]) -> None:
    store = pool.store
    named: dict[int, set[tuple[int, bytes]]] = {}
    for gid, index in enumerate(store.index):
        for key, first in index.items():
            blocks = store.copies[gid].get(key, [first])
            assert blocks[0] == first and len(set(blocks)) == len(blocks)
            for block in blocks:
                named.setdefault(block, set()).add((gid, key))
        for key, blocks in store.copies[gid].items():
            assert len(blocks) > 1 and key in index
    num_cached = 0
    for block, own_key in enumerate(store.key_of):
        origin = store.origin_of[block]
        assert (own_key is None) == (origin is None)
        if own_key is None or origin is None:
            assert block not in named and block not in store.secondary, f"block {block} is named without a hash"
            continue
        num_cached += block in free
        names = {(origin.group, name) for name in (own_key, *store.secondary.get(block, ()))}
        assert named.get(block) == names, f"block {block}: {named.get(block)} instead of {names}"
    assert store.num_cached == num_cached, (store.num_cached, num_cached)
    open_origins = {
        origin
        for owner in pool.tenures.sessions.values()
        for open_step in owner.open_steps
        for origin in open_step.origins.values()
    }
    assert store.num_provisional == len(open_origins)
    for origin in open_origins:
        assert origin.num_blocks == sum(other is origin for other in store.origin_of), "provisional blocks"
    assert store.num_provisional_blocks == sum(origin.num_blocks for origin in open_origins)
    for owner in pool.tenures.sessions.values():
        assert owner.state is not SessionState.ALIVE or owner.completed_step <= owner.step
