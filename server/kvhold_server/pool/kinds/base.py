"""What every kind of group must answer. The defaults are those of full attention's bookkeeping; kinds override a few.

lookup     find             which leading tokens are backed, and by which blocks
admission  need_admission   blocks to draw, hits that leave the free list included
           adopt            phase one, all groups: pad, hold hits      (A6)
           take_external    phase one b: blocks for tokens that are loaded from elsewhere
growth     release_skipped  blocks that left the window               (A4)
           need_growth      blocks to draw                            (A5)
           grow             draw them                                 (A7)
publish    publish          offer full blocks to the index            (A8)
restart    as_held          a table that a client says it holds, as the kind keeps it
           may_lag          a block may have the hash of an earlier entry
           take_up          it is held again: what of it was offered, and what the kind remembers
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from kvhold_server.domain.pool_config import GroupConfig, PoolConfig
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.prefix_index import PrefixIndex
from kvhold_server.pool.runs import SHORTEST, read
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import Copy, Stored


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class Prefix:
    """The hashes of one lookup, as one session sees the index."""

    __slots__ = ("prefixes", "sequence", "session")

    def __init__(self, prefixes: PrefixIndex, sequence: Sequence, session: int) -> None:
        self.prefixes = prefixes
        self.sequence = sequence
        self.session = session

    def leading(self, groups: Seq[int], stride: int, count: int) -> list[list[int]]:
        """Per group the blocks of the longest run from the start, at most `count`, that all the groups have."""
        view = self.sequence.block_hashes(stride)
        if count < len(view):
            view = view[:count]
        rows = [self.prefixes.visible_prefix(group, view, self.session) for group in groups]
        if len(rows) > 1:
            shortest = min(map(len, rows))
            rows = [row[:shortest] for row in rows]
        return rows

    def at(self, groups: Seq[int], key: bytes) -> list[int] | None:
        """Per group the block with this hash, if all the groups have one."""
        found = [self.prefixes.find(group, key, self.session) for group in groups]
        return found if all(found) else None


class Found:
    """Result of a class's lookup: positional blocks per group, and the tokens that they back."""

    __slots__ = ("blocks", "tokens")

    def __init__(self, blocks: list[list[int]], tokens: int) -> None:
        self.blocks = blocks
        self.tokens = tokens


