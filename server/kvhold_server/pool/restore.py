"""Filling a new pool from what a former daemon recorded: cached blocks, then what its sessions say that they hold.

    empty pool ── restore_cached ─▶ recorded blocks are free and findable
               ── reassert ───────▶ sessions of the former daemon hold their tables again

    recorded   block 7: group 0, hash h         free list: 1 2 3 … | 7 9 (least recently used first)
    session    "I hold [5, 7], hashes g h"      5 has no record: it was this session's own, and is now
                                                7 is recorded under h at this place: held, and shared

A sequence is given back whole or not at all. It is lost where a block is recorded under another hash than the session
believes, or has no record and is held by a sequence that believes something else of it. Losing one is harmless: its
session admits it again and hits what is recorded.

Sequences with states are given back, too. What their kind remembers beside the table is either plain from the table
(the running state is its last entry, drafts' states follow it) or only about hashes that end inside a block, which
nobody finds after a restart anyway. Nothing of theirs is published here: which token an unrecorded state stands for
is known only to the step that wrote it.

    table said   [0 0 a b c b' c']    drafts' blocks b c moved along: the client may still have them at both places
    table held   [0 0 a 0 0 b' c']    offered: up to the running state, and what is recorded behind
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from kvhold_server.domain.errors import PreconditionFailed
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.origin import Origin
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.session import PoolSession
from kvhold_server.pool.values import Completed

_RECOVERED = 0  # serial of nobody: hits on recovered blocks count as shared


@dataclass(eq=False)
class SequenceNotRestored(PreconditionFailed):
    """After a restart a sequence could not be given back to its session: it is lost, and may be admitted again."""

    template = "sequence {sequence_id} is lost: {problem}"
    sequence_id: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSequence:
    """What a session says it holds."""

    sequence_id: int
    num_tokens: int
    num_prompt_tokens: int
    publish_tokens: int  # computed by steps that are complete
    tables: list[list[int]]  # per group, positional; 0 = null
    hashes: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasserted:
    """What became of it."""

    lost: dict[int, SequenceNotRestored]
    completed: Completed  # blocks that were published (again): what a recovery record may say


class _Rows(NamedTuple):
    """Recorded blocks of one group: parallel columns, blocks ascending."""

    blocks: list[int]
    hashes: list[bytes]
    key_tokens: array[int]

    def between(self, first: int, end: int) -> _Rows:
        """Those of blocks first .. end − 1; itself if that is all."""
        low, high = bisect_left(self.blocks, first), bisect_left(self.blocks, end)
        if high - low == len(self.blocks):
            return self
        return _Rows(self.blocks[low:high], self.hashes[low:high], self.key_tokens[low:high])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlocks:
    """What a former daemon recorded: parallel columns, blocks ascending."""

    blocks: list[int]
    groups: SequenceOf[int]
    hashes: list[bytes]
    key_tokens: array[int]  # of C's int, as a pool keeps them: length of the prefix that the hash stands for

    def by_group(self) -> Iterator[tuple[int, _Rows]]:
        """Rows of each group; the columns themselves where there is only one."""
        groups = self.groups
        if groups and groups.count(groups[0]) == len(groups):
            yield groups[0], _Rows(self.blocks, self.hashes, self.key_tokens)
            return
        for group in sorted(set(groups)):
            picked = [of == group for of in groups]
            blocks, hashes = list(compress(self.blocks, picked)), list(compress(self.hashes, picked))
            yield group, _Rows(blocks, hashes, array("i", compress(self.key_tokens, picked)))


def restore_cached(pool: Pool, recorded: RecordedBlocks) -> list[int]:
    """Makes recorded blocks findable in a pool that nobody uses yet; `restore_order` must follow: it frees them.

    Returns blocks that were not taken, because this pool has no place for them. O(blocks of the pool).
    """
    store, config = pool.store, pool.config
    assert store.free.count == config.num_blocks - 1 - config.num_reserved_low_blocks and not store.num_cached
    first, end = 1 + config.num_reserved_low_blocks, config.num_blocks
    refused: list[int] = []
    for group, rows in recorded.by_group():
        fits = group < len(config.groups) and config.enable_caching and config.groups[group].prefix_cacheable
        taken = rows.between(first, end if fits else first)
        if len(taken.blocks) < len(rows.blocks):
            refused += sorted(set(rows.blocks).difference(taken.blocks))
        if taken.blocks:
            _publish(store, group, taken)
    store.num_cached = len(recorded.blocks) - len(refused)
    store.has_others = True
    store.version += 1
    return refused


def restore_order(pool: Pool, order: list[int]) -> None:
    """In which order the restored blocks are given away: least recently used first, behind those without a hash."""
    store, config = pool.store, pool.config
    first, end, key_of = 1 + config.num_reserved_low_blocks, config.num_blocks, pool.store.key_of
    is_full = store.num_cached == end - first
    cached = order if len(order) == store.num_cached else [b for b in order if b < end and key_of[b] is not None]
    assert len(cached) == store.num_cached, "it names all that were restored"
    store.free.refill([] if is_full else [block for block in range(first, end) if key_of[block] is None], cached)


def _publish(store: BlockStore, group: int, rows: _Rows) -> None:
    """Gives blocks their hashes, visible to everybody. There may be a million: no object for each here."""
    origin = Origin(group, _RECOVERED, 0)
    origin.is_public = True
    blocks, hashes = rows.blocks, rows.hashes
    first, end = blocks[0], blocks[-1] + 1
    if end - first == len(blocks):
        store.key_of[first:end] = hashes
        store.origin_of[first:end] = [origin] * len(blocks)
        store.key_tokens[first:end] = rows.key_tokens
    else:
        key_of, origin_of, tokens_of = store.key_of, store.origin_of, store.key_tokens
        for block, key, tokens in zip(blocks, hashes, rows.key_tokens, strict=True):
            key_of[block] = key
            origin_of[block] = origin
            tokens_of[block] = tokens
    index = store.index[group]
    index.update(zip(reversed(hashes), reversed(blocks), strict=True))  # of several blocks the first one counts
    if len(index) < len(blocks):
        copies: dict[bytes, list[int]] = {}
        for block, key in zip(blocks, hashes, strict=True):
            copies.setdefault(key, []).append(block)
        store.copies[group].update((key, alike) for key, alike in copies.items() if len(alike) > 1)


def reassert(pool: Pool, session: int, held: Iterable[HeldSequence], *, is_outdated: bool = False) -> Reasserted:
    """Gives sequences back to a session that holds nothing yet; nothing may have been allocated since the restart.

    `is_outdated`: what they wrote may be of contents that were replaced: they publish nothing any more.
    """
    owner = pool._alive(session)
    assert not owner.sequences, "a session re-asserts once"
    lost: dict[int, SequenceNotRestored] = {}
    beliefs = _Beliefs(pool)
    claimed: set[int] = set()  # blocks without a record that nobody had claimed before
    for said in held:
        sequence = _sequence(pool, said)
        sequence.is_stale = is_outdated
        try:
            _check(pool, owner, sequence, beliefs)
        except SequenceNotRestored as error:
            lost[said.sequence_id] = error
            continue
        claimed |= _hold(pool, owner, sequence)
        beliefs.add(sequence)
        if not is_outdated and not pool.groups.has_states:  # with states its next step publishes what is missing
            pool.groups.publish(sequence, said.publish_tokens, pool._turn(owner))
    pool.store.free.remove_plain(claimed)
    pool.store.version += 1
    return Reasserted(lost=lost, completed=pool.complete(session, owner.step))


def reassert_again(pool: Pool, session: int, held: Iterable[HeldSequence]) -> list[int]:
    """The session did nothing since, and did not get the answer: returns what it lost. Others may have allocated since,
    so nothing more is given; what it holds otherwise than it says is let go.
    """
    owner = pool._alive(session)
    lost = []
    for said in held:
        known = owner.sequences.get(said.sequence_id)
        if known is not None and known.tables == _sequence(pool, said).tables:
            continue
        if known is not None:
            pool.departure.free(pool._turn(owner), said.sequence_id, 0, [], fence_own=False)
        lost.append(said.sequence_id)
    return lost


class _Beliefs:
    """What sequences that came back say of their blocks without a record. Made when the first one is claimed twice."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._hash_of: dict[int, tuple[int, bytes]] | None = None  # block → group, hash

    def of(self, block: int) -> tuple[int, bytes] | None:
        """None: nobody says; it is the last one of a sequence, and not full."""
        if self._hash_of is None:
            self._hash_of = {}
            for owner in self._pool.tenures.sessions.values():
                for sequence in owner.sequences.values():
                    self._note(sequence, self._hash_of)
        return self._hash_of.get(block)

    def add(self, sequence: Sequence) -> None:
        """One more came back."""
        if self._hash_of is not None:
            self._note(sequence, self._hash_of)

    def _note(self, sequence: Sequence, hash_of: dict[int, tuple[int, bytes]]) -> None:
        for policy, table in zip(self._pool.groups.policies, sequence.tables, strict=True):
            if policy.config.prefix_cacheable:
                view = sequence.block_hashes(policy.stride)
                hash_of.update((block, (policy.gid, key)) for block, key in zip(table, view, strict=False) if block)


