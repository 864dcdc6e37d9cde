"""Blocks allotted ahead: a session that has a pool to itself serves its own extends, and says so afterwards.

An allotment is a promise about the front of the free list, no holding: its blocks keep their places and their hashes,
so that what is evicted, and when, is the same as if each draw had been asked for in its own step.

    free list   7 9 4 2 8 …           allotted 7 9 4 2        nobody else takes or hits them
    client      draws 7 for A, 9 for B, in two steps, and says nothing
    next step   "drawn: A, B: 2"      7 and 9 leave the list, lose their hashes, and stand in the tables of A and B
                                      4 2 8 … is the free list as before, and allotted anew

Where the promise cannot be kept by doing nothing, its blocks are set aside: really taken, without hashes, because
nobody knows which of them the client has drawn and written to by now.

    allotted ── another session comes, the client is gone, or comes back ──▶ set aside ── next step ─▶ drawn, and the
                                                                                 │                     rest let go
                                                                                 └─────── dead ──────▶ quarantined
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.errors import DrawsDiffer, UnknownSequence
from kvhold_server.pool.groups import Groups
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.session import PoolSession
from kvhold_server.pool.tenure import Tenures
from kvhold_server.pool.together import publish_together
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import ExtendColumns
from kvhold_server.pool.waiting import cut

MAX_ALLOTTED_BLOCKS = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What a client drew, checked. Row i takes missing[i * num_groups + g] blocks for group g."""

    sequences: list[Sequence | None]  # None: lost in a restart, and its client knows
    missing: list[int]
    num_blocks: int


