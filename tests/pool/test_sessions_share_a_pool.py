"""Two or three schedulers on one pool: who sees a hash when, who takes a freed block when, what death leaves behind."""

from typing import Any

import pytest

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig
from kvhold_server.pool.errors import QuarantineOpen, StepOutOfOrder, TooManyOpenSteps, UnknownPoolSession
from kvhold_server.pool.values import AdmitColumns, Bound, Status, StepInput
from tests.model.by_hand import HandPool

BIG = 2**31 - 1
FULL = GroupConfig(kind=GroupKind.FULL, block_size_tokens=4)


def make_pool(num_blocks: int, *groups: GroupConfig, **more: Any) -> HandPool:
    return HandPool(
        PoolConfig(
            groups=groups or (FULL,),
            num_blocks=num_blocks,
            hash_unit_tokens=4,
            scheduler_block_tokens=more.pop("block", 4),
            max_model_len=1 << 20,
            **more,
        )
    )


class Scheduler:
    """A session that steps by hand."""

    def __init__(self, pool: HandPool) -> None:
        self.pool = pool
        self.session = pool.open_session()
        self.step = 0
        self.next_step(0)

    def next_step(self, completed: int | None = None) -> None:
        self.step += 1
        self.pool.begin_step(self.session, self.step, self.step - 1 if completed is None else completed)

    def admit(self, sid: int, text: str, num_tokens: int, **item: Any) -> Any:
        hashes = [f"{text}{i}".encode() for i in range(num_tokens // 4)]
        return self.pool.admit(self.session, sid, num_tokens=num_tokens, hashes=hashes, token_budget=BIG, **item)

    def hit(self, text: str, num_tokens: int) -> int:
        hashes = [f"{text}{i}".encode() for i in range(num_tokens // 4)]
        return self.pool.lookup(self.session, num_tokens=num_tokens, hashes=hashes).hit_tokens

    def free(self, sid: int, **item: Any) -> None:
        self.pool.free(self.session, sid, **item)


def test_a_provisional_hash_is_seen_by_its_own_session_only() -> None:
    pool = make_pool(20)
    ann, bob = Scheduler(pool), Scheduler(pool)
    ann.admit(1, "P", 12)
    assert (ann.hit("P", 13), bob.hit("P", 13)) == (12, 0)
    assert pool.counts().provisional == 3
    ann.next_step()
    assert bob.hit("P", 13) == 12 and pool.counts().provisional == 0
    hit = bob.admit(1, "P", 13)
    assert hit.hit_tokens == 12 and hit.own_hit_tokens == 0
    pool.check_invariants()


def test_a_copy_that_is_visible_stands_in_for_a_first_block_that_is_not() -> None:
    pool = make_pool(20)
    ann, bob = Scheduler(pool), Scheduler(pool)
    ann.admit(1, "P", 8)
    bob.admit(1, "P", 8)
    mine = bob.pool.tables(bob.session, 1)[0]
    assert pool.lookup(bob.session, num_tokens=9, hashes=[b"P0", b"P1"]).blocks == [mine]


def test_a_freed_block_goes_to_others_after_the_step_and_to_its_own_session_at_once() -> None:
    pool = make_pool(5)
    ann, bob = Scheduler(pool), Scheduler(pool)
    ann.admit(1, "P", 16)
    ann.free(1)
    assert (pool.available(ann.session), pool.available(bob.session)) == (4, 0)
    assert bob.admit(1, "Q", 4).status is Status.REFUSED
    ann.admit(2, "R", 4)
    assert pool.available(bob.session) == 0
    ann.next_step()
    assert pool.available(bob.session) == 3
    assert bob.admit(1, "Q", 12).status is Status.OK
    pool.check_invariants()


def test_a_fenced_block_with_a_public_hash_may_be_hit() -> None:
    pool = make_pool(5)
    ann, bob = Scheduler(pool), Scheduler(pool)
    ann.admit(1, "P", 16)
    ann.next_step()
    ann.free(1)
    assert bob.admit(1, "P", 16).status is Status.REFUSED, "its last block must be new, and all others are fenced"
    assert bob.hit("P", 16) == 12
    ann.next_step()
    assert bob.admit(1, "P", 16).hit_tokens == 12


def test_a_block_that_two_sessions_let_go_waits_for_both() -> None:
    pool = make_pool(3)
    ann, bob = Scheduler(pool), Scheduler(pool)
    cem = Scheduler(pool)
    ann.admit(1, "P", 5)
    ann.next_step()
    hit = pool.lookup(bob.session, num_tokens=5, hashes=[b"P0"])
    assert hit.hit_tokens == 4
    ann.free(1)
    assert pool.available(cem.session) == 0 and pool.available(ann.session) == 2
    ann.next_step()
    assert bob.admit(1, "P", 5).hit_tokens == 4
    bob.free(1)
    assert pool.available(cem.session) == 0
    assert pool.available(ann.session) == 0
    bob.next_step()
    assert pool.available(cem.session) == 2
    pool.check_invariants()


def test_fences_are_made_from_what_a_single_session_freed_before_a_second_came() -> None:
    pool = make_pool(9)
    ann = Scheduler(pool)
    ann.admit(1, "P", 16)
    ann.free(1)
    ann.admit(2, "Q", 4)
    ann.free(2)
    bob = Scheduler(pool)
    assert pool.available(bob.session) == 3, "four of P, and the one of Q"
    ann.next_step()
    assert pool.available(bob.session) == 8
    pool.close_session(bob.session)
    ann.next_step()
    assert not pool.store.tracking, "nothing to decide with one session"


def test_r8_an_idle_engine_says_that_its_empty_step_is_complete_at_once() -> None:
    """R8: the last blocks and the last frees reach everybody without another step."""
    pool = make_pool(5, report_completed=True)
    ann, bob = Scheduler(pool), Scheduler(pool)
    ann.admit(1, "P", 16)
    items = StepInput(step=2, completed_step=2)
    items.free.sequence_ids = [1]
    output = pool.step(ann.session, items)
    assert output.completed is not None and output.completed.hashes == [b"P0", b"P1", b"P2", b"P3"]
    assert pool.available(bob.session) == 4 and bob.hit("P", 17) == 16
    pool.check_invariants()


def test_walking_past_fenced_blocks_keeps_their_places() -> None:
    pool = make_pool(9)
    ann, bob = Scheduler(pool), Scheduler(pool)
    ann.admit(1, "P", 16)
    ann.free(1)
    order = pool.describe().free_order
    taken = bob.admit(1, "Q", 8).tables[0]
    assert pool.describe().free_order == [block for block in order if block not in taken]
    assert bob.admit(2, "R", 12).status is Status.REFUSED


def test_a_dead_sessions_blocks_are_quarantined_until_its_workers_are_gone() -> None:
    pool = make_pool(12)
    ann, bob = Scheduler(pool), Scheduler(pool)
    ann.admit(1, "P", 12)
    ann.next_step()
    ann.admit(2, "Q", 8)
    bob.admit(1, "P", 13)
    pool.kill_session(ann.session)
    assert bob.hit("Q", 9) == 0, "it may be half written"
    while not pool.reap(ann.session, 1):
        pool.check_invariants()
    counts = pool.counts()
    assert (counts.held, counts.quarantined, counts.provisional) == (4, 2, 0)
    assert bob.hit("P", 13) == 12, "that step was complete"
    with pytest.raises(UnknownPoolSession):
        pool.free(ann.session, 1)
    while not pool.release_quarantine(ann.session, 1):
        pool.check_invariants()
    counts = pool.counts()
    assert (counts.held, counts.quarantined) == (4, 0) and counts.sessions == 1
    assert pool.available(bob.session) == 7
    with pytest.raises(UnknownPoolSession):
        pool.release_quarantine(ann.session, 1)


def test_a_living_session_is_not_released() -> None:
    pool = make_pool(4)
    ann = Scheduler(pool)
    with pytest.raises(QuarantineOpen):
        pool.release_quarantine(ann.session, 10)


def test_cleaning_up_100_000_blocks_is_cut_into_slices() -> None:
    """DMN rows, issue "sessions" 3: nobody waits for one big clean-up."""
    pool = make_pool(100_001)
    ann = Scheduler(pool)
    ann.admit(1, "P", 400_000)
    Scheduler(pool)
    pool.kill_session(ann.session)
    num_calls, before = 0, 0
    while not pool.reap(ann.session, 1000):
        num_calls += 1
        done = pool.counts().quarantined
        assert done - before <= 1256
        before = done
    before = pool.counts().available
    while not pool.release_quarantine(ann.session, 1000):
        num_calls += 1
        assert pool.counts().available - before <= 1256
        before = pool.counts().available
    assert num_calls >= 2 * 100_000 // 1256
    assert pool.counts().available == 100_000


def test_a_session_that_closes_leaves_its_cache_to_all() -> None:
    pool = make_pool(8)
    ann, bob = Scheduler(pool), Scheduler(pool)
    ann.admit(1, "P", 12)
    pool.close_session(ann.session)
    assert bob.hit("P", 13) == 12 and pool.available(bob.session) == 7
    pool.check_invariants()


def test_both_ends_of_a_copy_are_held_until_the_step_is_complete() -> None:
    state = GroupConfig(kind=GroupKind.MAMBA, block_size_tokens=16, mamba_mode=MambaMode.ALIGN)
    full = GroupConfig(kind=GroupKind.FULL, block_size_tokens=16)
    pool = make_pool(30, full, state, block=16)
    ann = Scheduler(pool)
    ann.admit(1, "P", 42, max_new_tokens=40)
    ann.next_step()
    pool.extend(ann.session, 1, slots_needed=42, processed_tokens=40, publish_tokens=42)
    ann.next_step()
    hit = ann.admit(2, "P", 60)
    assert hit.hit_tokens == 40
    copies = pool.end_step(ann.session).copies
    assert len(copies) == 2
    pool.free(ann.session, 1)
    pool.free(ann.session, 2)
    held = {block for copy in copies for block in (copy.source, copy.target)}
    assert not held & set(pool.describe().free_order)
    ann.next_step()
    assert held <= set(pool.describe().free_order)
    pool.check_invariants()


def test_steps_must_grow_and_be_completed() -> None:
    pool = make_pool(8, max_open_steps=3)
    ann = Scheduler(pool)
    with pytest.raises(StepOutOfOrder):
        pool.begin_step(ann.session, 1, 2)
    pool.begin_step(ann.session, 5)
    with pytest.raises(StepOutOfOrder):
        pool.begin_step(ann.session, 4)
    with pytest.raises(StepOutOfOrder):
        pool.complete(ann.session, 6)
    pool.begin_step(ann.session, 6)
    with pytest.raises(TooManyOpenSteps):
        pool.begin_step(ann.session, 7)
    pool.begin_step(ann.session, 7, 6)
    with pytest.raises(UnknownPoolSession):
        pool.begin_step(99, 1)


def test_a_step_shares_one_budget_and_says_what_stopped_it() -> None:
    pool = make_pool(40)
    ann = Scheduler(pool)
    columns = AdmitColumns(
        sequence_ids=[1, 2, 3],
        num_tokens=[8, 30, 8],
        hash_counts=[2, 7, 2],
        hashes=[f"{t}{i}".encode() for t, n in (("A", 2), ("B", 7), ("C", 2)) for i in range(n)],
        alignment=[4, 4, 4],
    )
    output = pool.step(ann.session, StepInput(step=2, completed_step=1, token_budget=18, admit=columns))
    assert output.admit_status == [Status.OK, Status.OK, Status.NOT_TRIED]
    assert output.admit_new_tokens == [8, 8, 0]
    assert output.admit_bound[:2] == [Bound.NONE, Bound.ALIGNMENT]
    assert output.admit_counts == [2, 4 - 2, 0]
    output = pool.step(ann.session, StepInput(step=2, completed_step=1, token_budget=0, admit=columns))
    assert output.admit_bound[0] == Bound.BUDGET and output.admit_status == [Status.NOT_TRIED] * 3
    again = AdmitColumns(sequence_ids=[3], num_tokens=[8], hash_counts=[-1])
    output = pool.step(ann.session, StepInput(step=3, completed_step=2, token_budget=18, admit=again))
    assert output.admit_status == [Status.OK], "its hashes were remembered"


def test_r8_a_further_part_of_a_step_that_is_complete_is_complete_with_it() -> None:
    """A step may come in parts; each may say that nothing of the step runs any more."""
    pool = make_pool(20, report_completed=True)
    ann, bob = Scheduler(pool), Scheduler(pool)
    for part, name in enumerate(("P", "Q", "R")):
        items = StepInput(step=1, completed_step=1, token_budget=1000)
        items.admit.sequence_ids, items.admit.num_tokens = [part], [17]
        items.admit.hash_counts, items.admit.hashes = [4], [f"{name}{i}".encode() for i in range(4)]
        output = pool.step(ann.session, items)
        assert output.completed_last is not None and output.completed_last.hashes == items.admit.hashes
        assert bob.hit(name, 17) == 16
        pool.check_invariants()
    items = StepInput(step=2, completed_step=1)
    items.free.sequence_ids = [0]
    pool.step(ann.session, items)
    pool.check_invariants()


def test_too_large_a_completed_step_is_refused_and_leaves_no_trace() -> None:
    pool = make_pool(20)
    ann = Scheduler(pool)
    with pytest.raises(StepOutOfOrder):
        pool.step(ann.session, StepInput(step=2, completed_step=3))
    pool.check_invariants()


def test_a_refused_extend_keeps_no_hashes_so_that_the_retry_names_the_right_blocks() -> None:
    """The client sends an item's hashes again when it asks again; kept twice, each later block got its neighbour's."""
    pool = make_pool(7)
    first, second = pool.open_session(), pool.open_session()
    digests = [bytes([i]) * 32 for i in range(1, 7)]
    pool.begin_step(first, 1)
    pool.admit(first, 1, num_tokens=8, token_budget=100, hashes=digests[:2])
    pool.begin_step(second, 1)
    pool.admit(second, 9, num_tokens=16, token_budget=100, hashes=[b"x" * 32] * 4)
    for _ in range(2):
        refused = pool.extend(first, 1, slots_needed=12, processed_tokens=8, publish_tokens=12, hashes=digests[2:3])
        assert refused.status is Status.REFUSED
    pool.close_session(second)
    taken = pool.extend(first, 1, slots_needed=16, processed_tokens=8, publish_tokens=16, hashes=digests[2:4])
    assert taken.status is Status.OK
    table = pool.tables(first, 1)[0]
    assert [pool.store.key_of[block] for block in table] == digests[:4]
    pool.check_invariants()


def test_what_a_sequence_lets_go_while_a_copy_holds_it_waits_for_its_own_step_too() -> None:
    """A block comes free when the copy is done, but the step in which its sequence ended may still read it."""
    large = GroupConfig(kind=GroupKind.FULL, block_size_tokens=16)
    pool = make_pool(20, large, GroupConfig(kind=GroupKind.FULL, block_size_tokens=4), block=4)
    ann = Scheduler(pool)
    ann.admit(1, "P", 24)
    ann.next_step()
    answer = ann.admit(2, "P", 25)
    assert answer.hit_tokens == 24
    copied = answer.tables[0][1]  # the block that the second one shares in part: a copy of its own
    ann.next_step(completed=1)
    ann.free(1)
    ann.free(2)
    bob = Scheduler(pool)
    pool.complete(ann.session, 2)
    assert copied in pool.describe().free_order
    assert pool.available(bob.session) == 9, "19 less the 8 of the first and the 2 that are the second's alone"
    ann.next_step(completed=3)
    pool.check_invariants()
    assert pool.available(bob.session) == 19


@pytest.mark.parametrize("tells_stored", [True, False])
def test_sequences_that_a_forced_reset_cut_off_publish_nothing_when_they_grow_together(tells_stored: bool) -> None:
    """Their later blocks rest on what was to be forgotten; a new sequence publishes as ever."""
    pool = make_pool(40)
    pool.store.prefixes.tells_stored = tells_stored
    ann = Scheduler(pool)
    ann.admit(1, "P", 8)
    ann.admit(2, "Q", 8)
    pool.reset(force=True)
    ann.admit(3, "R", 8)
    items = StepInput(step=1)
    items.extend.sequence_ids, items.extend.slots_needed = [1, 2, 3], [12, 12, 12]
    items.extend.processed_tokens, items.extend.publish_tokens = [8, 8, 8], [12, 12, 12]
    items.extend.hash_counts, items.extend.hashes = [1, 1, 1], [b"P2", b"Q2", b"R2"]
    output = pool.step(ann.session, items)
    assert output.extend_status == [Status.OK] * 3 and output.extend_counts == [1, 1, 1]
    assert sorted(key for key, _, _ in pool.describe().cache) == [b"R0", b"R1", b"R2"]
    pool.check_invariants()