class GroupPolicy:
    """One group of one pool: how its kind uses blocks."""

    is_full = False  # any prefix of what it backs is backed, too
    finds_units = False  # can end a hit inside a block
    proves_prefix = True  # a hit rests on at least one block whose hash stands for the whole prefix
    is_drop_free = False  # an eagle group of this kind loses nothing
    publishes_plainly = True  # full blocks, and inside blocks at most what `publish` adds where there are partial ones
    skips = False  # lets go of blocks while the sequence runs
    grows_plainly = True  # a table covers the sequence's tokens, no more and no less
    covers_encoder = False  # its tables cover encoder tokens instead of the sequence's
    wants_zeroing = True  # new blocks are listed for zeroing where the pool needs that

    def __init__(self, gid: int, config: GroupConfig, pool: PoolConfig, store: BlockStore) -> None:
        self.gid = gid
        self.config = config
        self.pool = pool
        self.store = store
        self.prefixes = store.prefixes
        self.block_tokens = config.block_size_tokens
        self.stride = max(1, config.block_size_tokens // pool.hash_unit_tokens)
        self.is_eagle = False  # set by the hybrid: flagged, or all are
        self.align_tokens = pool.scheduler_block_tokens  # hits end at its multiples; set by the hybrid
        self.any_eagle = False
        self._is_dense = False
        self._ends = array("i")  # block_tokens, 2 * block_tokens, ... as far as the longest publishing came

    def settle(self) -> None:
        """The hybrid has set what depends on the other groups."""
        self._is_dense = self.is_dense

    @property
    def is_simple(self) -> bool:
        """Nothing of what kinds may do differently happens here; ask after `settle`."""
        return self._is_dense and self.publishes_plainly and self.grows_plainly and not self.skips and self.stride == 1

    # ---------------------------------------------------------------- lookup
    def find(self, prefix: Prefix, groups: Seq[int], limit: int, drop: bool, align: int) -> Found:
        """Longest backed prefix of at most `limit` tokens, a multiple of `align`, for all these groups of one spec."""
        raise NotImplementedError

    # ------------------------------------------------------------- admission
    def skipped_tokens(self, processed: int) -> int:
        """Leading tokens that are never read again once this many are processed."""
        return 0

    def cap_blocks(self) -> int | None:
        """Most blocks that a sequence ever holds at once (None: as many as its tokens need); for the gate only."""
        return None

    def need_admission(
        self, sequence: Sequence, hits: list[int], hit_tokens: int, total: int, slots: int, main: int, capped: bool
    ) -> int:
        """Blocks that an admission takes from the free count: new ones, and hits that are free now."""
        required = cdiv(slots, self.block_tokens)
        cap = self.cap_blocks() if capped else None
        if cap is not None and cap < required:
            required = cap
        skipped = self.skipped_tokens(total) // self.block_tokens
        new = max(required - max(skipped, len(hits)), 0)
        refs = self.store.refs
        used = hits[skipped:] if skipped else hits
        evictable = read(refs, self.store.runs.cut(used)).count(0) - used.count(0)  # the null block has no references
        return new + evictable + (hit_tokens % self.block_tokens != 0 and bool(hits))

    def adopt(self, sequence: Sequence, hits: list[int], hit_tokens: int, total: int) -> None:
        """Puts the hits into the table: null where they are skipped, held elsewhere."""
        table = sequence.tables[self.gid]
        skipped = self.skipped_tokens(total) // self.block_tokens
        if skipped:
            hits = hits[skipped:]
            table += [0] * skipped
        self.store.hold(hits)
        table += hits
        sequence.offered[self.gid] = len(table)
        if hits and hit_tokens % self.block_tokens and len(table) == cdiv(hit_tokens, self.block_tokens):
            sequence.offered[self.gid] = len(table) - 1
            sequence.tails[self.gid] = len(table) - 1  # its tail is another's: to be copied

    def take_external(self, sequence: Sequence, total: int, turn: Turn) -> None:
        """Blocks for tokens that something else fills."""
        table = sequence.tables[self.gid]
        missing = cdiv(total, self.block_tokens) - len(table)
        if missing > 0:
            table += self.store.take(missing, turn.session)

    # ---------------------------------------------------------------- growth
    def release_skipped(self, sequence: Sequence, processed: int, turn: Turn) -> None:
        """Lets go of blocks that no token from `processed` on reads; their entries become null."""
        skipped = self.skipped_tokens(processed)
        if skipped <= 0:
            return
        table = sequence.tables[self.gid]
        last = min(skipped // self.block_tokens, len(table))
        self._null_down(table, last, 0, turn)

    def _null_down(self, table: list[int], end: int, start: int, turn: Turn) -> None:
        """Nulls [start, end) from the end, down to the first null, and lets the blocks go in that order."""
        i = end
        while i > start and table[i - 1]:
            i -= 1
        if i < end:
            gone = table[i:end]
            table[i:end] = [0] * (end - i)
            gone.reverse()
            turn.let_go(gone)

    def need_growth(self, sequence: Sequence, slots: int, main: int, computed: int) -> int:
        """Blocks to draw so that a running sequence's table covers `slots` tokens."""
        missing = -(-slots // self.block_tokens) - len(sequence.tables[self.gid])
        return missing if missing > 0 else 0

    def grow(self, sequence: Sequence, slots: int, main: int, computed: int, turn: Turn) -> list[int]:
        """Draws what `need_growth` or `need_admission` counted; returns the new table entries."""
        table = sequence.tables[self.gid]
        new: list[int] = []
        if self.gid in sequence.tails:
            new.append(self._copy_tail(sequence, turn))
        missing = -(-slots // self.block_tokens) - len(table)
        if missing > 0:
            blocks = self.store.take(missing, turn.session)
            table += blocks
            new += blocks
            if turn.zeroing and self.wants_zeroing:
                turn.output.zero_blocks += blocks
        return new

    def _copy_tail(self, sequence: Sequence, turn: Turn) -> int:
        """The sequence writes into the block whose beginning it hit: it gets its own, to be filled by a copy."""
        position = sequence.tails.pop(self.gid)
        table = sequence.tables[self.gid]
        source = table[position]
        (target,) = self.store.take(1, turn.session)
        self.store.refs[target] += 1  # the copy holds it, too; the source keeps the reference of the hit
        table[position] = target
        turn.copy(Copy(group=self.gid, source=source, target=target))
        if self.wants_zeroing:
            turn.output.zero_blocks.append(target)
        return target

    # --------------------------------------------------------------- publish
    @property
    def is_dense(self) -> bool:
        """Every block can serve a hit: `mask` need not be asked."""
        return True

    def mask(self, sequence: Sequence, start: int, end: int) -> Seq[int] | None:
        """Blocks of [start, end) that can serve a hit; None = all."""
        return None

    def publish(self, sequence: Sequence, tokens: int, turn: Turn) -> None:
        """Offers every block that `tokens` known tokens fill, each once."""
        self.publish_full(sequence, tokens // self.block_tokens, turn)

    def publish_full(self, sequence: Sequence, end: int, turn: Turn) -> None:
        """Offers the blocks before `end` that were not offered yet."""
        start = sequence.offered[self.gid]
        if end <= start:
            return
        table = sequence.tables[self.gid]
        if end > len(table):
            end = len(table)
        sequence.offered[self.gid] = end
        view = sequence.hashes if self.stride == 1 else sequence.block_hashes(self.stride)
        kept = None if self._is_dense else self.mask(sequence, start, end)
        blocks = table[start:end]
        if kept is None and all(blocks):
            hashes = view[start:end]
            indices: list[int] | range = range(start, end)
        else:
            indices = [i for i in (range(start, end) if kept is None else kept) if table[i]]
            blocks = [table[i] for i in indices]
            hashes = [view[i] for i in indices]
        prefixes = self.prefixes
        if turn.has_partials:
            for block in blocks:
                if prefixes.key_of[block] is not None:
                    prefixes.drop(block)  # it ended inside this block; now it covers it
        size = self.block_tokens
        duplicates = 0
        if blocks:
            is_run = isinstance(indices, range)
            lengths = self._lengths(start, end) if is_run else [(i + 1) * size for i in indices]
            duplicates = prefixes.publish(self.gid, blocks, hashes, turn.origin(self.gid), lengths)
        if prefixes.events is not None and prefixes.tells_stored:
            prefixes.events.append(
                Stored(
                    group=self.gid,
                    hashes=hashes,
                    blocks=blocks,
                    indices=list(indices),
                    start_tokens=start * size,
                    end_tokens=end * size,
                    parent=view[start - 1] if start else None,
                    session=turn.session,
                    sequence_id=sequence.sequence_id,
                    num_duplicates=duplicates,
                )
            )

    def _lengths(self, start: int, end: int) -> Seq[int]:
        """Tokens that end with each of these blocks; those of a long stretch are at hand."""
        size, known = self.block_tokens, self._ends
        if end - start < SHORTEST:
            return range((start + 1) * size, end * size + 1, size)
        if len(known) < end:
            known.extend(range((len(known) + 1) * size, end * size + 1, size))
        return known[start:end]

    # --------------------------------------------------------------- restart
    def as_held(self, table: list[int]) -> list[int]:
        """What a client says after a restart, as this kind keeps it."""
        return list(table)

    def may_lag(self, earlier: Seq[bytes], key: bytes) -> bool:
        """Can a block be recorded under one of the hashes that belong to earlier entries?"""
        return False

    def take_up(self, sequence: Sequence) -> None:
        """Its table is held again. Hashes behind a gap are dropped: they are published again with what fills it, by one
        sequence only where several share a block.
        """
        table, key_of = sequence.tables[self.gid], self.prefixes.key_of
        offered = self._end_of_shared(table)
        while offered < len(table) and (not table[offered] or key_of[table[offered]] is not None):
            offered += 1
        sequence.offered[self.gid] = offered
        for block in table[offered:]:
            if block and not sequence.is_stale:
                self.store.drop_keys(block)

    def _end_of_shared(self, table: list[int]) -> int:
        """Behind the last block without a hash that another sequence holds, too: that one publishes it."""
        refs, key_of = self.store.refs, self.prefixes.key_of
        shared = (i for i in range(len(table) - 1, -1, -1) if refs[table[i]] > 1 and key_of[table[i]] is None)
        return next(shared, -1) + 1
