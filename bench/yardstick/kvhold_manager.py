"""kvhold behind the yardstick's interface, on the public client library only.

One Step a scheduler step, and none if nobody needs anything: the client's sequence table knows the slack in each last
block. `KVHOLD_TARGET` in the environment names the daemon. All variants decide the same:

    kvhold_manager      local transport, blocking          kvhold_grpc             gRPC stream, blocking
    kvhold_pipelined    local transport, a step ahead      kvhold_grpc_pipelined   gRPC stream, a step ahead
                                                           kvhold_grpc_unary       a gRPC call each, blocking
"""

import itertools
import os
from collections import deque
from dataclasses import dataclass

from interface import Config, Hasher, Request, StepInput, StepOutput

from kvhold_client import Client, PoolRequest
from kvhold_client.sequence import Sequence, SequenceState
from kvhold_client.shape import GroupShape
from kvhold_client.step_outcome import StepOutcome

MAX_MODEL_LEN_TOKENS = 1 << 20  # longer than any request, so that it never cuts one
MAX_NEW_HEADS = 16  # waiting sequences that ride along in one request with all their hashes


def create(config: Config) -> "KvholdManager":
    return KvholdManager(config)


class KvholdRequest(Request):
    """A request with its mirror of block tables. Digests are joined as they come."""

    __slots__ = ("sequence",)

    def __init__(self, request_id: str, num_prompt_tokens: int, hasher: Hasher, manager: "KvholdManager") -> None:
        super().__init__(request_id, num_prompt_tokens, hasher)
        self.sequence: Sequence = manager.table.new_sequence(next(manager.ids), b"".join(self.block_hashes))

    def append_output_token_ids(self, token_ids: int) -> None:
        self.num_tokens += 1
        missing = self._hasher(self)
        if missing:
            self.block_hashes.extend(missing)
            self.sequence.add_hashes(b"".join(missing), len(missing))