def _check(pool: Pool, owner: PoolSession, sequence: Sequence, beliefs: _Beliefs) -> None:
    """Raises SequenceNotRestored; changes nothing."""
    config, store = pool.config, pool.store

    def refuse(problem: str) -> SequenceNotRestored:
        return SequenceNotRestored(sequence.sequence_id, problem)

    if sequence.sequence_id in owner.sequences:
        raise refuse("it is named twice")
    if len(sequence.tables) != len(config.groups):
        raise refuse(f"{len(sequence.tables)} tables for {len(config.groups)} groups")
    blocks = [block for table in sequence.tables for block in table if block]
    if len(set(blocks)) < len(blocks):
        raise refuse("a block stands in it twice")
    for policy, table in zip(pool.groups.policies, sequence.tables, strict=True):
        view = sequence.block_hashes(policy.stride) if policy.config.prefix_cacheable else []
        for i, block in enumerate(table):
            if not block:
                continue
            if not config.num_reserved_low_blocks < block < config.num_blocks:
                raise refuse(f"block {block} does not exist")
            key, origin = store.key_of[block], store.origin_of[block]
            if key is None or origin is None:
                if store.refs[block] and (i >= len(view) or beliefs.of(block) != (policy.gid, view[i])):
                    raise refuse(f"block {block} is held by another sequence, with other contents")
            elif origin.group != policy.gid or not (
                (i < len(view) and view[i] == key) or policy.may_lag(view[:i], key)
            ):
                raise refuse(f"block {block} is recorded with other contents")


