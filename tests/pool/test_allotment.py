"""What a session was allotted: nobody else gets or hits it, whatever happens before the session says what it drew."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.errors import DrawsDiffer, UnknownSequence
from kvhold_server.pool.free_list import FreeList
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.values import AdmitColumns, ExtendColumns, FreeColumns, Removed, Status, StepInput, StepOutput
from tests.model.pair import full, mamba, pool_of, window


class Scheduler:
    """A session that steps by hand; all its steps but the last are complete."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.step = pool, 0
        self.session = pool.open_session()

    def say(self, *, max_allotted_blocks: int = 8, **parts: Any) -> StepOutput:
        self.step += 1
        items = StepInput(
            step=self.step, completed_step=self.step - 1, max_allotted_blocks=max_allotted_blocks, **parts
        )
        try:
            output = self.pool.step(self.session, items)
        except KvholdError:
            self.step -= 1
            raise
        self.pool.check_invariants()
        return output

    def admit(self, sequence_id: int, text: str, num_tokens: int, **more: Any) -> StepOutput:
        hashes = [f"{text}{i}".encode() for i in range(num_tokens // 4)]
        admit = AdmitColumns(
            sequence_ids=[sequence_id], num_tokens=[num_tokens], hash_counts=[len(hashes)], hashes=hashes
        )
        return self.say(admit=admit, token_budget=1_000, **more)

    def drew(self, sequence_id: int, slots: int, num_blocks: int, **more: Any) -> StepOutput:
        return self.say(drawn=rows((sequence_id, slots)), num_drawn_blocks=num_blocks, **more)


def rows(*needs: tuple[int, int]) -> ExtendColumns:
    return ExtendColumns(
        sequence_ids=[sequence_id for sequence_id, _ in needs],
        slots_needed=[slots for _, slots in needs],
        processed_tokens=[0] * len(needs),
    )


def frees(*sequence_ids: int) -> FreeColumns:
    return FreeColumns(sequence_ids=list(sequence_ids))


def begun(num_blocks: int = 12) -> tuple[Pool, Scheduler, list[int]]:
    """Sequence 1 runs with one block; what is allotted still has the hashes of sequence 2, which is over."""
    pool = Pool(pool_of(full(), num_blocks=num_blocks))
    ann = Scheduler(pool)
    ann.admit(1, "short", 4)
    ann.admit(2, "P", 4 * (num_blocks - 2))
    allotted = ann.say(free=frees(2)).allotted_blocks
    assert len(allotted) == 8 and all(pool.store.key_of[block] is not None for block in allotted)
    return pool, ann, allotted


def dump(pool: Pool) -> Any:
    return pool.describe(), pool.counts()


def test_what_was_drawn_is_as_if_it_had_been_asked_for() -> None:
    (drawing, ann, allotted), (asking, bob, _) = begun(), begun()
    ann.drew(1, 12, 2)
    bob.say(extend=rows((1, 12)))
    assert drawing.tables(ann.session, 1)[0][1:] == allotted[:2]
    assert dump(drawing) == dump(asking)


def test_eviction_of_what_was_drawn_is_told() -> None:
    _, ann, allotted = begun()
    events = ann.drew(1, 12, 2).events
    assert [block for event in events if isinstance(event, Removed) for block in event.blocks] == allotted[:2]


@pytest.mark.parametrize(
    ("drawn", "num_blocks", "error"),
    [
        (rows((1, 12)), 1, DrawsDiffer),
        (rows((1, 12)), 3, DrawsDiffer),
        (rows((1, 48)), 11, DrawsDiffer),  # more than was allotted
        (rows((1, 12), (7, 4)), 3, UnknownSequence),
        (rows(), 1, DrawsDiffer),
    ],
)
def test_a_request_that_says_something_else_leaves_no_trace(
    drawn: ExtendColumns, num_blocks: int, error: type[Exception]
) -> None:
    pool, ann, allotted = begun()
    before = dump(pool)
    with pytest.raises(error):
        ann.say(drawn=drawn, num_drawn_blocks=num_blocks, free=frees(1))
    assert dump(pool) == before
    ann.drew(1, 12, 2)
    assert pool.tables(ann.session, 1)[0][1:] == allotted[:2]


def test_another_session_neither_gets_nor_hits_what_is_allotted() -> None:
    pool, ann, allotted = begun()
    bob = Scheduler(pool)
    told = [block for event in pool.take_events() if isinstance(event, Removed) for block in event.blocks]
    assert told == allotted
    answer = bob.admit(9, "P", 40)
    assert answer.admit_status == [Status.REFUSED] and not answer.is_only_session and not answer.allotted_blocks
    answer = bob.admit(8, "Q", 8)
    assert not set(answer.admit_blocks) & set(allotted)
    ann.drew(1, 12, 2)
    assert pool.tables(ann.session, 1)[0][1:] == allotted[:2]
    assert set(allotted[2:]) <= set(pool.store.free.order()), "the rest is given back"


def test_undrawn_blocks_of_one_who_came_back_are_fenced_for_itself() -> None:
    """Its first process may have drawn them, and its kernels may run until the step is complete."""
    pool, ann, allotted = begun()
    pool.resume_session(ann.session)
    pool.check_invariants()
    answer = ann.say(extend=rows((1, 8)))
    assert not set(answer.extend_blocks) & set(allotted) and not answer.allotted_blocks
    ann.say()
    ann.say()
    assert ann.say().is_only_session, "nothing is fenced any more"


def test_what_one_drew_before_it_came_back_is_its_own() -> None:
    pool, ann, allotted = begun()
    pool.resume_session(ann.session)
    pool.resume_session(ann.session)
    ann.drew(1, 12, 2)
    assert pool.tables(ann.session, 1)[0][1:] == allotted[:2]


def test_the_allotment_of_a_dead_session_is_quarantined_until_its_workers_are_gone() -> None:
    pool, ann, allotted = begun()
    pool.kill_session(ann.session)
    bob = Scheduler(pool)
    assert not set(bob.admit(1, "P", 8).admit_blocks) & set(allotted)
    while not pool.reap(ann.session, 3):
        pool.check_invariants()
    pool.check_invariants()
    assert pool.counts().quarantined == len(allotted) + 1
    assert not set(pool.store.free.order()) & set(allotted)
    while not pool.release_quarantine(ann.session, 3):
        pool.check_invariants()
    assert set(allotted) <= set(pool.store.free.order())
    assert bob.say().is_only_session


def test_closing_with_something_drawn_and_not_said_leaves_nothing_held() -> None:
    pool, ann, allotted = begun()
    pool.close_session(ann.session)
    pool.check_invariants()
    assert pool.counts().held == 0
    assert all(pool.store.key_of[block] is None for block in allotted), "it may have been written to"


@pytest.mark.parametrize(
    "upkeep",
    [
        lambda pool, ann, blocks: pool.evict(blocks[1:3]),
        lambda pool, ann, blocks: pool.reset(force=True),
        lambda pool, ann, blocks: pool.invalidate(ann.session, 1, pool.tables(ann.session, 1)[0]),
    ],
    ids=["evict", "reset", "invalidate"],
)
def test_upkeep_between_answer_and_next_step_moves_nothing(upkeep: Callable[..., Any]) -> None:
    (drawing, ann, allotted), (asking, bob, _) = begun(), begun()
    upkeep(drawing, ann, allotted)
    upkeep(asking, bob, allotted)
    drawing.check_invariants()
    ann.drew(1, 12, 2)
    bob.say(extend=rows((1, 12)))
    assert drawing.tables(ann.session, 1)[0][1:] == allotted[:2]
    assert dump(drawing) == dump(asking)


@pytest.mark.parametrize(
    "config",
    [
        pool_of(full(16), mamba(16), unit=16, block=16),
        replace(pool_of(full()), needs_zeroing=True),
    ],
    ids=["states", "zeroing"],
)
def test_nothing_is_allotted_where_an_extend_has_duties(config: PoolConfig) -> None:
    answer = Scheduler(Pool(config)).say()
    assert not answer.allotted_blocks and not answer.is_only_session


def test_windows_of_two_sizes_draw_row_by_row() -> None:
    pool = Pool(pool_of(full(8), window(4, 8), unit=4, block=8, num_blocks=40))
    ann = Scheduler(pool)
    allotted = ann.admit(1, "A", 8).allotted_blocks
    ann.say(drawn=rows((1, 12), (1, 20)), num_drawn_blocks=5)
    first, second = pool.tables(ann.session, 1)
    assert first[1:] == [allotted[0], allotted[2]] and second[2:] == [allotted[1], *allotted[3:5]]


def test_an_allotment_is_bounded() -> None:
    ann = Scheduler(Pool(pool_of(full(), num_blocks=5_000)))
    assert len(ann.say(max_allotted_blocks=2**31 - 1).allotted_blocks) == 2_048
    assert len(ann.say(max_allotted_blocks=3).allotted_blocks) == 3
    assert ann.say(max_allotted_blocks=0).allotted_blocks == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num", [30, 12_000])  # the latter long enough to be compacted
def test_the_front_is_what_would_be_taken(seed: int, num: int) -> None:
    rng = random.Random(seed)
    free, order, held = FreeList(0, num), list(range(num)), list[int]()
    hashed: list[int] = []
    most = num // 4
    for _ in range(120):
        count = rng.randint(0, most)
        assert free.front(count) == order[:count]
        verb = rng.choice(("take", "take", "prepend", "append", "append", "leave"))
        if verb == "take":
            count = min(count, len(order))
            taken, order = order[:count], order[count:]
            assert free.take(count)[0] == taken
            held += taken
            hashed = [block for block in hashed if block not in set(taken)] if num < 100 else []
        elif verb == "leave" and hashed:
            gone = set(rng.sample(hashed, rng.randint(1, len(hashed)))) & set(order)
            free.leave(list(gone))
            order = [block for block in order if block not in gone]
            hashed = [block for block in hashed if block not in gone]
            held += gone
        else:
            rng.shuffle(held)
            count = rng.randint(0, len(held))
            given, held = held[:count], held[count:]
            if verb == "prepend":
                free.prepend(given)
                order = given + order
            else:
                free.append(given)
                order += given
                hashed += given
        assert list(free.order()) == order
        free.check_invariants()


def test_the_front_is_what_a_take_returns_where_some_had_to_walk_past_blocks() -> None:
    free, fence = FreeList(0, 6), object()
    free.take_if(1, lambda block: fence if block < 2 else None, lambda _: True)
    assert free.front(3) == [0, 1, 3]
    assert free.take(3)[0] == [0, 1, 3]


def test_an_allotment_ends_with_a_step_that_asks_for_none() -> None:
    pool, ann, allotted = begun()
    assert allotted and pool.num_allotted_blocks == len(allotted)
    assert ann.say(max_allotted_blocks=0).allotted_blocks == []
    assert not pool.num_allotted_blocks
    extend = rows((1, 8))
    assert ann.say(extend=extend, max_allotted_blocks=0).extend_blocks == allotted[:1]
    with pytest.raises(DrawsDiffer):
        ann.drew(1, 12, 1)
