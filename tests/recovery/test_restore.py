"""A pool after a restart: recorded blocks are hit, sessions hold what they held, nothing is held twice."""

import random
from array import array

import pytest

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, PoolConfig
from kvhold_server.pool.restore import (
    HeldSequence,
    RecordedBlocks,
    reassert,
    reassert_again,
    restore_cached,
    restore_order,
)
from kvhold_server.pool.values import Completed, Removed
from tests.model.by_hand import HandPool

SIZE = 4
FULL = GroupConfig(kind=GroupKind.FULL, block_size_tokens=SIZE)
WINDOW = GroupConfig(kind=GroupKind.SLIDING_WINDOW, block_size_tokens=SIZE, window_tokens=6)
SINGLE, HYBRID = (FULL,), (FULL, WINDOW)


def config(groups: tuple[GroupConfig, ...] = SINGLE, num_blocks: int = 40, **changes: int) -> PoolConfig:
    return PoolConfig(
        groups=groups,
        num_blocks=num_blocks,
        hash_unit_tokens=SIZE,
        scheduler_block_tokens=SIZE,
        max_model_len=400,
        report_completed=True,
        **changes,
    )


def hashes(name: str, num: int) -> list[bytes]:
    return [f"{name}{i}".encode().ljust(8) for i in range(num)]


def recorded(*rows: tuple[int, int, bytes, int]) -> RecordedBlocks:
    """(block, group, hash, tokens) each."""
    ascending = sorted(rows)
    return RecordedBlocks(
        blocks=[row[0] for row in ascending],
        groups=[row[1] for row in ascending],
        hashes=[row[2] for row in ascending],
        key_tokens=array("i", [row[3] for row in ascending]),
    )


def held(
    sequence_id: int, table: list[int], name: str = "a", publish_tokens: int = 0, **changes: object
) -> HeldSequence:
    fields = {
        "sequence_id": sequence_id,
        "num_tokens": len(table) * SIZE,
        "num_prompt_tokens": 0,
        "publish_tokens": publish_tokens,
        "tables": [table],
        "hashes": hashes(name, len(table)),
    }
    return HeldSequence(**(fields | changes))  # type: ignore[arg-type]


def restored(*rows: tuple[int, int, bytes, int], order: list[int] | None = None) -> HandPool:
    pool = HandPool(config())
    assert restore_cached(pool, recorded(*rows)) == []
    restore_order(pool, order or [row[0] for row in rows])
    pool.check_invariants()
    return pool


def chain(name: str, blocks: list[int]) -> list[tuple[int, int, bytes, int]]:
    keys = hashes(name, len(blocks))
    return [(block, 0, key, (i + 1) * SIZE) for i, (block, key) in enumerate(zip(blocks, keys, strict=True))]


def test_recorded_blocks_are_free_and_hit() -> None:
    pool = restored(*chain("a", [7, 9, 3]))
    counts = pool.counts()
    assert (counts.free, counts.cached, counts.held) == (36, 3, 0)
    session = pool.open_session()
    admitted = pool.admit(session, 1, num_tokens=13, token_budget=100, hashes=hashes("a", 3))
    assert admitted.hit_tokens == 12 and admitted.own_hit_tokens == 0
    assert admitted.tables[0][:3] == [7, 9, 3]
    pool.check_invariants()


def test_the_least_recently_used_is_evicted_first() -> None:
    pool = restored(*chain("a", [7]), *chain("b", [9]), *chain("c", [3]), order=[9, 3, 7])
    session = pool.open_session()
    pool.admit(session, 1, num_tokens=37 * SIZE, token_budget=1000, hashes=[], skip_lookup=True)
    assert pool.tables(session, 1)[0][-1] == 9, "plain blocks first, then in order of use"


def test_one_hash_may_be_recorded_for_several_blocks() -> None:
    pool = restored(*chain("a", [7]), *chain("a", [8]))
    assert pool.evict([7]) == 1
    pool.check_invariants()
    assert pool.lookup(0, num_tokens=5, hashes=hashes("a", 1)).hit_tokens == SIZE


def test_records_that_this_pool_has_no_place_for_are_refused() -> None:
    pool = HandPool(config(num_reserved_low_blocks=4))
    rows = [(4, 0, b"reserved", 4), (40, 0, b"beyond--", 4), (9, 1, b"group---", 4), (8, 0, b"fine----", 4)]
    assert restore_cached(pool, recorded(*rows)) == [4, 40, 9]
    restore_order(pool, [4, 40, 9, 8])
    assert pool.counts().cached == 1
    pool.check_invariants()


