"""Takes a step's answer into the sequences: their tables, and how long each may be silent from then on.

reply's columns ─▶ extends  plain: one paged group that keeps everything, nobody refused: no call per sequence
                │           else: windows forget, refused items are sorted out
                └▶ admits   whole tables
"""

from kvhold_client.results import ItemStatus
from kvhold_client.sequence import Sequence, SequenceState
from kvhold_client.shape import PoolShape
from kvhold_client.step import Columns
from kvhold_client.step_outcome import Admission, ExtendAsk, StepOutcome
from kvhold_client.step_reply import StepReply

_OK = int(ItemStatus.OK)
_UNKNOWN = int(ItemStatus.UNKNOWN_SEQUENCE)
_HOPELESS = frozenset({int(ItemStatus.NEVER_FITS), int(ItemStatus.INVALID), int(ItemStatus.SEQUENCE_EXISTS)})
# The daemon keeps the hashes of a waiting sequence that it looked at and refused, not of those that it did not reach.
_REMEMBERED = frozenset(
    int(status)
    for status in (
        ItemStatus.OUT_OF_BLOCKS,
        ItemStatus.HIT_CONFLICT,
        ItemStatus.STATE_NOT_READY,
        ItemStatus.QUOTA_EXCEEDED,
    )
)


class Mirror:
    """Knows the pool's shape and the step's number; changes the sequences that it is handed."""

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        self.step = 0
        self.completed_step = 0
        self.paged = [(g, group.block_size_tokens) for g, group in enumerate(shape.groups) if group.paged]
        self._forgetful = [(g, group) for g, group in enumerate(shape.groups) if group.forgets]
        self.forgets = bool(self._forgetful)
        is_plain = len(shape.groups) == len(self.paged) == 1 and not self._forgetful
        self.only_block_size = self.paged[0][1] if is_plain else 0  # 0: not that plain

    def take_extends(self, extending: list[Sequence], columns: Columns, reply: StepReply, outcome: StepOutcome) -> None:
        """Of the sequences that asked, in the order of their items."""
        statuses = reply.extend_statuses
        if self.only_block_size and statuses.count(_OK) == len(columns.rows):
            self._take_plain_extends(extending, columns, reply, outcome)
            return
        num_groups, at = self.shape.num_groups, 0
        counts, ids = reply.extend_num_new_blocks, reply.extend_block_ids
        for i, (sequence, status) in enumerate(zip(extending, statuses, strict=True)):
            if status != _OK:
                self._not_extended(i, sequence, status, columns, outcome)
                continue
            _, _, processed, publish, num_hashes = columns.rows[i]
            new = []
            for g, table in enumerate(sequence.tables):
                num = counts[i * num_groups + g]
                if num:
                    drawn = ids[at : at + num]
                    table += drawn
                    at += num
                    new.append(drawn)
                else:
                    new.append([])
            sequence.num_hashes_sent += num_hashes
            self._note_published(sequence, publish)
            self._settle(sequence, processed)
            outcome.extended.append(sequence)
            outcome.new_block_ids.append(new)

    def _take_plain_extends(
        self, extending: list[Sequence], columns: Columns, reply: StepReply, outcome: StepOutcome
    ) -> None:
        """The usual step, without a call per sequence."""
        at, size, ids = 0, self.only_block_size, reply.extend_block_ids
        counts, all_new = reply.extend_num_new_blocks, outcome.new_block_ids
        step, completed_step = self.step, self.completed_step
        for sequence, row, num in zip(extending, columns.rows, counts, strict=True):
            new = ids[at : at + num]
            at += num
            table = sequence.tables[0]
            table += new
            sequence.quiet_tokens = len(table) * size
            sequence.num_hashes_sent += row[4]
            publish = row[3]
            if publish > sequence.published_tokens:  # as _note_published
                if sequence.publish_step <= completed_step:
                    sequence.proven_tokens = sequence.published_tokens
                sequence.published_tokens, sequence.publish_step = publish, step
                if publish > sequence.num_tokens:
                    sequence.num_tokens = publish
            all_new.append([new])
        outcome.extended += extending

    def missing_blocks(self, sequence: Sequence, slots_needed: int) -> list[int]:
        """Per group, what an extend would take."""
        return [max(0, -(-slots_needed // size) - len(sequence.tables[g])) for g, size in self.paged]

    def releases_unpublished(self, sequence: Sequence, processed_tokens: int) -> bool:
        """Would blocks leave a window that were not said to be full, so that they have no hash yet?"""
        known = min(sequence.published_tokens, sequence.num_hashes * self.shape.hash_block_size_tokens)
        for g, group in self._forgetful:
            first_kept = min(group.skip_tokens(processed_tokens) // group.block_size_tokens, len(sequence.tables[g]))
            if first_kept > sequence.released[g] and first_kept * group.block_size_tokens > known:
                return True
        return False

    def take_plainly(self, sequence: Sequence, blocks: list[int], publish: int) -> None:
        """As `take_drawn`, in a pool of one group that forgets nothing."""
        table = sequence.tables[0]
        table += blocks
        sequence.quiet_tokens = len(table) * self.only_block_size
        if publish > sequence.published_tokens:  # as _note_published
            if sequence.publish_step <= self.completed_step:
                sequence.proven_tokens = sequence.published_tokens
            sequence.published_tokens, sequence.publish_step = publish, self.step
            if publish > sequence.num_tokens:
                sequence.num_tokens = publish

    def take_drawn(
        self, sequence: Sequence, missing: list[int], blocks: list[int], processed: int, publish: int
    ) -> list[list[int]]:
        """An extend that was served from the allotment; returns its new table entries, per group."""
        new, at = [], 0
        for table, num in zip(sequence.tables, missing, strict=True):
            drawn = blocks[at : at + num]
            at += num
            table += drawn
            new.append(drawn)
        self._note_published(sequence, publish)
        self._settle(sequence, processed)
        return new

    def _not_extended(self, i: int, sequence: Sequence, status: int, columns: Columns, outcome: StepOutcome) -> None:
        """Sorts out an item that was not applied; a refused one still gave up what had left its windows."""
        _, slots, processed, publish, _ = columns.rows[i]
        if status == _UNKNOWN:
            sequence.lose()
            outcome.lost.append(sequence)
            return
        if status in _HOPELESS:
            outcome.impossible.append(sequence)
            return
        if status != ItemStatus.NOT_TRIED:
            self._settle(sequence, processed)
        outcome.refused_extends.append(
            ExtendAsk(
                sequence=sequence,
                slots_needed=slots,
                processed_tokens=processed,
                publish_tokens=publish,
                options=columns.options_of(i),
            )
        )

    def take_admits(
        self, admitting: list[Sequence], num_hashes: list[int], reply: StepReply, outcome: StepOutcome
    ) -> None:
        """Of the sequences that asked; `num_hashes` is what each had at that time."""
        num_groups, at = self.shape.num_groups, 0
        num_blocks, block_ids = reply.admit_num_blocks, reply.admit_block_ids
        hits, grants = reply.admit_hit_tokens, reply.admit_granted_tokens
        for i, (sequence, status) in enumerate(zip(admitting, reply.admit_statuses, strict=True)):
            if status != _OK:
                self._not_admitted(sequence, status, num_hashes[i], outcome)
                continue
            tables = []
            for num in num_blocks[i * num_groups : (i + 1) * num_groups]:
                tables.append(block_ids[at : at + num])
                at += num
            hit, granted = hits[i], grants[i]
            sequence.tables, sequence.released = tables, [0] * num_groups
            sequence.state, sequence.is_known = SequenceState.RUNNING, True
            sequence.num_hashes_sent = num_hashes[i]
            self._note_published(sequence, hit + granted)
            self._settle(sequence, hit)
            outcome.admitted.append(Admission(sequence=sequence, hit_tokens=hit, granted_tokens=granted))

    @staticmethod
    def _not_admitted(sequence: Sequence, status: int, num_hashes: int, outcome: StepOutcome) -> None:
        if status == _UNKNOWN:
            sequence.num_hashes_sent, sequence.is_known = 0, False
        elif status in _REMEMBERED:
            sequence.num_hashes_sent, sequence.is_known = num_hashes, True
        if status in _HOPELESS:
            outcome.impossible.append(sequence)
            return
        if outcome.admit_refusal is None:
            outcome.admit_refusal = ItemStatus(status)
        outcome.not_admitted.append(sequence)

    def _settle(self, sequence: Sequence, processed_tokens: int) -> None:
        """After a change of tables: forgets what left the windows, and computes how long the sequence may be silent."""
        tables = sequence.tables
        if self.only_block_size:
            sequence.quiet_tokens = len(tables[0]) * self.only_block_size
            return
        quiet = min((len(tables[g]) * size for g, size in self.paged), default=0)
        for g, group in self._forgetful:
            table, released = tables[g], sequence.released[g]
            first_kept = min(group.skip_tokens(processed_tokens) // group.block_size_tokens, len(table))
            if first_kept > released:
                table[released:first_kept] = [0] * (first_kept - released)
                sequence.released[g] = released = first_kept
            quiet = min(quiet, group.next_release_tokens(released))
        sequence.quiet_tokens = quiet

    def _note_published(self, sequence: Sequence, publish_tokens: int) -> None:
        if publish_tokens > sequence.published_tokens:
            if sequence.publish_step <= self.completed_step:
                sequence.proven_tokens = sequence.published_tokens
            sequence.published_tokens, sequence.publish_step = publish_tokens, self.step
            sequence.num_tokens = max(sequence.num_tokens, publish_tokens)
