"""The mirror against a naive daemon: after every step both have the same tables, and silence was always right."""

import random
from typing import Any

import pytest

from kvhold.v1 import block_pb2 as pb
from kvhold_client.errors import InvalidRequest
from kvhold_client.results import ItemStatus
from kvhold_client.sequence import Sequence, SequenceState
from kvhold_client.sequence_table import SequenceTable
from kvhold_client.shape import GroupShape, PoolShape
from kvhold_client.step import decode_step
from kvhold_client.step_outcome import StepOutcome
from kvhold_client.step_reply import StepReply

HASH_BYTES = 4
FULL = GroupShape(kind="full_attention", block_size_tokens=4)
WINDOW = GroupShape(kind="sliding_window", block_size_tokens=4, sliding_window_tokens=8)
CHUNKED = GroupShape(kind="chunked_local", block_size_tokens=2, attention_chunk_size_tokens=6)
RING = GroupShape(kind="circular_buffer", block_size_tokens=4)


def shape_of(*groups: GroupShape) -> PoolShape:
    return PoolShape(groups=groups, hash_size_bytes=HASH_BYTES, hash_block_size_tokens=4)


class NaiveDaemon:
    """Tables and a count of free blocks, written from the contract's text; no prefix cache."""

    def __init__(self, shape: PoolShape, num_blocks: int) -> None:
        self.shape = shape
        self.free = list(range(num_blocks - 1, 0, -1))
        self.tables: dict[int, list[list[int]]] = {}
        self.hashes: dict[int, int] = {}
        self.num_calls = 0

    def step(self, request: pb.StepRequest) -> StepReply:
        self.num_calls += 1
        response = pb.StepResponse(boot_id="boot")
        for sequence_id in request.free.sequence_ids:
            for table in self.tables.pop(sequence_id, []):
                self.free += [block for block in table if block]
        counts = request.free.num_hashes
        for sequence_id, count in zip(request.free.sequence_ids, counts, strict=True):
            self.hashes[sequence_id] = self.hashes.get(sequence_id, 0) + count
        refused = self._extend(request.extend, response) if request.HasField("extend") else False
        if request.HasField("admit"):
            self._admit(request.admit, response, refused)
        return decode_step(response)

    def _extend(self, items: pb.ExtendItems, response: pb.StepResponse) -> bool:
        refused = False
        for i, sequence_id in enumerate(items.sequence_ids):
            status, new = ItemStatus.NOT_TRIED, [[] for _ in self.shape.groups]
            if not refused:
                self._release(sequence_id, items.processed_tokens[i])
                new = self._grow(sequence_id, items.slots_needed[i])
                refused = new is None
                status = ItemStatus.OUT_OF_BLOCKS if refused else ItemStatus.OK
                new = new or [[] for _ in self.shape.groups]
            if status == ItemStatus.OK:
                self.hashes[sequence_id] = self.hashes.get(sequence_id, 0) + items.num_hashes[i]
            response.extend.statuses.append(int(status))
            response.extend.num_new_blocks.extend(len(ids) for ids in new)
            response.extend.block_ids.extend(block for ids in new for block in ids)
        return refused

    def _admit(self, items: pb.AdmitItems, response: pb.StepResponse, refused: bool) -> None:
        left = items.token_budget or 2**31
        for i, sequence_id in enumerate(items.sequence_ids):
            status, tables, granted = ItemStatus.NOT_TRIED, [[] for _ in self.shape.groups], 0
            if not refused and not left:
                status = ItemStatus.NO_BUDGET
            elif not refused:
                granted = min(items.num_tokens[i], left)
                self.tables[sequence_id] = [[] for _ in self.shape.groups]
                new = self._grow(sequence_id, granted)
                refused = new is None
                status = ItemStatus.OUT_OF_BLOCKS if refused else ItemStatus.OK
                if refused:
                    del self.tables[sequence_id]
                    granted = 0
                else:
                    tables = [list(table) for table in self.tables[sequence_id]]
                    left -= granted
                if items.num_hashes[i]:
                    self.hashes[sequence_id] = items.num_hashes[i]
            response.admit.statuses.append(int(status))
            response.admit.hit_tokens.append(0)
            response.admit.granted_tokens.append(granted)
            response.admit.num_blocks.extend(len(table) for table in tables)
            response.admit.num_hit_blocks.extend(0 for _ in tables)
            response.admit.block_ids.extend(block for table in tables for block in table)

    def _grow(self, sequence_id: int, slots: int) -> "list[list[int]] | None":
        tables = self.tables[sequence_id]
        needs = []
        for group, table in zip(self.shape.groups, tables, strict=True):
            wanted = -(-slots // group.block_size_tokens) if group.paged else 1
            needs.append(max(0, wanted - len(table)))
        if sum(needs) > len(self.free):
            return None
        new = [[self.free.pop() for _ in range(need)] for need in needs]
        for table, ids in zip(tables, new, strict=True):
            table += ids
        return new

    def _release(self, sequence_id: int, processed: int) -> None:
        for group, table in zip(self.shape.groups, self.tables[sequence_id], strict=True):
            for i in range(min(skip(group, processed) // group.block_size_tokens, len(table))):
                if table[i]:
                    self.free.append(table[i])
                    table[i] = 0


def skip(group: GroupShape, computed: int) -> int:
    """Tokens that nothing reads any more, said anew."""
    if group.sliding_window_tokens:
        return max(0, computed - group.sliding_window_tokens + 1)
    if group.attention_chunk_size_tokens:
        return computed - computed % group.attention_chunk_size_tokens
    return 0


class Engine:
    """A scheduler like the yardstick's: running first, preempting the last one; then the queue."""

    def __init__(self, shape: PoolShape, num_blocks: int, seed: int) -> None:
        self.daemon = NaiveDaemon(shape, num_blocks)
        self.table = SequenceTable(shape, send=self.daemon.step, max_silent_steps=3)
        self.chance = random.Random(seed)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.computed: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.next_id = 1

    def arrive(self) -> None:
        num_tokens = self.chance.randint(1, 30)
        digests = self.chance.randbytes(num_tokens // 4 * HASH_BYTES)
        sequence = self.table.new_sequence(self.next_id, digests)
        self.known[self.next_id] = num_tokens
        self.next_id += 1
        self.waiting.append(sequence)

    def step(self) -> None:
        self.table.begin_step(self.table.step + 1, self.table.step)
        budget, asked = 24, []
        for sequence in self.running:
            computed = self.computed[sequence.sequence_id]
            wanted = min(self.known[sequence.sequence_id] - computed, budget)
            if not wanted:
                break
            budget -= wanted
            asked.append((sequence, wanted))
            if computed + wanted > sequence.quiet_tokens:
                self.table.extend(
                    sequence,
                    slots_needed=computed + wanted,
                    processed_tokens=computed,
                    publish_tokens=computed + wanted,
                )
            else:
                self._check_silence(sequence, computed, computed + wanted)
        if budget:
            for sequence in self.waiting[:3]:
                self.table.admit(sequence, num_tokens=self.known[sequence.sequence_id])
        first = outcome = self.table.flush(token_budget=budget)
        while outcome.refused_extends:
            victim = self.running.pop()
            self.table.preempt(victim, computed_tokens=self.computed[victim.sequence_id])
            self.waiting.insert(0, victim)
            if victim is outcome.refused_extends[0].sequence:
                break
            self.table.ask_again(outcome)
            outcome = self.table.flush()
        self._advance(first, asked)

    def _advance(self, first: StepOutcome, asked: "list[tuple[Sequence, int]]") -> None:
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
            self.known[key] += 1
            if not self.known[key] % 4:
                sequence.add_hashes(self.chance.randbytes(HASH_BYTES))
            if self.chance.random() < 0.05 or self.known[key] > 60:
                self.table.finish(sequence, computed_tokens=self.computed[key])
                self.running.remove(sequence)

    def _check_silence(self, sequence: Sequence, computed: int, target: int) -> None:
        tables = self.daemon.tables[sequence.sequence_id]
        for group, table in zip(self.daemon.shape.groups, tables, strict=True):
            if group.paged:
                assert len(table) * group.block_size_tokens >= target, "silent although it needs a block"
            due = min(skip(group, computed) // group.block_size_tokens, len(table))
            assert not any(table[:due]), "silent although a block has left the window"

    def check(self) -> None:
        self.table.check_invariants()
        for sequence in self.running:
            assert sequence.tables == self.daemon.tables[sequence.sequence_id]
            assert sequence.num_hashes_sent == self.daemon.hashes.get(sequence.sequence_id, 0)


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW), (FULL, CHUNKED), (FULL, RING, WINDOW)], ids=len)
@pytest.mark.parametrize("seed", range(4))
def test_mirror_and_daemon_agree_after_every_step(groups: "tuple[GroupShape, ...]", seed: int) -> None:
    engine = Engine(shape_of(*groups), num_blocks=40 * len(groups), seed=seed)
    for _ in range(200):
        if engine.chance.random() < 0.3:
            engine.arrive()
        engine.step()
        engine.check()
    assert engine.daemon.num_calls < 400


def test_every_block_comes_back_when_all_sequences_are_finished() -> None:
    engine = Engine(shape_of(FULL, WINDOW), num_blocks=60, seed=9)
    for _ in range(50):
        engine.arrive() if engine.chance.random() < 0.4 else None
        engine.step()
    for sequence in [*engine.running, *engine.waiting]:
        engine.table.finish(sequence)
    engine.table.begin_step(engine.table.step + 1, engine.table.step)
    engine.table.flush(force=True)
    assert sorted(engine.daemon.free) == list(range(1, 60))
    assert not engine.table.sequences


def decode_table(num_sequences: int, block_size: int = 16) -> "tuple[SequenceTable, NaiveDaemon, list[Sequence]]":
    shape = shape_of(GroupShape(kind="full_attention", block_size_tokens=block_size))
    daemon = NaiveDaemon(shape, 100_000)
    table = SequenceTable(shape, send=daemon.step)
    sequences = [table.new_sequence(i + 1) for i in range(num_sequences)]
    table.begin_step(1, 0)
    for sequence in sequences:
        table.admit(sequence, num_tokens=32)
    table.flush()
    return table, daemon, sequences


def test_most_decode_steps_send_nothing() -> None:
    table, daemon, sequences = decode_table(8)
    calls = daemon.num_calls
    for target in range(33, 33 + 64):  # 64 tokens in 16-token blocks: four steps in which a block is needed
        table.begin_step(table.step + 1, table.step)
        for sequence in sequences:
            if target > sequence.quiet_tokens:
                table.extend(sequence, slots_needed=target, processed_tokens=target - 1, publish_tokens=target)
        table.flush()
    # Besides those four: the end of the first step is reported once, after 16 silent ones at the latest.
    assert daemon.num_calls - calls <= 4 + 4


def test_a_finished_sequence_is_reported_after_a_bounded_number_of_silent_steps() -> None:
    table, daemon, sequences = decode_table(1)
    table.finish(sequences[0])
    calls = daemon.num_calls
    for _ in range(17):
        table.begin_step(table.step + 1, table.step)
        table.flush()
    assert daemon.num_calls == calls + 1
    assert not daemon.tables


def test_the_hashes_of_a_refused_sequence_travel_once() -> None:
    shape = shape_of(FULL)
    daemon = NaiveDaemon(shape, num_blocks=3)
    sent: list[int] = []

    def send(request: pb.StepRequest) -> StepReply:
        sent.append(len(request.admit.hashes))
        return daemon.step(request)

    table = SequenceTable(shape, send=send)
    sequence = table.new_sequence(1, b"abcd" * 5)
    for step in (1, 2, 3):
        table.begin_step(step, step - 1)
        table.admit(sequence, num_tokens=20)
        assert table.flush().admit_refusal is ItemStatus.OUT_OF_BLOCKS
    assert sent == [20, 0, 0]


def test_hashes_that_the_daemon_forgot_are_sent_again() -> None:
    table = SequenceTable(shape_of(FULL))
    sequence = table.new_sequence(1, b"abcd")
    sequence.num_hashes_sent = 1
    table.begin_step(1, 0)
    table.admit(sequence, num_tokens=5)
    assert table.plan_step() is not None
    response = pb.StepResponse()
    response.admit.statuses.append(pb.ITEM_STATUS_UNKNOWN_SEQUENCE)
    table.apply(decode_step(response))
    table.admit(sequence, num_tokens=5)
    request = table.plan_step()
    assert request is not None
    assert request.admit.hashes == b"abcd"


def test_what_a_restarted_daemon_lost_is_marked_and_can_be_admitted_again() -> None:
    table, _, sequences = decode_table(3)
    lost = table.lose([2])
    assert lost == [sequences[1]]
    assert sequences[1].state is SequenceState.LOST
    assert [held.sequence_id for held in table.held_sequences()] == [1, 3]
    table.preempt(sequences[1])
    assert sequences[1].state is SequenceState.WAITING
    table.begin_step(2, 1)
    assert table.plan_step(force=True) is not None
    assert not table.plan_step(force=True).HasField("free")  # type: ignore[union-attr]


def test_what_was_let_go_while_the_session_came_back_is_not_lost() -> None:
    table, _, sequences = decode_table(3)
    table.preempt(sequences[1])
    table.finish(sequences[2])
    assert table.lose([1, 2, 3]) == [sequences[0]]
    assert sequences[1].state is SequenceState.WAITING and not sequences[1].is_known


def test_only_proven_tokens_are_reasserted() -> None:
    """A step that was not complete may be half-written: its blocks must not be published again."""
    table, _, (sequence,) = decode_table(1)
    table.begin_step(2, 1)
    table.extend(sequence, slots_needed=48, processed_tokens=32, publish_tokens=48)
    table.flush()
    (held,) = table.held_sequences()
    assert held.publish_tokens == 32
    table.begin_step(3, 2)
    (held,) = table.held_sequences()
    assert held.publish_tokens == 48


def test_a_contradicting_item_is_an_error_for_the_caller() -> None:
    table, _, (sequence,) = decode_table(1)
    table.begin_step(2, 1)
    table.extend(sequence, slots_needed=48, processed_tokens=32)
    table.plan_step()
    response = pb.StepResponse()
    response.extend.statuses.append(pb.ITEM_STATUS_INVALID)
    response.problems.add(part="extend", index=0, reason="BAD_COUNT", message="slots_needed")
    with pytest.raises(InvalidRequest, match=r"extend\[0\]: BAD_COUNT"):
        table.apply(decode_step(response))


def test_a_step_of_many_quiet_sequences_calls_no_method_of_the_table() -> None:
    """What a running sequence costs is one comparison: counted, not timed."""
    table, daemon, sequences = decode_table(256)
    asked: list[Any] = []
    table.begin_step(2, 1)
    for sequence in sequences:
        if sequence.quiet_tokens < 32:
            asked.append(sequence)
    assert not asked
    assert not table.flush().sent
    assert daemon.num_calls == 1
