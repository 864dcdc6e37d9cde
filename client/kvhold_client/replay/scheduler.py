"""A small continuous-batching scheduler on the public client: admit → chunked prefill → decode → publish → free.

The policy is first come, first served. In each step the running requests come first, in order of admission; while one
of them cannot have its blocks, the last one running is preempted. Only if nobody was, the queue's head is admitted.
No model runs: `forward.py` stamps what is computed and checks what is read.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvhold_client.replay.counters import DONE, LIVE, SKIPPED, SharedCounters
from kvhold_client.replay.forward import Forward
from kvhold_client.replay.request import Request
from kvhold_client.replay.trace import TraceRow, UnitDigests
from kvhold_client.sequence import SequenceState
from kvhold_client.session import Session
from kvhold_client.step_outcome import Admission, ExtendAsk, StepOutcome

MAX_HEADS = 8  # waiting requests that ride in one rpc
BLOCKED_PAUSE_S = 0.002
MAX_QUEUED = 64  # rows that wait inside the scheduler; the rest of the trace stays outside


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What an engine configures."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len_tokens: int
    max_output_tokens: int = 0  # 0: as the trace says
    step_s: float = 0.0  # simulated time on the device


class Scheduler:
    """Runs rows through one session. `run` returns when all are done."""

    def __init__(
        self,
        session: Session,
        forward: Forward | None,
        limits: SchedulerLimits,
        counters: SharedCounters,
        slot: int,
    ) -> None:
        self.session = session
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.table = session.table
        self._forward = forward
        self._limits = limits
        self._counters = counters
        self._slot = slot
        self._unit_tokens = session.shape.hash_block_size_tokens
        self._digests = UnitDigests(self._unit_tokens, session.shape.hash_size_bytes)
        self._by_sequence: dict[int, Request] = {}
        self._epoch, self._boot_id = session.epoch, session.boot_id

    def run(self, rows: Iterable[tuple[int, TraceRow]]) -> None:
        """Feeds rows in as the queue empties, steps until all are done, and tells the daemon what is left to tell."""
        source = iter(rows)
        item = next(source, None)
        while item is not None or self.running or self.waiting:
            while item is not None and len(self.waiting) < MAX_QUEUED:
                self._arrive(*item)
                item = next(source, None)
            started = time.perf_counter_ns()
            self.step()
            if self._limits.step_s:
                time.sleep(self._limits.step_s)
            self._count("steps")
            self._count("step_ns", time.perf_counter_ns() - started)
            self._notice_resumes()
        self.session.idle()
        self._notice_resumes()

    def _notice_resumes(self) -> None:
        """The session comes back by itself; the report says how often it had to."""
        session = self.session
        if session.epoch == self._epoch:
            return
        self._count("reconnects", session.epoch - self._epoch)
        self._count("daemon_restarts", session.boot_id != self._boot_id)
        self._epoch, self._boot_id = session.epoch, session.boot_id

    def _arrive(self, row_index: int, row: TraceRow) -> None:
        """Queues a row. One that is longer than the model's length is skipped."""
        num_output = max(1, min(row.output_length, self._limits.max_output_tokens or row.output_length))
        if row.input_length + num_output > self._limits.max_model_len_tokens:
            self._skip(row_index)
            return
        sequence = self.table.new_sequence(row_index + 1, self._digests.of_prompt(row))
        is_inherited = self._counters.rows[row_index] == LIVE
        request = Request(row_index, row, sequence, num_output=num_output, is_inherited=is_inherited)
        self._by_sequence[sequence.sequence_id] = request
        self.waiting.append(request)

    # ---------------------------------------------------------------------------------------------------- one step
    def step(self) -> None:
        """Decides, computes, reads, generates, finishes."""
        self.session.begin_step()
        budget, asked = self._ask_for_running()
        self._ask_for_waiting(budget)
        first = outcome = self._flush(budget)
        self._give_up(first)
        while outcome.refused_extends and self._preempt_for(outcome.refused_extends[0]):
            self.table.ask_again(outcome)
            outcome = self._flush()
            self._give_up(outcome)
        advanced = [(request, n) for request, n in asked if request.sequence.state is SequenceState.RUNNING]
        admissions = [(self._admitted(admission), admission) for admission in first.admitted]
        advanced += [(request, admission.granted_tokens) for request, admission in admissions]
        if self._forward is not None:
            self._forward.compute(advanced)
            self._forward.read_hits(admissions)
        self._advance(advanced)
        if not advanced:
            time.sleep(BLOCKED_PAUSE_S)  # nobody could do anything: others hold the blocks
        if not first.sent:
            self._count("silent_steps")

    def _ask_for_running(self) -> tuple[int, list[tuple[Request, int]]]:
        """Queues what running requests need. Returns the budget left, and who will compute how many tokens."""
        budget, asked, extend = self._limits.max_num_batched_tokens, [], self.table.extend
        for request in self.running:
            computed = request.num_computed
            wanted = min(request.num_tokens - computed, budget)
            if not wanted:
                break
            budget -= wanted
            target = computed + wanted
            asked.append((request, wanted))
            if target > request.sequence.quiet_tokens:
                extend(request.sequence, slots_needed=target, processed_tokens=computed, publish_tokens=target)
        return budget, asked

    def _ask_for_waiting(self, budget: int) -> None:
        num_heads = min(self._limits.max_num_seqs - len(self.running), MAX_HEADS, len(self.waiting))
        if budget:
            for i in range(num_heads):
                self.table.admit(self.waiting[i].sequence, num_tokens=self.waiting[i].num_tokens)

    def _preempt_for(self, ask: ExtendAsk) -> bool:
        """Preempts the last one running; false if that was the asker itself."""
        victim = self.running.pop()
        self.table.preempt(victim.sequence, computed_tokens=victim.num_computed)
        self._to_the_head(victim)
        self._count("preemptions")
        return victim.sequence is not ask.sequence

    def _to_the_head(self, request: Request) -> None:
        request.num_computed, request.was_preempted = 0, True
        self.waiting.appendleft(request)

    def _give_up(self, outcome: StepOutcome) -> None:
        """Drops what can never fit, and queues again what a restarted daemon lost."""
        for sequence in outcome.impossible:
            request = self._by_sequence.pop(sequence.sequence_id)
            (self.running if request in self.running else self.waiting).remove(request)
            self.table.finish(sequence)
            self._skip(request.row_index)
        for request in [r for r in self.running if r.sequence.state is SequenceState.LOST]:
            self.running.remove(request)
            self.table.preempt(request.sequence)
            self._to_the_head(request)
            self._count("lost_sequences")

    def _admitted(self, admission: Admission) -> Request:
        request = self.waiting.popleft()
        assert request.sequence is admission.sequence, "admitted out of order"
        self.running.append(request)
        request.num_computed = admission.hit_tokens
        kind = "resumed_" if request.was_preempted else ""
        self._count(f"{kind}query_tokens", request.num_tokens)
        self._count(f"{kind}hit_tokens", admission.hit_tokens)
        if request.is_inherited:
            self._count("inherited_query_tokens", request.num_tokens)
            self._count("inherited_hit_tokens", admission.hit_tokens)
            request.is_inherited = False
        self._count("admissions")
        self._counters.rows[request.row_index] = LIVE
        return request

    def _advance(self, advanced: list[tuple[Request, int]]) -> None:
        """The step is over: tokens are computed, who has computed all it knows gets a new one, the last one ends it."""
        num_prefilled = num_generated = 0
        for request, tokens in advanced:
            request.num_computed += tokens
            if request.num_computed < request.num_tokens:
                num_prefilled += tokens
                continue
            num_prefilled += tokens - 1
            num_generated += 1
            request.num_tokens += 1
            if request.num_tokens >= request.num_final:
                self._finish(request)
            elif not request.num_tokens % self._unit_tokens:
                unit = request.num_tokens // self._unit_tokens - 1
                request.sequence.add_hashes(self._digests.of_generated(request.row_index, unit))
        self._count("prefill_tokens", num_prefilled)
        self._count("generated_tokens", num_generated)

    def _finish(self, request: Request) -> None:
        if self._forward is not None:
            self._forward.check_all(request)
        self.running.remove(request)
        del self._by_sequence[request.sequence.sequence_id]
        self.table.finish(request.sequence, computed_tokens=request.num_computed)
        self._counters.rows[request.row_index] = DONE
        self._count("finished")

    # ---------------------------------------------------------------------------------------------------- counting
    def _flush(self, token_budget: int = 0) -> StepOutcome:
        """As SequenceTable.flush, with the rpc timed and visible from outside."""
        with self.session.guard:
            request = self.table.plan_step(token_budget=token_budget)
            if request is None:
                return self.table.take_known()
            self._counters.put(self._slot, "in_call", 1)
            started = time.perf_counter_ns()
            reply = self.session.step(request)
            self._counters.observe(self._slot, time.perf_counter_ns() - started)
            outcome = self.table.apply(reply)
            self._counters.put(self._slot, "in_call", 0)
            return outcome

    def _skip(self, row_index: int) -> None:
        self._counters.rows[row_index] = SKIPPED
        self._count("skipped")

    def _count(self, name: str, amount: int = 1) -> None:
        self._counters.add(self._slot, name, amount)
