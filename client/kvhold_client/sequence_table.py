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

Finished sequences are free items of the next request, which come first in it. A session that has its pool to itself
draws blocks from what the daemon's last answer allotted, and says so with the next request (foresight.py): then most
steps send nothing, though sequences grow. The table is not thread-safe, knows no
transport (`send` is handed in) and no clock; asyncio callers use `plan_step` and `apply` around an awaited rpc.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvhold.v1 import block_pb2 as pb
from kvhold_client.drawing import Drawing, extend_ask
from kvhold_client.errors import InvalidRequest
from kvhold_client.foresight import MAX_ALLOTTED_BLOCKS, AdmitAsk
from kvhold_client.mirror import Mirror
from kvhold_client.results import ItemStatus
from kvhold_client.sequence import HeldSequence, Sequence, SequenceState
from kvhold_client.shape import PoolShape
from kvhold_client.step import Ahead, StepBuilder
from kvhold_client.step_outcome import StepOutcome
from kvhold_client.step_reply import StepReply

MAX_UNTOLD_ITEMS, MAX_UNTOLD_STEPS = 256, 8  # of what was drawn, before the daemon hears of it

# Problems that an item's status says already, and that a caller can live with.
_EXPECTED = frozenset({"NEVER_FITS", "UNKNOWN_SEQUENCE", "HASHES_MISSING"})


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
        max_allotted_blocks: int = MAX_ALLOTTED_BLOCKS,
    ) -> None:
        """`max_silent_steps`: what was finished, completed or drawn is reported at the latest after so many steps in
        which nothing else had to be said; 0 reports at once. `max_allotted_blocks`: 0 draws none."""
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
        self._admit_options: list[dict[str, Any]] = []  # as asked, parallel to _admitting
        self._mirror = Mirror(shape)
        self._drawing = Drawing(shape, self._mirror, self._builder)
        self._foresight = self._drawing.foresight
        self.max_allotted_blocks = max_allotted_blocks if shape.grows_plainly else 0
        self._known = StepOutcome()  # what this step changed, or will not, without asking

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
        self._mirror.step, self._mirror.completed_step = step, completed_step
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
        refused = self._known.refused_extends
        if self._foresight.is_open and options and refused:  # as the daemon, which tries nothing behind a refusal
            refused.append(extend_ask(sequence, slots_needed, processed_tokens, publish_tokens, options))
            return
        if self._foresight.is_open and not (options or self._extending):
            with self._guard:
                if self._drawing.serve(sequence, slots_needed, processed_tokens, publish_tokens, self._known):
                    return
        columns = self._builder.extend_items
        hashes, num_hashes = sequence.unsent(self.shape.hash_size_bytes)
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
        self._admit_options.append(options)
        sequence.num_tokens = num_tokens
        sequence.num_prompt_tokens = options.get("num_prompt_tokens") or num_tokens

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
            hashes, _ = sequence.unsent(self.shape.hash_size_bytes)
            options = {name: True for name, value in (("fence_own", fence_own), ("preempted", preempted)) if value}
            self._foresight.forget()
            self._builder.free(sequence.sequence_id, publish_tokens=computed_tokens, hashes=hashes, **options)
            sequence.num_hashes_sent = sequence.num_hashes
        sequence.forget_blocks()

    # ----------------------------------------------------------------------------------------------- sending
    def plan_step(self, *, token_budget: int = 0, force: bool = False) -> pb.StepRequest | None:
        """The request for what is queued, or None if nothing must be said now. `force` says it even so, and has nothing
        allotted: before a pause, or the end.

        The message is reused: send it, then `apply` its answer, before anything else is queued.
        """
        if self._is_flying:
            self._land()
        if self._admitting:
            self._refuse_again(token_budget)
        urgent = self._extending or self._admitting or self._has_much_to_tell()
        overdue = force or self._num_silent_steps > self._max_silent_steps
        if not urgent and not (overdue and self._has_news()) and not (force and self._foresight.num_left):
            return None
        self._builder.token_budget = token_budget
        if self.max_allotted_blocks and not force:
            self._builder.max_allotted_blocks = self._foresight.wanted(self.max_allotted_blocks)
        self._num_silent_steps = 0
        return self._builder.encode()

    def flush(self, *, token_budget: int = 0, force: bool = False) -> StepOutcome:
        """plan_step, rpc, apply. Raises the rpc's KvholdError; what was queued is then still queued."""
        assert self._send is not None, "this table has no session: use plan_step and apply"
        with self._guard:
            request = self.plan_step(token_budget=token_budget, force=force)
            return self.take_known() if request is None else self.apply(self._send(request))

    @property
    def last_drawn_step(self) -> int:
        """The last one in which a sequence was served without a request; 0: none."""
        return self._drawing.last_step

    @property
    def has_drawn(self) -> bool:
        """Blocks are drawn that the daemon was not told of, or may be."""
        return bool(self._builder.drawn_items.rows) or self._foresight.num_left > 0

    def take_known(self) -> StepOutcome:
        """What this step changed where `plan_step` had nothing to send: blocks that were drawn, refusals that stand."""
        outcome, self._known = self._known, StepOutcome()
        return outcome

    def _refuse_again(self, token_budget: int) -> None:
        """Answers those who ask to be admitted, where the answer is known."""
        if self._known.refused_extends:
            refusal = ItemStatus.NOT_TRIED
        elif not self._extending and self._foresight.refuses(self._first_admit(token_budget), self.step):
            refusal = ItemStatus.OUT_OF_BLOCKS
        else:
            return
        self._known.admit_refusal = refusal
        self._known.not_admitted += self._admitting
        self._clear_admits()

    def _first_admit(self, token_budget: int, i: int = 0) -> AdmitAsk:
        sequence, options = self._admitting[i], self._admit_options[i]
        num_tokens = self._builder.admit_items.rows[i][1]
        return AdmitAsk(sequence=sequence, num_tokens=num_tokens, options=options, token_budget=token_budget)

    def _clear_admits(self) -> None:
        self._admitting.clear()
        self._admit_hashes.clear()
        self._admit_options.clear()
        self._builder.admit_items.clear()

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
        return outcome or self.take_known()

    def _land(self) -> None:
        assert self._ahead is not None
        self._is_flying = False
        with self._guard:
            self._landed = self.apply(self._ahead.collect())

    def _has_much_to_tell(self) -> bool:
        """So much was drawn that telling it all at once would be a long step, for this scheduler and its neighbours."""
        num_items = len(self._builder.drawn_items.rows)
        return num_items >= MAX_UNTOLD_ITEMS or (num_items > 0 and self._num_silent_steps > MAX_UNTOLD_STEPS)

    def _has_news(self) -> bool:
        """Frees that wait, or a completed step that the daemon still counts as running."""
        return not self._builder.is_empty or self._reported_completed < min(self.completed_step, self._reported_step)

    # ---------------------------------------------------------------------------------------------- applying
    def apply(self, reply: StepReply) -> StepOutcome:
        """Takes an answer into the mirror and empties the queue. Changes sequences; returns what changed.

        Raises InvalidRequest for items that contradict themselves: a bug of the caller. The rest is applied even then.
        """
        outcome, mirror = self.take_known(), self._mirror
        outcome.reply = reply
        if self._builder.drawn_items.rows:
            self._drawing.told()
        if self.max_allotted_blocks:
            self._foresight.learn(reply)
        if self._extending:
            mirror.take_extends(self._extending, self._builder.extend_items, reply, outcome)
            self._extending.clear()
        if self._admitting:
            mirror.take_admits(self._admitting, self._admit_hashes, reply, outcome)
            self._note_refusal(outcome)
            self._clear_admits()
        self._builder.clear()
        self._reported_step, self._reported_completed = self.step, self.completed_step
        if reply.has_problems and any(problem.reason not in _EXPECTED for problem in reply.problems):
            raise _caller_bug(reply)
        return outcome

    def _note_refusal(self, outcome: StepOutcome) -> None:
        """Who stands first in the queue now, if it was refused for want of blocks."""
        if outcome.admit_refusal is not ItemStatus.OUT_OF_BLOCKS:
            self._foresight.was_admitted()
            return
        first = self._admitting.index(outcome.not_admitted[0])
        budget = self._builder.token_budget
        if budget:
            budget -= sum(admission.granted_tokens for admission in outcome.admitted)
        self._foresight.was_refused(self._first_admit(budget, first), self.step + self._max_silent_steps)

    # --------------------------------------------------------------------------------- after a daemon's restart
    def held_sequences(self) -> Iterator[HeldSequence]:
        """What to re-assert when the daemon restarted: every running sequence, with what is proven to be written.

        From here on nothing is drawn before the next answer: it would not be in what is said."""
        self._foresight.forget()
        for sequence in list(self.sequences.values()):  # another thread may ask
            if sequence.state is SequenceState.RUNNING:
                yield sequence.held(self.completed_step, self.shape.hash_size_bytes)

    def lose(self, sequence_ids: Iterable[int]) -> list[Sequence]:
        """Marks sequences that the daemon could not give back, and forgets what it remembered of waiting ones."""
        self._foresight.forget()
        named = (self.sequences.get(i) for i in sequence_ids)
        lost = [one for one in named if one is not None and one.state is SequenceState.RUNNING]  # not let go meanwhile
        for sequence in lost:
            sequence.lose()
        for sequence in self.sequences.values():
            if sequence.state is SequenceState.WAITING:
                sequence.num_hashes_sent, sequence.is_known = 0, False
        return lost

    def check_invariants(self) -> None:
        """Raises AssertionError if the mirror contradicts itself. For tests."""
        for sequence_id, sequence in self.sequences.items():
            assert sequence.sequence_id == sequence_id
            assert sequence.num_hashes_sent + sequence.num_hashes_drawn <= sequence.num_hashes
            assert len(sequence.hashes) == sequence.num_hashes * self.shape.hash_size_bytes
            assert bool(sequence.tables) == (sequence.state is SequenceState.RUNNING)
            for g, size in self._mirror.paged:
                if sequence.tables:
                    assert sequence.quiet_tokens <= len(sequence.tables[g]) * size
            for table, released in zip(sequence.tables, sequence.released, strict=True):
                assert not any(table[:released]), "a released block is still in the table"
