"""Growing running sequences: what left a window goes, blocks for the slots come, what is known by now gets its hashes.

    slots 37, block 16      [ 5, 6 ]    ─▶ [ 5, 6, 9 ]       one block is missing, and is the answer
    none is free            [ 5, 6 ]       refused           nothing is drawn; the sequence keeps what it has

Three ways, for speed alone: a whole step of one plain group in bulk (together.py), tables that just grow with the
sequence, and any mixture of kinds, where each group counts before any draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.errors import BadCount, UnknownSequence
from kvhold_server.pool.groups import Groups
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.together import extend_together, is_plain
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import ExtendColumns, Status
from kvhold_server.pool.waiting import cut


class Growth:
    """The extends of one pool."""

    def __init__(self, config: PoolConfig, store: BlockStore, groups: Groups) -> None:
        self.config = config
        self.store = store
        self.groups = groups
        self._nothing: list[list[int]] = [[] for _ in config.groups]  # an answer; never changed

    def extend_all(self, turn: Turn, columns: ExtendColumns) -> bool:
        """Answers all rows in the turn's output. False: one was refused, those after it were not tried."""
        groups = self.groups
        if groups.is_plain and is_plain(columns) and extend_together(turn, columns, groups):
            return True
        output = turn.output
        status, counts, flat = output.extend_status, output.extend_counts, output.extend_blocks
        no_counts = [0] * len(groups.policies)
        nothing, ok = self._nothing, Status.OK
        for row in _rows(columns):
            try:
                new = self.extend(turn, *row)
            except KvholdError as error:
                output.errors["extend", len(status)] = error
                status.append(Status.ERROR)
                counts += no_counts
                continue
            if new is None:
                num_left = len(columns.sequence_ids) - len(status) - 1
                status += [Status.REFUSED, *[Status.NOT_TRIED] * num_left]
                counts += no_counts * (1 + num_left)
                return False
            status.append(ok)
            if new is nothing:
                counts += no_counts
            else:
                for blocks in new:
                    counts.append(len(blocks))
                    flat += blocks
        return True

    def extend(
        self,
        turn: Turn,
        sequence_id: int,
        slots: int,
        processed: int,
        publish: int,
        hashes: list[bytes],
        lookahead: int,
        computed: int,
        num_encoder_tokens: int,
        reserved: int,
    ) -> list[list[int]] | None:
        """One row: new table entries per group; None = refused. Raises UnknownSequence, BadCount."""
        sequence = turn.owner.sequences.get(sequence_id)
        if sequence is None:
            raise UnknownSequence(sequence_id)
        if slots < 0 or processed < 0 or publish < 0 or lookahead < 0 or num_encoder_tokens < 0 or reserved < 0:
            raise _bad_count(slots, processed, publish, lookahead, num_encoder_tokens, reserved)
        if slots > self.config.max_model_len:
            slots = self.config.max_model_len
        if hashes:
            sequence.hashes += hashes
        groups = self.groups
        for policy in groups.skipping:
            policy.release_skipped(sequence, processed, turn)
        new: list[list[int]] | None
        if not groups.plain_sizes:
            new = self._grow_each(turn, sequence, slots, slots - lookahead, computed, num_encoder_tokens, reserved)
        elif groups.is_single:
            new = self._grow_one(turn, sequence, slots, reserved)
        else:
            new = self._grow_plain(turn, sequence, slots, reserved)
        if new is None:
            if hashes:  # a refusal leaves no trace: the client sends them again when it asks again
                del sequence.hashes[-len(hashes) :]
            return None
        if publish and self.config.enable_caching and not sequence.is_stale:
            groups.publish(sequence, publish, turn)
        return new

    def _grow_one(self, turn: Turn, sequence: Sequence, slots: int, reserved: int) -> list[list[int]] | None:
        """One table, which just grows with the sequence."""
        table = sequence.tables[0]
        need = -(-slots // self.groups.plain_sizes[0]) - len(table)
        if need <= 0:
            return self._nothing
        if need > self.store.available(turn.session) - reserved:
            return None
        blocks = self.store.take(need, turn.session)
        table += blocks
        if turn.zeroing:
            turn.output.zero_blocks += blocks
        return [blocks]

    def _grow_plain(self, turn: Turn, sequence: Sequence, slots: int, reserved: int) -> list[list[int]] | None:
        """Several such tables: one draw for all groups, cut in their order."""
        sizes, tables = self.groups.plain_sizes, sequence.tables
        missing = [-(-slots // size) - len(table) for size, table in zip(sizes, tables, strict=True)]
        if max(missing) <= 0:
            return self._nothing
        need = sum(missing) if min(missing) >= 0 else sum(num for num in missing if num > 0)
        if need > self.store.available(turn.session) - reserved:
            return None
        blocks = self.store.take(need, turn.session)
        if turn.zeroing:
            turn.output.zero_blocks += blocks
        new, start = [], 0
        for num, table in zip(missing, tables, strict=True):
            if num < 0:
                num = 0
            drawn = blocks[start : start + num]
            start += num
            table += drawn
            new.append(drawn)
        return new

    def _grow_each(
        self, turn: Turn, sequence: Sequence, slots: int, main: int, computed: int, encoder: int, reserved: int
    ) -> list[list[int]] | None:
        """Any mixture of kinds: each counts, then each draws."""
        policies = self.groups.policies
        need = 0
        for policy in policies:
            need += policy.need_growth(sequence, encoder if policy.covers_encoder else slots, main, computed)
        if need > 0 and need > self.store.available(turn.session) - reserved:
            return None
        return [
            policy.grow(sequence, encoder if policy.covers_encoder else slots, main, computed, turn)
            for policy in policies
        ]


def _rows(columns: ExtendColumns) -> Iterator[tuple[int, int, int, int, list[bytes], int, int, int, int]]:
    """The arguments of `extend`, row by row."""
    return zip(
        columns.sequence_ids,
        columns.slots_needed,
        columns.processed_tokens,
        columns.publish_tokens or repeat(0),
        cut(columns.hashes, columns.hash_counts) if columns.hashes else repeat([]),
        columns.num_lookahead_tokens or repeat(0),
        columns.computed_tokens or columns.processed_tokens,
        columns.num_encoder_tokens or repeat(0),
        columns.reserved_blocks or repeat(0),
        strict=False,
    )


def _bad_count(slots: int, processed: int, publish: int, lookahead: int, encoder: int, reserved: int) -> BadCount:
    values = {
        "slots_needed": slots,
        "processed_tokens": processed,
        "publish_tokens": publish,
        "num_lookahead_tokens": lookahead,
        "num_encoder_tokens": encoder,
        "reserved_blocks": reserved,
    }
    name, value = next((name, value) for name, value in values.items() if value < 0)
    return BadCount(name, value, "must not be negative")