class KvholdManager:
    """Decides by the policy of interface.py."""

    def __init__(self, config: Config, transport: str = "local") -> None:
        self.config = config
        self.ids = itertools.count(1)
        self.client = Client(os.environ["KVHOLD_TARGET"])
        self.pool = self.client.open_pool(pool_request(config))
        self.session = self.pool.open_session(
            client_name="yardstick", local_transport=transport == "local", step_stream=transport == "grpc"
        )
        assert self.session.transport == transport, f"asked for {transport}, got {self.session.transport}"
        self.table = self.session.table
        self.options = {"full_sequence_must_fit": True} if config.whole_admission else {}

    def make_request(self, request_id: str, num_prompt_tokens: int, hasher: Hasher) -> KvholdRequest:
        return KvholdRequest(request_id, num_prompt_tokens, hasher, self)

    def finish(self, requests: list[KvholdRequest]) -> None:
        for request in requests:
            self.table.finish(request.sequence, computed_tokens=request.num_computed_tokens)

    def close(self) -> None:
        self.session.idle()
        counts = self.client.get_pool(self.pool.name).info.counts
        assert counts.num_held_blocks == 0, f"blocks leaked: {counts}"
        self.session.close()
        self.client.delete_pool(self.pool.name)
        self.client.close()

    # ------------------------------------------------------------------ a step
    def schedule(self, step: StepInput) -> StepOutput:
        self.session.begin_step()
        plan = self._ask(step)
        outcome = self.table.flush(token_budget=plan.budget) if plan.asked or plan.heads else StepOutcome()
        return self._decide(step, plan, outcome)

    def _ask(self, step: StepInput) -> "Ask":
        """Queues both phases in the client's table; nothing is sent yet."""
        plan = self._ask_running(step.running)
        plan.seats = self.config.max_num_seqs - len(step.running)
        if step.waiting:
            plan.heads = self._ask_waiting(step.waiting, 0, plan.budget, plan.seats)
        return plan

    def _decide(self, step: StepInput, plan: "Ask", outcome: StepOutcome) -> StepOutput:
        """Reads the answer; asks again while all who asked were admitted and there is room for more."""
        if outcome.refused_extends:
            return self._preempt(step.running, plan, outcome)
        num_running, waiting, heads, budget = len(step.running), step.waiting, plan.heads, plan.budget
        new_blocks = [(i, tuple(ids)) for i, ids in zip(plan.asked, outcome.new_block_ids, strict=True) if any(ids)]
        admitted: list[tuple[int, int]] = []
        while True:
            for admission in outcome.admitted:
                new_blocks.append((num_running + len(admitted), tuple(map(list, admission.sequence.tables))))
                admitted.append((admission.hit_tokens, admission.granted_tokens))
                budget -= admission.granted_tokens
            if len(outcome.admitted) == heads:
                heads = self._ask_waiting(waiting, len(admitted), budget, plan.seats - len(admitted))
                if heads:
                    outcome = self.table.flush(token_budget=budget)
                    continue
            return StepOutput(plan.granted, 0, admitted, new_blocks)

    def _ask_running(self, running: list[KvholdRequest]) -> "Ask":
        """Grants in order while budget is left; 15 of 16 decoding requests need nothing from the daemon."""
        budget, extend = self.config.max_num_batched_tokens, self.table.extend
        block_size = self.config.block_size
        granted: list[int] = []
        asked: list[int] = []
        for i, request in enumerate(running):
            computed = request.num_computed_tokens
            wanted = request.num_tokens - computed
            if wanted > budget:
                wanted = budget
                if not wanted:
                    break
            budget -= wanted
            granted.append(wanted)
            target = computed + wanted
            sequence = request.sequence
            # A chunk of a prompt that fills a block is said at once: others may hit it in this very step.
            if target > sequence.quiet_tokens or (wanted > 1 and target // block_size > computed // block_size):
                extend(sequence, slots_needed=target, processed_tokens=computed, publish_tokens=target)
                asked.append(i)
        return Ask(granted=granted, asked=asked, budget=budget)

    def _ask_waiting(self, waiting: deque[KvholdRequest], start: int, budget: int, num_seats: int) -> int:
        """Queues the next heads of the waiting queue, as many as the budget could admit if they hit nothing, and returns
        their number. One that was refused before comes alone: it is asked for by id, and likely to be refused again."""
        heads = 0
        for request in itertools.islice(waiting, start, start + max(0, min(num_seats, MAX_NEW_HEADS))):
            if budget <= 0 or (heads and request.sequence.is_known):
                break
            heads += 1
            self.table.admit(request.sequence, num_tokens=request.num_tokens, **self.options)
            if request.sequence.is_known:
                break
            budget -= request.num_tokens
        return heads

    def _preempt(self, running: list[KvholdRequest], plan: "Ask", outcome: StepOutcome) -> StepOutput:
        """The last ones give up their blocks until the first refused one has its own, or is the last itself."""
        where = {running[i].sequence.sequence_id: i for i in plan.asked}
        end = len(running)
        new_blocks: list[tuple[int, tuple[list[int], ...]]] = []
        while True:
            self._note(outcome, where, new_blocks)
            if not outcome.refused_extends:
                return StepOutput(plan.granted[:end], len(running) - end, [], new_blocks)
            asker = where[outcome.refused_extends[0].sequence.sequence_id]
            end -= 1
            victim = running[end]
            self.table.preempt(victim.sequence, computed_tokens=victim.num_computed_tokens)
            if end == asker:
                return StepOutput(plan.granted[:end], len(running) - end, [], new_blocks)
            self.table.ask_again(outcome)
            outcome = self.table.flush()

    @staticmethod
    def _note(outcome: StepOutcome, where: dict[int, int], new_blocks: list[tuple[int, tuple[list[int], ...]]]) -> None:
        for sequence, ids in zip(outcome.extended, outcome.new_block_ids, strict=True):
            if any(ids) and sequence.state is SequenceState.RUNNING:
                new_blocks.append((where[sequence.sequence_id], tuple(ids)))


@dataclass(slots=True, kw_only=True)
class Ask:
    """What a step is going to ask for."""

    granted: list[int]  # to running requests, in order, while budget is left
    asked: list[int]  # positions of those who need the daemon
    budget: int  # left for admissions
    heads: int = 0  # waiting requests that ride along
    seats: int = 0  # for more running requests


def pool_request(config: Config) -> PoolRequest:
    """A pool for block management alone."""
    groups = tuple(
        GroupShape(kind="full", block_size_tokens=config.block_size)
        if window is None
        else GroupShape(kind="sliding_window", block_size_tokens=config.block_size, sliding_window_tokens=window)
        for window in config.windows
    )
    return PoolRequest(
        name=f"yardstick-{os.getpid()}",
        simulated_groups=groups,
        simulated_num_blocks=config.num_blocks,
        max_model_len_tokens=MAX_MODEL_LEN_TOKENS,
        max_in_flight_tokens=config.max_num_batched_tokens,
    )
