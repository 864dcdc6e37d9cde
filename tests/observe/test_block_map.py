"""The map of blocks and the search, over a small real pool."""

import asyncio

import pytest

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, PoolConfig
from kvhold_server.observe.block_map import MAX_CELLS, draw_map, find, fold
from tests.model.by_hand import HandPool

HASHES = [bytes([i]) * 32 for i in range(1, 9)]


@pytest.fixture
def pool() -> HandPool:
    config = PoolConfig(
        groups=(GroupConfig(kind=GroupKind.FULL, block_size_tokens=4),),
        num_blocks=12,
        hash_unit_tokens=4,
        scheduler_block_tokens=4,
        max_model_len=64,
        num_reserved_low_blocks=2,
    )
    return HandPool(config)


def letters(pool: HandPool) -> str:
    return asyncio.run(draw_map(pool)).cells


def admit(pool: HandPool, session: int, sequence: int, step: int, num_blocks: int) -> None:
    pool.begin_step(session, step, step - 1)
    pool.admit(session, sequence, num_tokens=4 * num_blocks, token_budget=100, hashes=HASHES[:num_blocks])
    pool.end_step(session)


def test_a_block_goes_through_its_letters(pool: HandPool) -> None:
    assert letters(pool) == "nrr" + "f" * 9
    session = pool.open_session()
    admit(pool, session, 1, step=1, num_blocks=3)
    assert letters(pool).count("p") == 3, "published by a step that is not complete"
    pool.complete(session, 1)
    assert letters(pool).count("h") == 3
    pool.begin_step(session, 2, 1)
    pool.free(session, 1, computed_tokens=12)
    pool.end_step(session)
    pool.complete(session, 2)
    drawn = letters(pool)
    assert sum(drawn.count(letter) for letter in "ABCD") == 3 and drawn.count("f") == 6


def test_blocks_of_the_dead_are_quarantined(pool: HandPool) -> None:
    session = pool.open_session()
    admit(pool, session, 1, step=1, num_blocks=2)
    pool.complete(session, 1)
    pool.kill_session(session)
    while not pool.reap(session, 100):
        pass
    assert letters(pool).count("q") == 2
    while not pool.release_quarantine(session, 100):
        pass
    assert "q" not in letters(pool)


def test_letters_agree_with_the_counts(pool: HandPool) -> None:
    session = pool.open_session()
    for i in range(3):
        admit(pool, session, i + 1, step=i + 1, num_blocks=i + 1)
        counts, drawn = pool.counts(), letters(pool)
        assert sum(map(drawn.count, "hp")) == counts.held
        assert sum(map(drawn.count, "ABCD")) == counts.cached
        assert (drawn.count("f"), drawn.count("r"), drawn.count("n")) == (counts.free, counts.reserved, counts.null)


def test_next_victims_are_the_palest(pool: HandPool) -> None:
    session = pool.open_session()
    admit(pool, session, 1, step=1, num_blocks=8)
    pool.complete(session, 1)
    pool.begin_step(session, 2, 1)
    pool.free(session, 1, computed_tokens=32)
    pool.end_step(session)
    pool.complete(session, 2)
    drawn = letters(pool)
    order = [block for block in pool.describe().free_order if drawn[block] in "ABCD"]
    assert "".join(drawn[block] for block in order) == "DDCCBBAA"


@pytest.mark.parametrize("num_blocks", [1, MAX_CELLS, MAX_CELLS + 1, 3 * MAX_CELLS + 7])
def test_large_pools_are_folded_into_a_bounded_number_of_cells(num_blocks: int) -> None:
    drawn = fold(b"n" + b"h" * (num_blocks - 1))
    assert len(drawn.cells) <= MAX_CELLS
    assert (len(drawn.cells) - 1) * drawn.blocks_per_cell < num_blocks <= len(drawn.cells) * drawn.blocks_per_cell
    assert num_blocks == 1 or set(drawn.cells[1:]) <= {"h"}


def test_search_says_who_holds_a_block_and_where_a_hash_is(pool: HandPool) -> None:
    session = pool.open_session()
    admit(pool, session, 5, step=1, num_blocks=2)
    block = pool.tables(session, 5)[0][1]
    text = find(pool, str(block))
    assert "sequence 5, group 0, position 1" in text and HASHES[1].hex() in text and "provisional" in text
    assert find(pool, HASHES[1].hex()) == text
    assert find(pool, "0x" + HASHES[1].hex()) == text


def test_search_tells_evicted_from_never_seen(pool: HandPool) -> None:
    session = pool.open_session()
    admit(pool, session, 1, step=1, num_blocks=2)
    pool.complete(session, 1)
    pool.begin_step(session, 2, 1)
    pool.free(session, 1, computed_tokens=8)
    pool.admit(session, 2, num_tokens=36, token_budget=100, hashes=[bytes([99 + i]) * 32 for i in range(9)])
    pool.end_step(session)
    assert "evictions ago" in find(pool, HASHES[1].hex())
    assert "not among the hashes evicted lately" in find(pool, "ab" * 32)


@pytest.mark.parametrize(
    ("query", "answer"), [("12", "no block 12"), ("-1", "neither"), ("zz", "neither"), ("0", "null")]
)
def test_search_answers_anything(pool: HandPool, query: str, answer: str) -> None:
    assert answer in find(pool, query)
