"""Full attention: every token is read for ever. Also MLA, sinks, and R-SWA (full prompt, window over the output).

hit: walk from the start until a block is missing; then, where hits may end inside a block, the longest known part of it

            hash unit 4, block 16        [####][####][##..]      two blocks and the entry at 40 tokens
                                          1..16 17..32 33..40     → hit 40; the third block is shared until written
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvhold_server.pool.kinds.base import Found, GroupPolicy, Prefix, cdiv
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import Stored


class FullPolicy(GroupPolicy):
    """Keeps everything."""

    is_full = True
    finds_units = True

    def find(self, prefix: Prefix, groups: Seq[int], limit: int, drop: bool, align: int) -> Found:
        size = self.block_tokens
        rows = prefix.leading(groups, self.stride, limit // size)
        tokens = len(rows[0]) * size
        if align < size and size % align == 0:
            tokens = self._find_tail(prefix, groups, rows, limit, tokens)
        if drop and tokens:
            tokens -= min(align, size)
        tokens -= tokens % align
        keep = cdiv(tokens, size)
        for row in rows:
            del row[keep:]
        return Found(rows, tokens)

    def _find_tail(self, prefix: Prefix, groups: Seq[int], rows: list[list[int]], limit: int, tokens: int) -> int:
        """Extends the rows by the longest known part of the first missing block; returns the tokens backed."""
        unit = self.pool.hash_unit_tokens
        hashes = prefix.sequence.hashes
        first = tokens // unit
        for u in range(min(first + self.stride - 1, limit // unit, len(hashes)) - 1, first - 1, -1):
            found = prefix.at(groups, hashes[u])
            if found is not None:
                for row, block in zip(rows, found, strict=True):
                    row.append(block)
                return (u + 1) * unit
        return tokens

    def publish(self, sequence: Sequence, tokens: int, turn: Turn) -> None:
        super().publish(sequence, tokens, turn)
        if turn.has_partials:
            self._publish_prompt_end(sequence, tokens, turn)

    def _publish_prompt_end(self, sequence: Sequence, tokens: int, turn: Turn) -> None:
        """The prompt's last whole unit may end inside a block: it gets a hash of its own."""
        unit, size = self.pool.hash_unit_tokens, self.block_tokens
        end = sequence.num_prompt_tokens // unit * unit
        table = sequence.tables[self.gid]
        if 0 < end <= tokens and end % size and end // size < len(table):
            publish_partial(self, sequence, table[end // size], end, turn, replace=False)


def publish_partial(
    policy: GroupPolicy, sequence: Sequence, block: int, tokens: int, turn: Turn, *, replace: bool
) -> None:
    """Names `block` by the prefix of `tokens` tokens, which ends inside it (§6 K4)."""
    prefixes, unit = policy.prefixes, policy.pool.hash_unit_tokens
    key = sequence.hashes[tokens // unit - 1]
    known = prefixes.has_key(policy.gid, block, key)
    if replace:
        prefixes.drop(block)
        known = False
    elif not known and prefixes.key_of[block] is not None and prefixes.key_tokens[block] < tokens:
        prefixes.drop(block)
    if known:
        return
    prefixes.publish_partial(block, key, turn.origin(policy.gid), tokens)
    if prefixes.events is not None and prefixes.tells_stored:
        prefixes.events.append(
            Stored(
                group=policy.gid,
                hashes=[key],
                blocks=[block],
                indices=[tokens // policy.block_tokens],
                start_tokens=tokens - unit,
                end_tokens=tokens,
                parent=sequence.hash_before(tokens - unit, unit),
                session=turn.session,
                sequence_id=sequence.sequence_id,
                is_partial=True,
            )
        )


class RswaPolicy(FullPolicy):
    """The prompt is kept, of the output only a window."""

    skips = True

    def release_skipped(self, sequence: Sequence, processed: int, turn: Turn) -> None:
        size, prompt = self.block_tokens, sequence.num_prompt_tokens
        table = sequence.tables[self.gid]
        end = min(max(prompt, processed - self.config.window_tokens) // size, len(table))
        start = cdiv(prompt, size)
        if start < end:
            self._null_down(table, end, start, turn)
