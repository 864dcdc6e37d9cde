"""Freeing running sequences: what was computed is published, then all blocks go, deepest first, group by group.

    tables [ 5, 6, 9 ] [ 0, 8 ]     lets go 9, 6, 5, then 8: of a prefix the end is evicted first

A sequence that was refused and never ran is just forgotten.
"""

from __future__ import annotations

from itertools import repeat

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.errors import BadCount, UnknownSequence
from kvhold_server.pool.groups import Groups
from kvhold_server.pool.tenure import Tenures
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import FreeColumns, Status
from kvhold_server.pool.waiting import cut


class Departure:
    """The frees of one pool."""

    def __init__(self, config: PoolConfig, store: BlockStore, groups: Groups, tenures: Tenures) -> None:
        self.config = config
        self.store = store
        self.groups = groups
        self.tenures = tenures

    def free_all(self, turn: Turn, columns: FreeColumns) -> None:
        """Answers all rows in the turn's output."""
        output, free_list = turn.output, self.store.free
        rows = zip(
            columns.sequence_ids,
            columns.computed_tokens or repeat(0),
            cut(columns.hashes, columns.hash_counts or [0] * len(columns.sequence_ids)),
            columns.fence_own or repeat(False),
            strict=False,
        )
        for i, (sequence_id, computed, hashes, fence_own) in enumerate(rows):
            num_free = free_list.count
            try:
                self.free(turn, sequence_id, computed, hashes, fence_own=fence_own)
                output.free_status.append(Status.OK)
            except KvholdError as error:
                output.free_status.append(Status.ERROR)
                output.errors["free", i] = error
            output.free_counts.append(free_list.count - num_free)

    def free(self, turn: Turn, sequence_id: int, computed: int, hashes: list[bytes], *, fence_own: bool) -> None:
        """One row. Raises UnknownSequence, BadCount."""
        owner = turn.owner
        sequence = owner.sequences.get(sequence_id)
        if sequence is None:
            if owner.refused.pop(sequence_id, None) is None:
                raise UnknownSequence(sequence_id)
            return
        if computed < 0:
            raise BadCount("computed_tokens", computed, "must not be negative")
        if hashes:
            sequence.hashes += hashes
        if computed and self.config.enable_caching and not sequence.is_stale:
            self.groups.publish(sequence, computed, turn)
        if fence_own:
            self.tenures.start_tracking()
        del owner.sequences[sequence_id]
        for table in sequence.tables:
            table.reverse()
            turn.let_go(table, fence_own=fence_own)
        if turn.output.hand_offs:
            turn.output.hand_offs = [h for h in turn.output.hand_offs if h.sequence_id != sequence_id]