class Allotments:
    """What the sessions of one pool were promised."""

    def __init__(self, config: PoolConfig, store: BlockStore, groups: Groups, tenures: Tenures) -> None:
        self.config = config
        self.store = store
        self.groups = groups
        self.tenures = tenures
        # Tables that just grow, without duties: then a client knows what its extends take.
        self._is_possible = bool(groups.plain_sizes) and not (config.needs_zeroing or groups.has_states)

    def is_foreseeable(self, owner: PoolSession) -> bool:
        """Nobody but this session can change the free list, and its extends take from nothing but the front of it."""
        is_alone = len(self.tenures.sessions) == 1 and not self.store.tracking
        return self._is_possible and is_alone and not owner.set_aside

    def grant(self, owner: PoolSession, num_wanted: int) -> list[int]:
        """Promises at most so many blocks, until the session's next step; [] where that is not possible."""
        if self.is_foreseeable(owner):
            owner.allotted = self.store.free.front(min(num_wanted, MAX_ALLOTTED_BLOCKS))
        return owner.allotted

    def set_aside(self, owner: PoolSession) -> None:
        """The session has its allotted blocks from now on, drawn or not. O(allotment); at most one in a pool."""
        if owner.allotted:
            blocks = self.store.take(len(owner.allotted), owner.serial)
            assert blocks == owner.allotted, "the front of the free list has changed under an allotment"
            owner.set_aside, owner.allotted = blocks, []

    def check(self, owner: PoolSession, columns: ExtendColumns, num_drawn: int) -> Draws:
        """What the rows take, in order; changes nothing. Raises DrawsDiffer, UnknownSequence.

        Whoever was allotted nothing may only repeat what it has: after a restart, re-asserted tables are complete, and
        sequences that were lost are known to be.
        """
        num_allotted = len(owner.allotted) + len(owner.set_aside)
        sequences = list(map(owner.sequences.get, columns.sequence_ids))
        if num_allotted and None in sequences:
            raise UnknownSequence(columns.sequence_ids[sequences.index(None)])
        limit, slots = self.config.max_model_len, columns.slots_needed
        if slots and max(slots) > limit:
            slots = [min(wanted, limit) for wanted in slots]
        sizes = self.groups.plain_sizes
        is_usual = len(sizes) == 1 and len(set(columns.sequence_ids)) == len(sequences) and None not in sequences
        missing = _missing_once(sequences, slots, sizes[0]) if is_usual else _missing(sequences, slots, sizes)
        num_blocks = sum(missing)
        if num_blocks > num_allotted or (num_allotted and num_blocks != num_drawn):
            raise DrawsDiffer(num_drawn, num_blocks, num_allotted)
        return Draws(sequences=sequences, missing=missing, num_blocks=num_blocks)

    def take_up(self, turn: Turn, columns: ExtendColumns, draws: Draws) -> None:
        """Applies checked rows; whatever else was allotted or set aside is so no longer."""
        owner, num = turn.owner, draws.num_blocks
        rest: list[int] = []
        if owner.set_aside:
            blocks, rest = owner.set_aside[:num], owner.set_aside[num:]
            owner.set_aside = []
        else:
            blocks = self.store.take(num, owner.serial) if num else []
            assert blocks == owner.allotted[:num], "the front of the free list has changed under an allotment"
        owner.allotted = []
        if self.groups.is_plain and None not in draws.sequences:
            self._grow_together(turn, columns, draws, blocks)
        else:
            self._grow_each(turn, columns, draws, blocks)
        if rest:  # whose word is it? A client that came back may be another process: kernels of the first may run
            self.tenures.start_tracking()
            turn.let_go(rest, fence_own=True)

    def _grow_together(self, turn: Turn, columns: ExtendColumns, draws: Draws, blocks: list[int]) -> None:
        """One table each, which forgets nothing: what is drawn is free, what is published held, so the order between
        the two does not matter."""
        at, sequences = 0, draws.sequences
        for sequence, num in zip(sequences, draws.missing, strict=True):
            if num:
                sequence.tables[0] += blocks[at : at + num]  # type: ignore[union-attr]
                at += num
        if columns.hashes:
            for sequence, hashes in zip(sequences, cut(columns.hashes, columns.hash_counts), strict=True):
                if hashes:
                    sequence.hashes += hashes  # type: ignore[union-attr]
        if columns.publish_tokens and self.config.enable_caching:
            publish_together(turn, sequences, columns.publish_tokens, self.groups)  # type: ignore[arg-type]

    def _grow_each(self, turn: Turn, columns: ExtendColumns, draws: Draws, blocks: list[int]) -> None:
        """Row by row, as Growth does."""
        groups, caching, at = self.groups, self.config.enable_caching, 0
        num_groups = len(groups.plain_sizes)
        digests = list(cut(columns.hashes, columns.hash_counts)) if columns.hashes else []
        for i, sequence in enumerate(draws.sequences):
            if sequence is None:
                continue
            for policy in groups.skipping:
                policy.release_skipped(sequence, columns.processed_tokens[i], turn)
            for num, table in zip(draws.missing[i * num_groups : (i + 1) * num_groups], sequence.tables, strict=True):
                table += blocks[at : at + num]
                at += num
            if digests:
                sequence.hashes += digests[i]
            if columns.publish_tokens and caching and not sequence.is_stale:
                groups.publish(sequence, columns.publish_tokens[i], turn)

    def check_invariants(self) -> None:
        """An allotment is the front of the free list, and there is one at most. O(blocks)."""
        owners = [owner for owner in self.tenures.sessions.values() if owner.allotted]
        assert len(owners) <= 1
        for owner in owners:
            assert len(self.tenures.sessions) == 1 and not owner.set_aside
            order = self.store.free.order()
            assert [block for block, _ in zip(order, owner.allotted, strict=False)] == owner.allotted


def _missing_once(sequences: list[Sequence | None], slots: list[int], size: int) -> list[int]:
    """Of sequences that are all there and differ, with one table each."""
    rows = zip(sequences, slots, strict=True)
    return [
        num if (num := -(-wanted // size) - len(sequence.tables[0])) > 0 else 0  # type: ignore[union-attr]
        for sequence, wanted in rows
    ]


def _missing(sequences: list[Sequence | None], slots: list[int], sizes: list[int]) -> list[int]:
    """The same of any: a row finds the tables as the rows before it leave them."""
    lengths: dict[int, list[int]] = {}
    missing: list[int] = []
    for sequence, wanted in zip(sequences, slots, strict=True):
        if sequence is None:
            missing += repeat(0, len(sizes))
            continue
        have = lengths.setdefault(sequence.sequence_id, [len(table) for table in sequence.tables])
        for g, size in enumerate(sizes):
            num = max(0, -(-wanted // size) - have[g])
            have[g] += num
            missing.append(num)
    return missing
