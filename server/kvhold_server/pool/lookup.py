"""Looking up without admitting: how much of a prompt could be hit now. A hint, since nothing is pinned (R2).

by hashes alone            nothing is kept
with an id, not running    the hashes are remembered: its admission need not send them again
with the id of a running   its own hashes are taken
"""

from __future__ import annotations

from itertools import repeat

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.errors import BadCount
from kvhold_server.pool.groups import Groups, HitResult
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.session import PoolSession
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import Hit, LookupColumns
from kvhold_server.pool.waiting import cut


def hit_limit(num_tokens: int, max_hit_tokens: int) -> int:
    """At most num_tokens - 1: the last token must be computed to get the next one."""
    return num_tokens - 1 if max_hit_tokens < 0 else min(num_tokens - 1, max_hit_tokens)


class Lookup:
    """The lookups of one pool."""

    def __init__(self, config: PoolConfig, groups: Groups) -> None:
        self.config = config
        self.groups = groups

    def look_up_all(self, turn: Turn, columns: LookupColumns) -> None:
        """Answers all rows in the turn's output."""
        output = turn.output
        counts = columns.hash_counts or [0] * len(columns.sequence_ids)
        rows = zip(
            columns.sequence_ids,
            columns.num_tokens,
            counts,
            cut(columns.hashes, counts),
            columns.max_hit_tokens or repeat(-1),
            strict=False,
        )
        for i, (sequence_id, num_tokens, count, hashes, limit) in enumerate(rows):
            try:
                sequence = self._asked(turn.owner, sequence_id or None, None if count < 0 else hashes)
                hit = self._hit(turn.owner, sequence, num_tokens, hit_limit(num_tokens, limit))
                tokens, boundary = hit.tokens, hit.boundary_tokens
            except KvholdError as error:
                output.errors["lookup", i] = error
                tokens = boundary = 0
            output.lookup_hit_tokens.append(tokens)
            output.lookup_boundary_tokens.append(boundary)

    def look_up(
        self,
        owner: PoolSession,
        sequence_id: int | None,
        hashes: list[bytes] | None,
        num_tokens: int,
        max_hit_tokens: int,
    ) -> Hit:
        """One row, with the blocks, and what each group backs. Raises BadCount, HashesMissing."""
        sequence = self._asked(owner, sequence_id, hashes)
        limit = hit_limit(num_tokens, max_hit_tokens)
        hit = self._hit(owner, sequence, num_tokens, limit)
        return Hit(
            hit_tokens=hit.tokens,
            boundary_tokens=hit.boundary_tokens,
            blocks=hit.blocks,
            group_hit_tokens=self.groups.group_hit_tokens(sequence, owner.serial, limit)
            if self.config.enable_caching
            else [],
        )

    def _hit(self, owner: PoolSession, sequence: Sequence, num_tokens: int, limit: int) -> HitResult:
        if num_tokens < 1:
            raise BadCount("num_tokens", num_tokens, "must be at least 1")
        if not self.config.enable_caching:
            return HitResult(0, [[] for _ in self.groups.policies])
        return self.groups.lookup(sequence, owner.serial, limit)

    def _asked(self, owner: PoolSession, sequence_id: int | None, hashes: list[bytes] | None) -> Sequence:
        """The sequence of a lookup: a running one, one that was asked for before, or just these hashes."""
        num_groups = len(self.groups.policies)
        if sequence_id is None:
            sequence = Sequence(0, num_groups)
            sequence.hashes = hashes or []
            return sequence
        running = owner.sequences.get(sequence_id)
        if running is not None:
            return running
        sequence = owner.waiting(sequence_id, hashes, num_groups)
        owner.remember(sequence, self.config.max_remembered_refusals)
        return sequence