def test_a_session_gets_its_tables_back_shared_and_private_blocks_alike() -> None:
    pool = restored(*chain("a", [7, 9]))
    first, second = pool.open_session(), pool.open_session()
    assert reassert(pool, first, [held(1, [7, 9, 20])]).lost == {}
    assert reassert(pool, second, [held(1, [7, 9, 21, 22])]).lost == {}
    pool.check_invariants()
    assert pool.tables(first, 1) == [[7, 9, 20]]
    assert pool.counts().held == 5 and pool.counts().cached == 0
    pool.begin_step(first, 100, 99)
    extended = pool.extend(first, 1, slots_needed=16, processed_tokens=12)
    assert extended.new_blocks[0][0] not in (7, 9, 20, 21, 22)
    pool.free(second, 1)
    pool.check_invariants()


def test_what_is_said_again_is_compared_and_nothing_more_is_given() -> None:
    """The first answer was lost; another session may have taken what the first time was free."""
    pool = restored(*chain("a", [7, 9]))
    session, other = pool.open_session(), pool.open_session()
    said = [held(1, [7, 9, 20]), held(2, [9, 21], "b"), held(3, [22], "c")]
    assert reassert(pool, session, said).lost.keys() == {2}
    pool.admit(other, 1, num_tokens=20 * SIZE, token_budget=1000, hashes=[])
    counts = pool.counts()
    assert reassert_again(pool, session, said) == [2]
    assert pool.counts() == counts
    assert reassert_again(pool, session, [said[0], held(3, [22, 23], "c")]) == [3]
    assert pool.tables(session, 1) == [[7, 9, 20]] and pool.counts().sequences == counts.sequences - 1
    pool.check_invariants()


def test_what_was_computed_is_published_again_and_recorded() -> None:
    pool = restored(*chain("a", [7]))
    session = pool.open_session()
    result = reassert(pool, session, [held(1, [7, 9, 20], publish_tokens=2 * SIZE)])
    assert (result.completed.blocks, result.completed.key_tokens) == ([9], [2 * SIZE])
    assert pool.lookup(0, num_tokens=100, hashes=hashes("a", 3)).hit_tokens == 2 * SIZE, "20 is not computed"
    pool.check_invariants()


def test_a_record_behind_a_gap_is_published_again_with_the_gap() -> None:
    pool = restored(*chain("a", [7, 9, 20])[::2])  # the record in the middle was torn
    session = pool.open_session()
    result = reassert(pool, session, [held(1, [7, 9, 20], publish_tokens=3 * SIZE)])
    assert sorted(result.completed.blocks) == [9, 20]
    assert pool.lookup(0, num_tokens=100, hashes=hashes("a", 3)).hit_tokens == 3 * SIZE
    pool.check_invariants()


@pytest.mark.parametrize("everything", [False, True])
def test_a_block_that_lost_its_hash_since_the_restart_is_still_its_sequences(everything: bool) -> None:
    pool = restored(*chain("a", [7, 9, 20]))
    if everything:
        pool.reset(force=True)
    else:
        pool.evict([9])
    session = pool.open_session()
    assert reassert(pool, session, [held(1, [7, 9, 20, 21])]).lost == {}
    pool.check_invariants()
    assert pool.tables(session, 1) == [[7, 9, 20, 21]] and pool.counts().held == 4


def test_sequences_of_one_session_share_what_the_first_one_publishes() -> None:
    pool = restored()
    session = pool.open_session()
    result = reassert(pool, session, [held(1, [7, 9], publish_tokens=8), held(2, [7, 9, 11])])
    assert result.lost == {} and pool.counts().held == 3
    pool.check_invariants()


@pytest.mark.parametrize(
    ("claim", "problem"),
    [
        (held(2, [5], "b"), "held by another sequence, with other contents"),
        (held(2, [5], hashes=[]), "held by another sequence, with other contents"),
        (held(2, [6, 5], "a"), "held by another sequence, with other contents"),
        (held(2, [7]), "recorded with other contents"),
        (held(2, [6, 6]), "stands in it twice"),
        (held(2, [40]), "does not exist"),
        (held(2, [-1]), "does not exist"),
        (held(1, [6]), "named twice"),
        (held(2, [6], tables=[[6], [8]]), "2 tables for 1 groups"),
        (held(2, [6, 8], "b", tables=[[6, 8]], hashes=[]), None),
    ],
)
def test_what_conflicts_is_lost_as_a_whole_and_changes_nothing(claim: HeldSequence, problem: str | None) -> None:
    pool = restored(*chain("x", [7]))
    session = pool.open_session()
    result = reassert(pool, session, [held(1, [5]), claim])
    pool.check_invariants()
    if problem is None:
        assert result.lost == {}
    else:
        assert problem in str(result.lost[claim.sequence_id])
        assert pool.tables(session, 1) == [[5]] and pool.counts().held == 1


