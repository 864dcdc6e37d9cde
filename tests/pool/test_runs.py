"""Stretches of consecutive ids: found exactly, and a pool that uses them decides as one that does not."""

import random
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold_server.pool import blocks, prefix_index, runs
from kvhold_server.pool.kinds import base
from kvhold_server.pool.runs import SHORTEST, Runs, read, write
from tests.model.pair import CONFIGS, Pair

NUM = 400


@st.composite
def tables(draw: st.DrawFn) -> list[int]:
    """Parts of the pool in a row, up or down, with single blocks and null ones in between."""
    table: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        first, num = draw(st.integers(0, NUM - 1)), draw(st.integers(1, 90))
        part = [first + i for i in range(num) if first + i < NUM]
        table += part[:: draw(st.sampled_from((1, -1)))]
    for i in draw(st.lists(st.integers(0, NUM), max_size=3)):
        if i < len(table):
            table[i] = draw(st.integers(0, NUM - 1))
    return table


@settings(max_examples=300, deadline=None)
@given(st.lists(tables(), min_size=1, max_size=4))
def test_pieces_are_the_table_in_order_and_slices_are_their_ids(asked: list[list[int]]) -> None:
    """One `Runs` for several tables: what it remembers of the first must not decide about the second."""
    known, ids = Runs(NUM), list(range(NUM))
    for table in asked:
        pieces = known.cut(table)
        assert [block for piece, _ in pieces for block in piece] == table
        for piece, where in pieces:
            if where is not None:
                assert ids[where] == piece and 0 not in piece and len(piece) >= SHORTEST
        assert read(ids, pieces) == table
        column = [0] * NUM
        write(column, pieces, 7)
        assert column == [7 if block in set(table) else 0 for block in range(NUM)]


@pytest.mark.parametrize("step", (1, -1))
def test_a_prompt_between_other_blocks_is_one_stretch(step: int) -> None:
    prompt = list(range(100, 300))[::step]
    pieces = Runs(NUM).cut([7, 9, *prompt, 3, 350, 2])
    stretches = [piece for piece, where in pieces if where is not None]
    assert len(stretches) == 1 and len(stretches[0]) > len(prompt) - SHORTEST


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shortest", (2, 3))
@pytest.mark.parametrize("name", CONFIGS)
def test_a_pool_of_short_stretches_agrees_with_the_model(
    name: str, shortest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's tables are short: with stretches of two and three blocks, they have many."""
    module: ModuleType
    for module in (runs, blocks, prefix_index, base):
        monkeypatch.setattr(module, "SHORTEST", shortest)
    for run in range(2):
        rng = random.Random(f"{name}/{run}")
        pair = Pair(CONFIGS[name], max_sessions=1 + run % 4, check_every=8, tells_stored=bool(run % 2))
        for _ in range(400):
            pair.random_operation(rng)
        pair.drain()


def test_a_hash_twice_in_a_prompt_holds_its_block_twice() -> None:
    """Nobody should send it; whoever does must not spoil the counts of others."""
    store = blocks.BlockStore(num_blocks=9, num_groups=1)
    taken = store.take(1, 1)
    store.prefixes.publish(0, taken, [b"a"], prefix_index.Origin(0, 1, 1), [16])
    store.let_go(taken, None)
    store.hold(taken * 2)
    assert store.refs[taken[0]] == 2 and store.free.count == 7 and store.num_cached == 0
