"""Twins: a scheduler whose table draws from allotments, beside one that asks for everything. They must not differ.

Both run on services of their own, without a wire. The same random load reaches both: shared prompts, chunked prefill
under a token budget, decode, finish, preemption of the last one on a refusal. After every step the decisions and the
tables are the same; once everything is told, so are the pools, to the order of the free list.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvhold.v1 import block_pb2 as pb
from kvhold_client.sequence import Sequence, SequenceState
from kvhold_client.sequence_table import SequenceTable
from kvhold_client.shape import GroupShape, PoolShape
from kvhold_client.step_outcome import StepOutcome
from kvhold_client.step_reply import StepReply
from kvhold_server.config import ServerConfig
from kvhold_server.domain.ids import PoolName
from kvhold_server.domain.pool_config import GroupConfig
from kvhold_server.memory.fake import FakeBackend
from kvhold_server.node.identity import PoolOptions, PoolOverrides
from kvhold_server.node.node import Node, Shell
from kvhold_server.node.opening import Opening, OpenPoolCommand
from kvhold_server.rpc.services.blocks import BlockService
from kvhold_server.sessions.lease import LeaseTerms
from kvhold_server.sessions.session import OpenRequest
from tests.model.pair import chunked, full, window

UNIT = 4
HASH_BYTES = 32
POOL = PoolName("p")
WIRE_KINDS = {"full": "full_attention"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pool and how much of it the load wants."""

    groups: tuple[GroupConfig, ...]
    num_blocks: int
    caching: bool = True
    max_model_len: int = 4_096
    num_output_tokens: int = 40
    is_ordered: bool = True  # the free list's order is promised


CASES = {
    "full": Case(groups=(full(UNIT),), num_blocks=40),
    "full_uncached": Case(groups=(full(UNIT),), num_blocks=40, caching=False),
    "full_window": Case(groups=(full(UNIT), window(UNIT, 9)), num_blocks=70),
    "two_sizes": Case(groups=(full(2 * UNIT), window(UNIT, 9)), num_blocks=60),
    "window": Case(groups=(window(UNIT, 9),), num_blocks=24),
    "window_uncached": Case(
        groups=(full(UNIT), window(UNIT, 9)), num_blocks=70, caching=False, is_ordered=False
    ),
    "chunked": Case(groups=(full(UNIT), chunked(UNIT, 16)), num_blocks=70),
    "max_model_len": Case(groups=(full(UNIT),), num_blocks=40, max_model_len=41, num_output_tokens=100),
}  # fmt: skip


class Service:
    """A daemon's service on one pool, and one session's table on it."""

    def __init__(self, case: Case, max_allotted_blocks: int) -> None:
        secrets = iter(range(10**6))
        self.node = Node(
            shell=Shell(boot_id="twin", clock=lambda: 0.0, new_secret=lambda: f"secret-{next(secrets):028d}"),
            backends={"fake": FakeBackend()},
            default_backend="fake",
            terms=LeaseTerms(lease_ttl_s=1e9, grace_s=1e9),
            limits=ServerConfig().limits,
        )
        overrides = PoolOverrides(
            groups=case.groups, num_blocks=case.num_blocks, max_model_len_tokens=case.max_model_len
        )
        options = PoolOptions(backend="fake", overrides=overrides, enable_prefix_caching=case.caching)
        opening = self.node.begin_open_pool(OpenPoolCommand(name=POOL, plan=None, options=options))
        assert isinstance(opening, Opening)
        self.node.finish_open_pool(opening, (), self.node.make_pool(opening, ()))
        self._session = self.node.open_session(OpenRequest(pool=POOL), "").session
        self._blocks = BlockService(self.node)
        self.num_requests = self.num_refusals = self.num_drawn = self._part = 0
        self.table = SequenceTable(
            shape_of(case), send=self._send, max_silent_steps=5, max_allotted_blocks=max_allotted_blocks
        )

    @property
    def pool(self) -> Any:
        return self.node.pools[POOL].pool

    def begin_step(self) -> None:
        self._part = 0
        self.table.begin_step(self.table.step + 1, self.table.step)

    def _send(self, request: pb.StepRequest) -> StepReply:
        request.session_id, request.epoch = self._session.session_id, 1
        request.step, request.part, request.completed_step = self.table.step, self._part, self.table.completed_step
        self._part += 1
        self.num_requests += 1
        self.num_drawn += request.num_drawn_blocks
        response = self._blocks.answer_step(pb.StepRequest.FromString(request.SerializeToString()))
        self.pool.check_invariants()
        return StepReply(pb.StepResponse.FromString(response.SerializeToString()))


def shape_of(case: Case) -> PoolShape:
    groups = tuple(
        GroupShape(
            kind=WIRE_KINDS.get(group.kind.value, group.kind.value),
            block_size_tokens=group.block_size_tokens,
            sliding_window_tokens=group.window_tokens,
            attention_chunk_size_tokens=group.chunk_tokens,
        )
        for group in case.groups
    )
    return PoolShape(
        groups=groups,
        hash_size_bytes=HASH_BYTES,
        hash_block_size_tokens=UNIT,
        max_model_len_tokens=case.max_model_len,
    )