def _hold(pool: Pool, owner: PoolSession, sequence: Sequence) -> set[int]:
    """Makes the tables the session's; returns the blocks that are still in the free list, without a record."""
    store = pool.store
    owner.sequences[sequence.sequence_id] = sequence
    unclaimed: set[int] = set()
    for policy, table in zip(pool.groups.policies, sequence.tables, strict=True):
        fresh = {block for block in table if block and store.key_of[block] is None and not store.refs[block]}
        store.hold([block for block in table if block and block not in fresh])
        for block in fresh:
            store.refs[block] = 1
        unclaimed |= fresh
        policy.take_up(sequence)
    return unclaimed


def _sequence(pool: Pool, said: HeldSequence) -> Sequence:
    sequence = Sequence(said.sequence_id, len(pool.config.groups))
    sequence.tables = [list(table) for table in said.tables]
    if len(said.tables) == len(pool.groups.policies):  # else it is refused
        sequence.tables = [p.as_held(table) for p, table in zip(pool.groups.policies, said.tables, strict=True)]
    sequence.hashes = list(said.hashes)
    sequence.num_tokens = said.num_tokens
    # Who does not say where the prompt ends must not have a state taken for the one at its end: that end is past, then.
    unsaid = max(said.publish_tokens, 1) if pool.groups.has_states else said.num_tokens
    sequence.num_prompt_tokens = said.num_prompt_tokens or unsaid
    return sequence