def test_sequences_share_a_block_without_a_record_if_they_believe_the_same_of_it() -> None:
    """Its hash was dropped while they ran, or it was published in the last step: one of them publishes it."""
    pool = restored()
    first, second = pool.open_session(), pool.open_session()
    assert reassert(pool, first, [held(1, [7, 9, 20]), held(2, [7, 9, 21])]).lost == {}
    assert reassert(pool, second, [held(1, [7, 9, 22])]).lost == {}
    assert pool.counts().held == 5
    pool.check_invariants()
    for step, (session, sequence_id) in enumerate(((second, 1), (first, 2), (first, 1)), start=10):
        pool.begin_step(session, step)
        pool.extend(session, sequence_id, slots_needed=12, processed_tokens=12, publish_tokens=12)
        pool.complete(session, step)
        pool.check_invariants()
    assert pool.lookup(0, num_tokens=100, hashes=hashes("a", 3)).hit_tokens == 3 * SIZE
    for session, sequence_id in ((first, 1), (second, 1), (first, 2)):
        pool.free(session, sequence_id)
        pool.check_invariants()
    assert pool.counts().held == 0


class Daemon:
    """A pool with what would survive it: records, and each client's own view."""

    def __init__(self, groups: tuple[GroupConfig, ...]) -> None:
        self.pool = HandPool(config(groups))
        self.records: dict[int, tuple[int, bytes, int]] = {}

    def keep_up(self, completed: Completed | None) -> None:
        for event in self.pool.take_events():
            if isinstance(event, Removed):
                for block in event.blocks:
                    self.records.pop(block, None)
        if completed is not None:
            rows = zip(completed.groups, completed.hashes, completed.key_tokens, strict=True)
            self.records |= dict(zip(completed.blocks, rows, strict=True))


@pytest.mark.parametrize("groups", [SINGLE, HYBRID], ids=["single", "hybrid"])
@pytest.mark.parametrize("seed", range(12))
def test_a_crash_at_any_time_loses_no_completed_prefix_and_no_table(seed: int, groups: tuple[GroupConfig, ...]) -> None:
    """Random steps of two sessions; after each crash everything that was recorded is hit, all tables are held again."""
    choice = random.Random(seed)
    daemon = Daemon(groups)
    pool = daemon.pool
    sessions = [pool.open_session(), pool.open_session()]
    published = dict[tuple[int, int], int]()  # completed tokens of (session index, sequence)
    tokens = dict[tuple[int, int], int]()
    for step in range(1, choice.randint(2, 41)):
        for index, session in enumerate(sessions):
            pool.begin_step(session, step)
            completed = pool.complete(session, step - 1) if step > 1 else None
            daemon.keep_up(completed)
            published |= {key: tokens[key] for key in tokens if key[0] == index}
            name = choice.randint(1, 6)
            key = (index, name)
            if key not in tokens:
                num = choice.randint(1, 30)
                admitted = pool.admit(
                    session, name, num_tokens=num, token_budget=100, hashes=hashes(str(name % 3), num // SIZE)
                )
                if admitted.tables:
                    tokens[key] = num
                    published[key] = 0
            else:
                pool.free(session, name)
                del tokens[key], published[key]
            daemon.keep_up(None)
    rows = [(block, *record) for block, record in daemon.records.items()]
    after = HandPool(config(groups))
    assert restore_cached(after, recorded(*rows)) == []
    restore_order(after, [row[0] for row in rows])
    after.check_invariants()
    for index in choice.sample([0, 1], 2):
        session = after.open_session()
        claims = [
            HeldSequence(
                sequence_id=name,
                num_tokens=num,
                num_prompt_tokens=num,
                publish_tokens=published[index, name],
                tables=pool.tables(sessions[index], name),
                hashes=hashes(str(name % 3), num // SIZE),
            )
            for (owner, name), num in tokens.items()
            if owner == index
        ]
        result = reassert(after, session, claims)
        after.check_invariants()
        assert result.lost == {}
        for claim in claims:
            assert after.tables(session, claim.sequence_id) == claim.tables
    for block, (group, key, _) in daemon.records.items():
        assert after.store.prefixes.find(group, key, 0), f"block {block} was recorded and is not found"