@dataclass
class Load:
    """What a step's randomness decides, for both twins the same."""

    arrivals: list[tuple[int, int, int]]  # id, prompt, tokens
    dice: int  # who finishes


def digest(text: int, unit: int) -> bytes:
    return (text << 64 | unit).to_bytes(HASH_BYTES, "big")


@dataclass
class Twin:
    """A scheduler. `log` is what it decided in a step."""

    case: Case
    service: Service
    budget: int
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    computed: dict[int, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, tuple[int, int]] = field(default_factory=dict)  # text, tokens
    log: list[Any] = field(default_factory=list)
    num_local_refusals: int = 0

    def arrive(self, sequence_id: int, prompt: int, num_tokens: int) -> None:
        self.prompts[sequence_id], self.known[sequence_id] = (prompt, num_tokens), num_tokens
        digests = b"".join(digest(prompt, unit) for unit in range(num_tokens // UNIT))
        self.waiting.append(self.service.table.new_sequence(sequence_id, digests))

    def step(self, load: Load) -> None:
        self.log = []
        table, budget = self.service.table, self.budget
        for arrival in load.arrivals:
            self.arrive(*arrival)
        self.service.begin_step()
        asked: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            computed = self.computed[sequence.sequence_id]
            wanted = min(self.known[sequence.sequence_id] - computed, budget)
            if not wanted:
                break
            budget -= wanted
            asked.append((sequence, wanted))
            target = computed + wanted
            if target > sequence.quiet_tokens:
                table.extend(sequence, slots_needed=target, processed_tokens=computed, publish_tokens=target)
        for sequence in self.waiting[:3] if budget else ():
            table.admit(sequence, num_tokens=self.known[sequence.sequence_id])
        first = outcome = self._flush(budget)
        while outcome.refused_extends:
            victim = self.running.pop()
            self.log.append(("preempt", victim.sequence_id))
            table.preempt(victim, computed_tokens=self.computed[victim.sequence_id])
            self.waiting.insert(0, victim)
            if victim is outcome.refused_extends[0].sequence:
                break
            table.ask_again(outcome)
            outcome = self._flush(0)
        self._advance(first, asked, load.dice)

    def _flush(self, budget: int) -> StepOutcome:
        num = self.service.num_requests
        outcome = self.service.table.flush(token_budget=budget)
        is_refused = bool(outcome.refused_extends or outcome.admit_refusal)
        self.num_local_refusals += is_refused and self.service.num_requests == num
        self.log.append(
            (
                [(s.sequence_id, ids) for s, ids in zip(outcome.extended, outcome.new_block_ids, strict=True)],
                [(ask.sequence.sequence_id, ask.slots_needed) for ask in outcome.refused_extends],
                [(a.sequence.sequence_id, a.hit_tokens, a.granted_tokens) for a in outcome.admitted],
                [s.sequence_id for s in outcome.not_admitted],
                [s.sequence_id for s in outcome.impossible],
                outcome.admit_refusal,
            )
        )
        for sequence in outcome.impossible:
            self.waiting.remove(sequence)
            self.service.table.finish(sequence)
        return outcome

    def _advance(self, first: StepOutcome, asked: list[tuple[Sequence, int]], dice: int) -> None:
        done = [(s, n) for s, n in asked if s.state is SequenceState.RUNNING]
        for admission in first.admitted:
            assert self.waiting.pop(0) is admission.sequence
            self.running.append(admission.sequence)
            self.computed[admission.sequence.sequence_id] = admission.hit_tokens
            done.append((admission.sequence, admission.granted_tokens))
        for sequence, tokens in done:
            key = sequence.sequence_id
            self.computed[key] += tokens
            if self.computed[key] < self.known[key]:
                continue
            text, num_prompt = self.prompts[key]
            self.known[key] += 1
            if not self.known[key] % UNIT:
                unit = self.known[key] // UNIT - 1
                sequence.add_hashes(digest(text if unit < num_prompt // UNIT else 1_000 + key, unit))
            is_long = self.known[key] > min(num_prompt + self.case.num_output_tokens, self.case.max_model_len)
            if is_long or (dice + key) % 37 == 0:
                self.log.append(("finish", key))
                self.service.table.finish(sequence, computed_tokens=self.computed[key])
                self.running.remove(sequence)

    def tables(self) -> dict[int, list[list[int]]]:
        return {sequence.sequence_id: [list(table) for table in sequence.tables] for sequence in self.running}

    def tell(self) -> None:
        """Everything, and that it is complete."""
        self.service.begin_step()
        self.service.table.flush(force=True)
        self.service.begin_step()
        self.service.table.flush(force=True)


def pool_of(twin: Twin) -> Any:
    """In which order different hashes came to be known is of no consequence."""
    state = twin.service.pool.describe()
    return replace(state, cache=sorted(state.cache)), twin.service.pool.counts()


def check_ownership(twin: Twin) -> None:
    """No block stands in two tables but by a hit, of the same contents at the same place."""
    places: dict[int, tuple[int, int, int]] = {}
    for sequence in twin.running:
        for group, table in enumerate(sequence.tables):
            size = twin.case.groups[group].block_size_tokens
            for i, block in enumerate(table):
                if not block:
                    continue
                text, num_prompt = twin.prompts[sequence.sequence_id]
                is_shared = (i + 1) * size <= num_prompt and twin.case.caching
                place = (group, i, text if is_shared else -sequence.sequence_id)
                assert places.setdefault(block, place) == place, "held by two"


def plain(log: list[Any], *, is_ordered: bool) -> list[Any]:
    """Without the ids, where which one is taken is not promised."""
    if is_ordered:
        return log
    return [
        entry if isinstance(entry[0], str) else ([(s, [len(i) for i in ids]) for s, ids in entry[0]], *entry[1:])
        for entry in log
    ]


@pytest.mark.parametrize("max_allotted_blocks", [2_048, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_a_table_that_draws_decides_as_one_that_asks(name: str, seed: int, max_allotted_blocks: int) -> None:
    case, chance = CASES[name], random.Random(f"{name} {seed}")
    asking, drawing = (Twin(case, Service(case, limit), 24) for limit in (0, max_allotted_blocks))
    next_id = 1
    for _ in range(250):
        arrivals = []
        if chance.random() < 0.15:
            most = min(30, case.max_model_len - 2)
            arrivals.append((next_id, chance.randint(1, 4), chance.randint(1, most)))
            next_id += 1
        load = Load(arrivals, chance.randrange(1_000))
        for twin in (asking, drawing):
            twin.step(load)
            twin.service.table.check_invariants()
        assert plain(asking.log, is_ordered=case.is_ordered) == plain(drawing.log, is_ordered=case.is_ordered)
        check_ownership(drawing)
        if case.is_ordered:
            assert asking.tables() == drawing.tables()
        if chance.random() < 0.08:
            for twin in (asking, drawing):
                twin.tell()
            if case.is_ordered:
                assert pool_of(asking) == pool_of(drawing)
            else:
                assert asking.service.pool.counts() == drawing.service.pool.counts()
    assert drawing.service.num_drawn and not asking.service.num_drawn
    assert drawing.service.num_requests < asking.service.num_requests
    if not any(group.forgets for group in shape_of(case).groups):
        assert drawing.num_local_refusals
    assert not asking.num_local_refusals


def admitted_after_evictions(max_allotted_blocks: int) -> tuple[list[int], list[int]]:
    """Hits of a queue's head that was refused: before, and after the running sequence has evicted a part of it."""
    service = Service(Case(groups=(full(UNIT), window(UNIT, 9)), num_blocks=28), max_allotted_blocks)
    table = service.table
    text = b"".join(digest(1, unit) for unit in range(10))
    other, short, long = table.new_sequence(4, b""), table.new_sequence(1, b""), table.new_sequence(2, text)
    service.begin_step()
    for sequence, num_tokens in ((other, 20), (short, 1), (long, 40)):
        table.admit(sequence, num_tokens=num_tokens)
    assert len(table.flush(token_budget=29).admitted) == 3
    for target in (16, 24, 32, 40):
        service.begin_step()
        table.extend(long, slots_needed=target, processed_tokens=target - 8, publish_tokens=target)
        assert not table.flush().refused_extends
    table.finish(long, computed_tokens=40)
    head, hits = table.new_sequence(3, text), []
    for slots in (0, 5, 9):
        service.begin_step()
        if slots:
            table.extend(short, slots_needed=slots, processed_tokens=slots - 1)
        table.admit(head, num_tokens=48)
        outcome = table.flush(token_budget=8)
        hits += [admission.hit_tokens for admission in outcome.admitted] or [-1]
        if head.tables:
            break
    return hits, [len(table) for table in head.tables]


def test_a_head_that_hits_less_since_blocks_were_drawn_is_asked_for_again() -> None:
    """With a token budget it may need less then: in a pool with windows a prefix can be lost as a whole."""
    asked = admitted_after_evictions(0)
    assert asked[0][0] == -1 and asked[0][-1] == 0, "refused at first, admitted without a hit later"
    assert admitted_after_evictions(2_048) == asked


def test_behind_a_refusal_that_was_known_nothing_is_tried() -> None:
    """Nor is an extend that only the daemon could answer: the daemon would not have tried it, either."""
    service = Service(Case(groups=(full(UNIT),), num_blocks=8), 2_048)
    table = service.table
    sequences = [table.new_sequence(i, b"") for i in (1, 2)]
    service.begin_step()
    for sequence in sequences:
        table.admit(sequence, num_tokens=8)
    table.flush()
    service.begin_step()
    table.extend(sequences[0], slots_needed=40, processed_tokens=8)
    table.extend(sequences[1], slots_needed=9, processed_tokens=8, num_lookahead_tokens=1)
    outcome = table.flush()
    assert [ask.sequence for ask in outcome.refused_extends] == sequences
    assert outcome.refused_extends[1].options == {"num_lookahead_tokens": 1}
    assert not outcome.sent and service.num_requests == 1
