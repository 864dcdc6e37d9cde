"""SIGKILL between any two stores of a scripted run of 200 operations: what comes back is true, and complete.

Each failpoint is reached in a process of its own that ends itself by SIGKILL there. For the operation that was under
way, a block may be in its state before or after; for every other block there is no choice.
"""

import os
import random
import signal
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvhold_server.failpoints import Failpoints
from kvhold_server.memory.block_table import PLACES, BlockTable
from kvhold_server.memory.block_table_header import TableIdentity, identity_digest
from kvhold_server.memory.recovery_errors import BlockTableUnusable

NUM_BLOCKS = 24
NUM_OPERATIONS = 200
Record = tuple[int, bytes, int]  # group, hash, tokens


@dataclass
class Model:
    """What a reader may find: all that was recorded and not forgotten, of the current generation."""

    records: dict[int, Record] = field(default_factory=dict)
    generation: int = 1
    allotted: list[int] = field(default_factory=list)


Operation = Callable[[BlockTable, Model], None]


def identity(generation: int) -> TableIdentity:
    return TableIdentity.of(plan="p", byte_format="f", options="o", regions="r", content=f"weights {generation}")


def recording(records: dict[int, Record]) -> Operation:
    def apply(table: BlockTable, model: Model) -> None:
        columns = list(zip(*records.values(), strict=True))
        table.record(list(records), columns[0], columns[1], columns[2])
        model.records |= records

    return apply


def forgetting(blocks: list[int]) -> Operation:
    def apply(table: BlockTable, model: Model) -> None:
        table.forget(blocks)
        for block in blocks:
            model.records.pop(block, None)

    return apply


def touching(blocks: list[int]) -> Operation:
    return lambda table, model: table.touch(blocks)


def allotting(blocks: list[int]) -> Operation:
    def apply(table: BlockTable, model: Model) -> None:
        table.allot(blocks)
        model.allotted = blocks

    return apply


def new_weights(table: BlockTable, model: Model) -> None:
    table.start_generation(identity_digest(f"weights {model.generation + 1}"))
    model.generation += 1
    model.records.clear()


def ending_in_order(table: BlockTable, model: Model) -> None:
    table.mark_clean(True)
    table.mark_clean(False)


def script() -> list[Operation]:
    choice = random.Random(5)
    operations: list[Operation] = []
    for number in range(NUM_OPERATIONS):
        blocks = choice.sample(range(1, NUM_BLOCKS), choice.randint(1, 4))
        kind = choice.choices(["record", "forget", "allot", "touch", "weights", "clean"], [50, 25, 10, 8, 3, 4])[0]
        records = {b: (b % 2, choice.randbytes(32), 16 * number + b) for b in blocks}
        operations.append(
            {
                "record": recording(records),
                "forget": forgetting(blocks),
                "allot": allotting(blocks),
                "touch": touching(blocks),
                "weights": new_weights,
                "clean": ending_in_order,
            }[kind]
        )
    return operations


@dataclass
class Moment:
    """One operation of the script."""

    last_failpoint: int  # passed when it was done
    before: Model
    after: Model


def run(path: Path, failpoints: Failpoints) -> list[Moment]:
    """Runs the whole script and keeps every state on the way."""
    model = Model()
    moments = []
    table = BlockTable.create(path, identity(1), num_blocks=NUM_BLOCKS, hash_size_bytes=32, hit=failpoints)
    for operation in script():
        before = deepcopy(model)
        operation(table, model)
        moments.append(Moment(failpoints.seen.total(), before, deepcopy(model)))
    table.close()
    return moments


def recover(path: Path, generation: int, allotted: list[list[int]] | None = None) -> dict[int, Record]:
    """`allotted`: what the table may say of that."""
    table = BlockTable.open(path, identity(generation), num_blocks=NUM_BLOCKS, hash_size_bytes=32)
    assert allotted is None or table.allotted() in allotted
    found = table.scan()
    assert sorted(found.order) == found.blocks
    records = zip(found.groups, found.hashes, found.key_tokens, strict=True)
    table.close()
    return dict(zip(found.blocks, records, strict=True))


def killed_at(failpoint: int, path: Path) -> None:
    """Runs the script in a child that ends by SIGKILL at the n-th failpoint."""
    child = os.fork()
    if not child:
        try:
            run(path, Failpoints(at_total=failpoint, action="exit"))
        finally:
            os._exit(1)  # it should not have come so far
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def check(path: Path, before: Model, after: Model) -> None:
    found = recover_any(path, before, after)
    for block, record in found.items():
        assert record in (before.records.get(block), after.records.get(block)), f"block {block}: never said"
    if before.generation == after.generation:
        settled = {block: record for block, record in before.records.items() if after.records.get(block) == record}
        assert settled.items() <= found.items(), "recorded, and lost"
    else:
        assert found in (before.records, {}), "a generation ends for all blocks at once"


def recover_any(path: Path, before: Model, after: Model) -> dict[int, Record]:
    """The table belongs to one of the two generations; whoever opens it knows only that.

    A list of allotted blocks that is torn is none: its client was not told of it, and has said what it drew before.
    """
    allotted = [before.allotted, after.allotted]
    if before.allotted != after.allotted:
        allotted.append([])
    try:
        return recover(path, before.generation, allotted)
    except BlockTableUnusable:
        if before.generation == after.generation:
            raise
        return recover(path, after.generation, allotted)


@pytest.mark.slow
def test_a_kill_at_any_failpoint_loses_nothing_recorded_and_invents_nothing(tmp_path: Path) -> None:
    counting = Failpoints()
    moments = run(tmp_path / "whole", counting)
    assert set(counting.seen) == set(PLACES), "the script reaches every place"
    total = counting.seen.total()
    assert total > 3 * NUM_OPERATIONS
    for failpoint in range(1, total + 1):
        killed_at(failpoint, tmp_path / "t")
        moment = next(moment for moment in moments if moment.last_failpoint >= failpoint)
        check(tmp_path / "t", moment.before, moment.after)


def test_the_check_itself_notices_what_is_lost_or_invented(tmp_path: Path) -> None:
    """A lost record and an invented one fail the check: else the test above would prove nothing."""
    before = Model(records={1: (0, b"a" * 32, 16)})
    for found, after in (
        ({}, Model(records={1: (0, b"a" * 32, 16), 2: (0, b"b" * 32, 16)})),  # lost block 1, not under way
        ({1: (0, b"c" * 32, 16)}, before),  # another hash
    ):
        path = tmp_path / "t"
        table = BlockTable.create(path, identity(1), num_blocks=NUM_BLOCKS, hash_size_bytes=32)
        if found:
            recording(found)(table, Model())
        table.close()
        try:
            check(path, before, after)
        except AssertionError:
            continue
        raise AssertionError("not noticed")
