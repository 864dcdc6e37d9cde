"""State layers (mamba and relatives): what matters is the state at one boundary, not the tokens before it.

Modes "none" and "all" use an ordinary table of which only the last block(s) stay while the sequence runs. In mode
"align" entry `i` is the state after (i + 1) * block tokens, the running state lives in the last 1 + s entries (s for
drafts), and everything between is null:

    prefill of 80 tokens, block 16, s = 0, one chunk     [0 0 0 0 a]
    the next chunk, up to 112                            [0 0 0 0 a 0 b]     a is read, b is written; then a is let go

A prompt that ends inside a block leaves a state at its last hash unit. That block goes on being written, so the state
is copied away before it is, and its hash moves to the copy:

    prompt 41, unit 4: state after 40 in block 5, hash(40) → 5;  next step: copy 5 → 6, hash(40) → 6

Such a state is hit by other sessions only while nobody holds its block: their kernels know no order with its holder's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvhold_server.domain.pool_config import GroupConfig, PoolConfig
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.kinds.base import Found, GroupPolicy, Prefix, cdiv
from kvhold_server.pool.kinds.full import publish_partial
from kvhold_server.pool.kinds.sliding_window import reachable_ends
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import Copy, HandOff


class MambaPolicy(GroupPolicy):
    """Modes "none" and "all"."""

    skips = True
    finds_units = True
    is_drop_free = True
    grows_plainly = False
    publishes_plainly = False
    wants_zeroing = False

    def __init__(self, gid: int, config: GroupConfig, pool: PoolConfig, store: BlockStore) -> None:
        super().__init__(gid, config, pool, store)
        self.num_spec = config.num_speculative_blocks
        self.extra_tokens = self.num_spec * config.block_size_tokens

    @property
    def is_dense(self) -> bool:
        return self.pool.retention_interval_tokens is None

    def skipped_tokens(self, processed: int) -> int:
        return processed - 1

    def find(self, prefix: Prefix, groups: Seq[int], limit: int, drop: bool, align: int) -> Found:
        """The last boundary whose state is cached."""
        size, unit = self.block_tokens, self.pool.hash_unit_tokens
        is_fine = align < size
        step = unit if is_fine else size
        view = prefix.sequence.hashes if is_fine else prefix.sequence.block_hashes(self.stride)
        for i in range(min(limit // step, len(view)) - 1, -1, -1):
            tokens = (i + 1) * step
            if tokens % align:
                continue
            found = prefix.at(groups, view[i])
            if found is not None and not (tokens % size and self._is_written_on(found, prefix.session)):
                padding = [0] * ((tokens - 1) // size)
                return Found([[*padding, block] for block in found], tokens)
        return Found([[] for _ in groups], 0)

    def _is_written_on(self, blocks: list[int], session: int) -> bool:
        """Of states inside blocks: another session holds one, so its next kernel overwrites it, or is yet to copy it.

        A session's own kernels run in order: what it hits is read before it is written on.
        """
        refs, origin_of = self.store.refs, self.prefixes.origin_of
        return any(refs[block] and origin_of[block].session != session for block in blocks)  # type: ignore[union-attr]

    def mask(self, sequence: Sequence, start: int, end: int) -> Seq[int] | None:
        """States once per retention interval, and those at which a later request can resume."""
        interval, size, align = self.pool.retention_interval_tokens, self.block_tokens, self.align_tokens
        if interval is None:
            return None
        kept: set[int] = set()
        if interval:
            per = interval // size
            if per <= 1:
                return None
            kept.update(i for i in range(start, end) if (i + 1) % per == 0)
        for boundary in reachable_ends(sequence, self.pool, self.any_eagle):
            block = boundary // align * align // size - 1
            if start <= block < end:
                kept.add(block)
        return sorted(kept)

    def need_admission(
        self, sequence: Sequence, hits: list[int], hit_tokens: int, total: int, slots: int, main: int, capped: bool
    ) -> int:
        return super().need_admission(sequence, hits, hit_tokens, total, slots + self.extra_tokens, main, capped)

    def need_growth(self, sequence: Sequence, slots: int, main: int, computed: int) -> int:
        return super().need_growth(sequence, slots + self.extra_tokens, main, computed)

    def grow(self, sequence: Sequence, slots: int, main: int, computed: int, turn: Turn) -> list[int]:
        return super().grow(sequence, slots + self.extra_tokens, main, computed, turn)


class _States:
    """What an aligned state group remembers of one sequence."""

    __slots__ = ("checkpoint", "end", "is_allocated", "pending", "planned", "released", "start", "untold")

    def __init__(self) -> None:
        self.is_allocated = False  # has its running state (and drafts') at the end of its table
        self.released = 0  # leading entries that were let go
        self.pending: tuple[int, int] | None = (
            None  # (entry, tokens): keyed in its middle, to be copied before it goes on
        )
        self.checkpoint: tuple[int, int] | None = None  # (entry, tokens): state that the kernel exports in this chunk
        self.planned: tuple[int, int] | None = None  # what the chunk being asked for would export; a refusal leaves it
        self.start = self.end = 0  # of the newest chunk
        self.untold: set[int] = set()  # entries that a chunk passed unpublished: nobody was told to leave a state there


class AlignedMambaPolicy(MambaPolicy):
    """Mode "align": states at block boundaries, at prompts' last units, at junctions and at checkpoints."""

    def _states(self, sequence: Sequence) -> _States:
        states = sequence.extra.get(self.gid)
        if states is None:
            states = sequence.extra[self.gid] = _States()
        assert isinstance(states, _States)
        return states

    # ---------------------------------------------------------------- growth
    def need_admission(
        self, sequence: Sequence, hits: list[int], hit_tokens: int, total: int, slots: int, main: int, capped: bool
    ) -> int:
        is_partial = bool(hits) and hit_tokens % self.block_tokens != 0
        refs = self.store.refs
        evictable = sum(1 for block in hits if block and not refs[block])
        length, loaded = len(hits), 0
        if total > hit_tokens:  # loaded from elsewhere: the state at its end only
            length = max(length, (total - 1) // self.block_tokens)
            loaded = cdiv(total, self.block_tokens) - length
        return self._need_new(sequence, length + loaded, main, total, is_partial) + loaded + evictable

    def need_growth(self, sequence: Sequence, slots: int, main: int, computed: int) -> int:
        if main <= 0:  # it only publishes
            return 0
        has_copy = self._states(sequence).pending is not None
        return self._need_new(sequence, len(sequence.tables[self.gid]), main, computed, has_copy)

    def _need_new(self, sequence: Sequence, length: int, main: int, start: int, with_copy: bool) -> int:
        """Blocks to draw when the table has `length` entries: at most a few, however long the chunk."""
        states = self._states(sequence)
        states.planned = self._plan_checkpoint(sequence, length, main, start)
        missing = max(cdiv(main, self.block_tokens) + self.num_spec - length, 0) + with_copy
        has_checkpoint = states.planned is not None
        top = 1 + with_copy + has_checkpoint
        if not states.is_allocated or has_checkpoint:
            top += self.num_spec
        return min(missing, top)

    def _plan_checkpoint(self, sequence: Sequence, length: int, main: int, start: int) -> tuple[int, int] | None:
        """Where this chunk's kernel can export a state in its middle: (entry, tokens)."""
        alignment, unit, size = self.config.checkpoint_alignment_tokens, self.pool.hash_unit_tokens, self.block_tokens
        if not alignment or not self.config.num_checkpoint_blocks:
            return None
        tokens = (main - 1) // unit * unit - (unit if self.any_eagle else 0)
        entry = cdiv(main, size) - 2
        is_inside = start % unit == 0 and start + unit <= tokens < main and (tokens - start) % alignment == 0
        if not is_inside or entry <= (start - 1) // size:
            return None
        if self.pool.retention_interval_tokens == 0:
            end_of_prefill = max(sequence.num_prompt_tokens, sequence.num_tokens - 1)
            if main < end_of_prefill:
                return None
        table = sequence.tables[self.gid]
        is_speculative = self._states(sequence).is_allocated and entry >= length - self.num_spec
        if entry < len(table) and table[entry] and not is_speculative:
            return None
        return entry, tokens

    def grow(self, sequence: Sequence, slots: int, main: int, computed: int, turn: Turn) -> list[int]:
        states = self._states(sequence)
        table = sequence.tables[self.gid]
        self._note_untold(sequence, states)
        if main <= 0:
            states.checkpoint = None
            return []
        new: list[int] = []
        if self.gid in sequence.tails:
            new.append(self._copy_tail(sequence, turn))
        elif states.pending is not None:
            self._preserve(sequence, states, turn)
        spec, length = self.num_spec, len(table)
        required = cdiv(main, self.block_tokens) + spec
        states.checkpoint, states.start, states.end = states.planned, computed, main
        has_checkpoint = states.checkpoint is not None
        if required > length or has_checkpoint:
            first = required - spec - 1 - has_checkpoint  # entries before it are null
            table += [0] * (first - length)
            if states.is_allocated and not has_checkpoint:
                for i in range(max(length - spec, 0), length):  # drafts' blocks move along, with their ids
                    if i >= required - spec - 1:
                        break
                    table.append(table[i])
                    table[i] = 0
            missing = required - len(table)
            if missing > 0:
                table += self.store.take(missing, turn.session)
            new += table[length:]
        states.is_allocated = True
        return new

    def _note_untold(self, sequence: Sequence, states: _States) -> None:
        """What the newest chunk passed unpublished: a later hash would not be that of the state there.

        With drafts a chunk is published once they are verified; its kernel leaves states at block ends unasked.
        """
        if not self.num_spec:
            first = max(states.start // self.block_tokens, sequence.offered[self.gid])
            table, running = sequence.tables[self.gid], cdiv(states.end, self.block_tokens) - 1
            states.untold.update(i for i in range(first, running) if table[i])

    def _preserve(self, sequence: Sequence, states: _States, turn: Turn) -> None:
        """The block goes on being written: its state, and its hashes, move to a copy."""
        assert states.pending is not None
        entry, tokens = states.pending
        states.pending = None
        source = sequence.tables[self.gid][entry]
        (target,) = self.store.take(1, turn.session)
        if self.store.key_of[source] is not None:
            self.prefixes.move_keys(source, target)
        self.store.refs[source] += 1  # by the copy; the target's only reference is the copy's, too
        turn.copy(Copy(group=self.gid, source=source, target=target))
        turn.gained.add(target)
        self._hand_off(sequence, target, tokens, turn)

    def release_skipped(self, sequence: Sequence, processed: int, turn: Turn) -> None:
        table = sequence.tables[self.gid]
        states = self._states(sequence)
        end = min((processed - 1) // self.block_tokens, len(table))
        if end <= states.released:
            return
        gone = [table[i] for i in range(end - 1, states.released - 1, -1) if table[i]]
        table[states.released : end] = [0] * (end - states.released)
        states.released = end
        if gone:
            turn.let_go(gone)

    # --------------------------------------------------------------- publish
    def publish(self, sequence: Sequence, tokens: int, turn: Turn) -> None:
        table = sequence.tables[self.gid]
        start = sequence.offered[self.gid]
        states = self._states(sequence)
        exported = -1 if states.checkpoint is None else states.checkpoint[0]
        super().publish(sequence, tokens, turn)
        for i in range(start, sequence.offered[self.gid]):
            block = table[i]
            if block and i in states.untold:
                self.prefixes.drop(block)
            elif block and i != exported and self.store.key_of[block] is not None:
                turn.gained.add(block)
                self._hand_off(sequence, block, (i + 1) * self.block_tokens, turn)
        if states.checkpoint is not None:
            self._publish_checkpoint(sequence, states, tokens, turn)
        elif turn.has_partials and tokens % self.block_tokens and self._ends_at(sequence, states, tokens):
            entry = tokens // self.block_tokens
            if entry < len(table) and table[entry]:
                publish_partial(self, sequence, table[entry], tokens, turn, replace=False)
                turn.gained.add(table[entry])
                states.pending = (entry, tokens)
                sequence.offered[self.gid] = entry

    def _prompt_end(self, sequence: Sequence) -> int:
        """The prompt's last whole unit; with a drafter the one before."""
        unit = self.pool.hash_unit_tokens
        return sequence.num_prompt_tokens // unit * unit - (unit if self.any_eagle else 0)

    def _ends_at(self, sequence: Sequence, states: _States, tokens: int) -> bool:
        """Is this a place inside a block whose state is worth keeping, and did a chunk end there?"""
        if tokens != states.end:
            return False
        if tokens == self._prompt_end(sequence):
            return True
        return (
            self.pool.keep_shared_prefix_checkpoints
            and tokens == sequence.boundary_tokens
            and states.start < tokens <= sequence.num_prompt_tokens
        )

    def _publish_checkpoint(self, sequence: Sequence, states: _States, tokens: int, turn: Turn) -> None:
        """The exported state is at a unit of its own choice, not at its block's end: it gets that hash instead."""
        assert states.checkpoint is not None
        entry, boundary = states.checkpoint
        states.checkpoint = None
        block = sequence.tables[self.gid][entry]
        wanted = (self._prompt_end(sequence), sequence.boundary_tokens)
        is_early = self.pool.retention_interval_tokens == 0 and tokens < sequence.num_prompt_tokens
        is_late = entry >= sequence.offered[self.gid]  # its chunk is not published with it
        is_nameless = is_late or boundary > len(sequence.hashes) * self.pool.hash_unit_tokens
        if is_nameless or (is_early and boundary not in wanted):
            self.prefixes.drop(block)
            return
        if boundary != (entry + 1) * self.block_tokens:  # with a drafter it may be the end of a block before
            publish_partial(self, sequence, block, boundary, turn, replace=True)
        elif self.store.key_of[block] is None:
            return
        turn.gained.add(block)
        self._hand_off(sequence, block, boundary, turn)

    def _hand_off(self, sequence: Sequence, block: int, tokens: int, turn: Turn) -> None:
        turn.output.hand_offs.append(
            HandOff(sequence_id=sequence.sequence_id, group=self.gid, block=block, boundary_tokens=tokens)
        )

    # --------------------------------------------------------------- restart
    def may_lag(self, earlier: Seq[bytes], key: bytes) -> bool:
        """A kernel exports the state of an end before into the entry that is there."""
        return key in earlier

    def as_held(self, table: list[int]) -> list[int]:
        """A draft's block stands where it was moved last; its client need not have noticed."""
        last = {block: i for i, block in enumerate(table)}
        return [block if last[block] == i else 0 for i, block in enumerate(table)]

    def take_up(self, sequence: Sequence) -> None:
        """The running state is the table's last entry, drafts follow. Nothing before it is offered again: it may be a
        state that the kernel exported inside its block.
        """
        table = sequence.tables[self.gid]
        self._states(sequence).is_allocated = True
        offered = max(len(table) - 1 - self.num_spec, self._end_of_shared(table))
        for i in range(offered, len(table)):
            if self.store.key_of[table[i]] is not None:
                offered = i + 1
        sequence.offered[self.gid] = offered
