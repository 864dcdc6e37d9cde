"""A scheduler's mirror of its sequences' block tables: knows who needs the daemon in this step, and asks once.

    begin_step ─▶ extend / finish / preempt / admit … ─▶ plan_step ─▶ (Step rpc) ─▶ apply ─▶ StepOutcome
                  only those who need something            None: nobody does, no rpc

A scheduler's step, with preemption of the last one running and a queue behind:

    session.begin_step(completed_step)
    for sequence, target in running:                     # target: tokens that it will have after this step
        if target > sequence.quiet_tokens:               # 1 of 16 decoding sequences, with 16-token blocks
            table.extend(sequence, slots_needed=target, processed_tokens=computed, publish_tokens=target)
    for sequence in heads_of_the_queue:
        table.admit(sequence, num_tokens=…)
    outcome = table.flush(token_budget=…)
    while outcome.refused_extends:                       # nothing behind the first refusal was tried
        table.preempt(victim, computed_tokens=…)
        table.ask_again(outcome)
        outcome = table.flush(…)

Finished sequences are free items of the next request, which come first in it. The table is not thread-safe, knows no
transport (`send` is handed in) and no clock; asyncio callers use `plan_step` and `apply` around an awaited rpc.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvhold.v1 import block_pb2 as pb
from kvhold_client.errors import InvalidRequest
from kvhold_client.results import ItemStatus, StepReply
from kvhold_client.sequence import HeldSequence, Sequence, SequenceState
from kvhold_client.shape import PoolShape
from kvhold_client.step import Ahead, StepBuilder
from kvhold_client.step_outcome import Admission, ExtendAsk, StepOutcome

_OK = int(ItemStatus.OK)
_UNKNOWN = int(ItemStatus.UNKNOWN_SEQUENCE)
_HOPELESS = frozenset({int(ItemStatus.NEVER_FITS), int(ItemStatus.INVALID), int(ItemStatus.SEQUENCE_EXISTS)})
# Problems that an item's status says already, and that a caller can live with.
_EXPECTED = frozenset({"NEVER_FITS", "UNKNOWN_SEQUENCE", "HASHES_MISSING"})
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


def _caller_bug(reply: StepReply) -> InvalidRequest:
    texts = "; ".join(f"{p.part}[{p.index}]: {p.reason}: {p.message}" for p in reply.problems)
    return InvalidRequest(texts, reason=reply.problems[0].reason, metadata={"part": reply.problems[0].part})


class SequenceTable:
    """All sequences of one session. See the module's text for a step."""

    def __init__(
        self,
        shape: PoolShape,
        *,
        send: Callable[[pb.StepRequest], StepReply] | None = None,
        ahead: Ahead | None = None,
        guard: AbstractContextManager[object] | None = None,
        max_silent_steps: int = 16,
    ) -> None:
        """`max_silent_steps`: finished sequences and completed steps are reported at the latest after so many steps in
        which nothing else had to be said; 0 reports at once."""
        self.shape = shape
        self.sequences: dict[int, Sequence] = {}
        self.step = 0
        self.completed_step = 0
        self._send = send
        self._ahead = ahead
        self._is_flying = False  # a request was submitted, its answer not yet applied
        self._landed: StepOutcome | None = None  # answer of a submitted request, applied, not yet collected
        self._guard = guard or nullcontext()
        self._max_silent_steps = max_silent_steps
        self._num_silent_steps = 0
        self._reported_step = 0  # last step that a request was sent in
        self._reported_completed = 0
        self._builder = StepBuilder(shape.hash_size_bytes)
        self._extending: list[Sequence] = []
        self._admitting: list[Sequence] = []
        self._admit_hashes: list[int] = []  # num_hashes at the time of asking, parallel to _admitting
        self._forgetful = [(g, group) for g, group in enumerate(shape.groups) if group.forgets]
        self._paged = [(g, group.block_size_tokens) for g, group in enumerate(shape.groups) if group.paged]
        (self._only_block_size,) = [size for _, size in self._paged] if self._is_plain() else (0,)

    def _is_plain(self) -> bool:
        """One paged group that keeps everything: the usual model, and the quick way through `_settle`."""
        return len(self.shape.groups) == len(self._paged) == 1 and not self._forgetful

    # ------------------------------------------------------------------------------------------------ asking
    def new_sequence(self, sequence_id: int, hashes: bytes | bytearray = b"") -> Sequence:
        """Makes a waiting sequence; nothing is sent. `hashes` are its known digests, concatenated."""
        assert sequence_id not in self.sequences, "a sequence id is used once at a time"
        sequence = Sequence(sequence_id, hashes, len(hashes) // self.shape.hash_size_bytes)
        self.sequences[sequence_id] = sequence
        return sequence

    def begin_step(self, step: int, completed_step: int) -> None:
        """Starts a step. What was queued and not sent yet stays queued (finished sequences)."""
        if self._is_flying:
            self._land()
        assert step > self.step
        assert self.completed_step <= completed_step < step
        self.step, self.completed_step = step, completed_step
        self._num_silent_steps += 1

    def extend(
        self,
        sequence: Sequence,
        *,
        slots_needed: int,
        processed_tokens: int,
        publish_tokens: int = 0,
        **options: Any,
    ) -> None:
        """Queues a running sequence's need. Call it only beyond `quiet_tokens`; below it is right, and wasteful."""
        if self._is_flying:
            self._land()
        columns = self._builder.extend_items
        hashes: bytes | bytearray = b""
        num_hashes = 0
        if sequence.num_hashes > sequence.num_hashes_sent:
            hashes, num_hashes = self._unsent(sequence)
        row = (sequence.sequence_id, slots_needed, processed_tokens, publish_tokens, num_hashes)
        if hashes or options:
            columns.append(row, hashes, options)
        else:
            columns.rows.append(row)
        self._extending.append(sequence)

    def admit(self, sequence: Sequence, *, num_tokens: int, **options: Any) -> None:
        """Queues a waiting sequence; options are the optional columns of AdmitItems. Its hashes travel once."""
        if self._is_flying:
            self._land()
        hashes: bytes | bytearray = b""
        num_hashes = 0
        if sequence.num_hashes > sequence.num_hashes_sent:  # a waiting sequence's hashes replace what is remembered
            hashes, num_hashes = sequence.hashes, sequence.num_hashes
        if not sequence.num_hashes and num_tokens >= self.shape.hash_block_size_tokens:
            options.setdefault("skip_lookup", True)  # without hashes it would be taken for one asked for again
        self._builder.admit_items.append((sequence.sequence_id, num_tokens, num_hashes), hashes, options)
        self._admitting.append(sequence)
        self._admit_hashes.append(sequence.num_hashes)
        sequence.num_tokens = num_tokens

    def finish(self, sequence: Sequence, *, computed_tokens: int = 0, fence_own: bool = False) -> None:
        """Queues the release of a sequence that is over; full blocks below `computed_tokens` are published first."""
        self._let_go(sequence, computed_tokens, fence_own, preempted=False)
        sequence.state = SequenceState.DONE
        del self.sequences[sequence.sequence_id]

    def preempt(self, sequence: Sequence, *, computed_tokens: int = 0, fence_own: bool = False) -> None:
        """Queues the release of a sequence that will be admitted again, with all its hashes."""
        self._let_go(sequence, computed_tokens, fence_own, preempted=True)
        sequence.state = SequenceState.WAITING
        sequence.num_hashes_sent = 0

    def ask_again(self, outcome: StepOutcome) -> None:
        """Queues the refused extends of an outcome again, without those that were preempted or finished since."""
        for ask in outcome.refused_extends:
            if ask.sequence.state is SequenceState.RUNNING:
                self.extend(
                    ask.sequence,
                    slots_needed=ask.slots_needed,
                    processed_tokens=ask.processed_tokens,
                    publish_tokens=ask.publish_tokens,
                    **ask.options,
                )

    def _let_go(self, sequence: Sequence, computed_tokens: int, fence_own: bool, *, preempted: bool) -> None:
        if self._is_flying:
            self._land()
        if sequence.is_known:
            hashes, _ = self._unsent(sequence)
            options = {name: True for name, value in (("fence_own", fence_own), ("preempted", preempted)) if value}
            self._builder.free(sequence.sequence_id, publish_tokens=computed_tokens, hashes=hashes, **options)
            sequence.num_hashes_sent = sequence.num_hashes
        sequence.forget_blocks()

    def _unsent(self, sequence: Sequence) -> tuple[bytes | bytearray, int]:
        """Digests that the daemon has not seen, and their number."""
        num = sequence.num_hashes - sequence.num_hashes_sent
        if not num:
            return b"", 0
        if not sequence.num_hashes_sent:
            return sequence.hashes, num
        return sequence.hashes[sequence.num_hashes_sent * self.shape.hash_size_bytes :], num

    # ----------------------------------------------------------------------------------------------- sending
    def plan_step(self, *, token_budget: int = 0, force: bool = False) -> pb.StepRequest | None:
        """The request for what is queued, or None if nothing must be said now. `force` says it even so (before idling).

        The message is reused: send it, then `apply` its answer, before anything else is queued.
        """
        if self._is_flying:
            self._land()
        urgent = self._extending or self._admitting
        overdue = force or self._num_silent_steps > self._max_silent_steps
        if not urgent and not (overdue and self._has_news()):
            return None
        self._builder.token_budget = token_budget
        self._num_silent_steps = 0
        return self._builder.encode()

    def flush(self, *, token_budget: int = 0, force: bool = False) -> StepOutcome:
        """plan_step, rpc, apply. Raises the rpc's KvholdError; what was queued is then still queued."""
        assert self._send is not None, "this table has no session: use plan_step and apply"
        with self._guard:
            request = self.plan_step(token_budget=token_budget, force=force)
            return StepOutcome() if request is None else self.apply(self._send(request))

    def submit(self, *, token_budget: int = 0, force: bool = False) -> bool:
        """The first half of `flush`: sends what is queued and returns at once; False if nothing must be said now.

        `collect` is the other half. Meanwhile the device computes, and the answer arrives. Anything that is queued
        before `collect` waits for the answer first, so that nothing is said twice.
        """
        assert self._ahead is not None, "this table has no session"
        request = self.plan_step(token_budget=token_budget, force=force)
        if request is None:
            return False
        self._ahead.submit(request)
        self._is_flying = True
        return True

    def collect(self) -> StepOutcome:
        """What the submitted step changed; nothing, if nothing was submitted. Raises what `flush` would."""
        if self._is_flying:
            self._land()
        outcome, self._landed = self._landed, None
        return outcome or StepOutcome()

    def _land(self) -> None:
        assert self._ahead is not None
        self._is_flying = False
        with self._guard:
            self._landed = self.apply(self._ahead.collect())

    def _has_news(self) -> bool:
        """Frees that wait, or a completed step that the daemon still counts as running."""
        return not self._builder.is_empty or self._reported_completed < min(self.completed_step, self._reported_step)

    # ---------------------------------------------------------------------------------------------- applying
    def apply(self, reply: StepReply) -> StepOutcome:
        """Takes an answer into the mirror and empties the queue. Changes sequences; returns what changed.

        Raises InvalidRequest for items that contradict themselves: a bug of the caller. The rest is applied even then.
        """
        outcome = StepOutcome(sent=True, copies=reply.copies, zero_block_ids=reply.zero_block_ids, counts=reply.counts)
        if self._extending:
            self._apply_extends(reply, outcome)
        if self._admitting:
            self._apply_admits(reply, outcome)
        self._builder.clear()
        self._extending.clear()
        self._admitting.clear()
        self._admit_hashes.clear()
        self._reported_step, self._reported_completed = self.step, self.completed_step
        if any(problem.reason not in _EXPECTED for problem in reply.problems):
            raise _caller_bug(reply)
        return outcome

    def _apply_extends(self, reply: StepReply, outcome: StepOutcome) -> None:
        statuses, rows = reply.extend_statuses, self._builder.extend_items.rows
        if self._only_block_size and statuses.count(_OK) == len(rows):
            self._apply_plain_extends(reply, outcome)
            return
        num_groups, at = self.shape.num_groups, 0
        counts, ids = reply.extend_num_new_blocks, reply.extend_block_ids
        for i, (sequence, status) in enumerate(zip(self._extending, statuses, strict=True)):
            if status != _OK:
                self._not_extended(i, sequence, status, outcome)
                continue
            _, _, processed, publish, num_hashes = rows[i]
            new = []
            for g in range(num_groups):
                num = counts[i * num_groups + g]
                new.append(ids[at : at + num])
                sequence.tables[g] += new[g]
                at += num
            sequence.num_hashes_sent += num_hashes
            self._note_published(sequence, publish)
            self._settle(sequence, processed)
            outcome.extended.append(sequence)
            outcome.new_block_ids.append(new)

    def _apply_plain_extends(self, reply: StepReply, outcome: StepOutcome) -> None:
        """The usual step, without a call per sequence: one paged group that keeps everything, and nobody refused."""
        at, size, ids = 0, self._only_block_size, reply.extend_block_ids
        for sequence, row, num in zip(
            self._extending, self._builder.extend_items.rows, reply.extend_num_new_blocks, strict=True
        ):
            new = ids[at : at + num]
            at += num
            table = sequence.tables[0]
            table += new
            sequence.quiet_tokens = len(table) * size
            sequence.num_hashes_sent += row[4]
            if row[3] > sequence.published_tokens:
                self._note_published(sequence, row[3])
            outcome.new_block_ids.append([new])
        outcome.extended = self._extending.copy()

    def _not_extended(self, i: int, sequence: Sequence, status: int, outcome: StepOutcome) -> None:
        """Sorts out an item that was not applied; a refused one still gave up what had left its windows."""
        columns = self._builder.extend_items
        _, slots, processed, publish, _ = columns.rows[i]
        if status == _UNKNOWN:
            self._lose(sequence)
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

    def _apply_admits(self, reply: StepReply, outcome: StepOutcome) -> None:
        num_groups, at = self.shape.num_groups, 0
        for i, (sequence, status) in enumerate(zip(self._admitting, reply.admit_statuses, strict=True)):
            if status != _OK:
                self._not_admitted(sequence, status, self._admit_hashes[i], outcome)
                continue
            tables = []
            for g in range(num_groups):
                num = reply.admit_num_blocks[i * num_groups + g]
                tables.append(reply.admit_block_ids[at : at + num])
                at += num
            hit, granted = reply.admit_hit_tokens[i], reply.admit_granted_tokens[i]
            sequence.tables, sequence.released = tables, [0] * num_groups
            sequence.state, sequence.is_known = SequenceState.RUNNING, True
            sequence.num_hashes_sent = self._admit_hashes[i]
            self._note_published(sequence, hit + granted)
            self._settle(sequence, hit)
            outcome.admitted.append(Admission(sequence=sequence, hit_tokens=hit, granted_tokens=granted))

    def _not_admitted(self, sequence: Sequence, status: int, num_hashes: int, outcome: StepOutcome) -> None:
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
        if self._only_block_size:
            sequence.quiet_tokens = len(sequence.tables[0]) * self._only_block_size
            return
        quiet = min((len(sequence.tables[g]) * size for g, size in self._paged), default=0)
        for g, group in self._forgetful:
            table, released = sequence.tables[g], sequence.released[g]
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

    # --------------------------------------------------------------------------------- after a daemon's restart
    def held_sequences(self) -> Iterator[HeldSequence]:
        """What to re-assert when the daemon restarted: every running sequence, with what is proven to be written."""
        for sequence in list(self.sequences.values()):  # another thread may ask
            if sequence.state is SequenceState.RUNNING:
                yield sequence.held(self.completed_step, self.shape.hash_size_bytes)

    def lose(self, sequence_ids: Iterable[int]) -> list[Sequence]:
        """Marks sequences that the daemon could not give back, and forgets what it remembered of waiting ones."""
        lost = [self.sequences[i] for i in sequence_ids if i in self.sequences]
        for sequence in lost:
            self._lose(sequence)
        for sequence in self.sequences.values():
            if sequence.state is SequenceState.WAITING:
                sequence.num_hashes_sent, sequence.is_known = 0, False
        return lost

    def _lose(self, sequence: Sequence) -> None:
        sequence.forget_blocks()
        sequence.state, sequence.is_known, sequence.num_hashes_sent = SequenceState.LOST, False, 0

    def check_invariants(self) -> None:
        """Raises AssertionError if the mirror contradicts itself. For tests."""
        for sequence_id, sequence in self.sequences.items():
            assert sequence.sequence_id == sequence_id
            assert sequence.num_hashes_sent <= sequence.num_hashes
            assert len(sequence.hashes) == sequence.num_hashes * self.shape.hash_size_bytes
            assert bool(sequence.tables) == (sequence.state is SequenceState.RUNNING)
            for g, size in self._paged:
                if sequence.tables:
                    assert sequence.quiet_tokens <= len(sequence.tables[g]) * size
            for table, released in zip(sequence.tables, sequence.released, strict=True):
                assert not any(table[:released]), "a released block is still in the table"
