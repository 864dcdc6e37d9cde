"""Reports from other systems' users, as stories that must end well here. Ids are those of the collected reports."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from kvhold_server.domain.errors import Exhausted
from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig
from kvhold_server.pool.errors import BadCount, BlocksInUse, HitChanged, NeverFits, OutOfBlocks, UnknownSequence
from kvhold_server.pool.free_list import FreeList
from kvhold_server.pool.values import Admitted, Bound, Removed, Status, StepInput, Stored
from tests.model.by_hand import HandPool

BIG = 2**31 - 1


def group(kind: GroupKind = GroupKind.FULL, size: int = 4, **more: Any) -> GroupConfig:
    return GroupConfig(kind=kind, block_size_tokens=size, **more)


def make_pool(*groups: GroupConfig, usable: int, unit: int = 4, block: int | None = None, **more: Any) -> HandPool:
    return HandPool(
        PoolConfig(
            groups=groups or (group(),),
            num_blocks=usable + 1,
            hash_unit_tokens=unit,
            scheduler_block_tokens=block or unit,
            max_model_len=more.pop("max_model_len", 8192),
            **more,
        )
    )


class Story:
    """One session; texts are named, and share hashes as far as their names say."""

    def __init__(self, pool: HandPool) -> None:
        self.pool = pool
        self.session = pool.open_session()
        self.step = 0
        self.next_step()
        self.ids: Iterator[int] = count(100_000)

    def next_step(self) -> None:
        self.step += 1
        self.pool.begin_step(self.session, self.step, self.step - 1)

    def hashes(self, text: str, num_tokens: int) -> list[bytes]:
        """`text` is "A", or "A:8+B": A's first 8 tokens, then B's own."""
        unit = self.pool.config.hash_unit_tokens
        head, _, tail = text.partition("+")
        name, _, shared = head.partition(":")
        num_shared = int(shared) // unit if shared else num_tokens
        return [(f"{name}/{i}" if i < num_shared else f"{text}/{tail}/{i}").encode() for i in range(num_tokens // unit)]

    def ask(self, text: str, num_tokens: int, sid: int | None = None, **item: Any) -> Admitted:
        item.setdefault("token_budget", BIG)
        return self.pool.admit(
            self.session,
            next(self.ids) if sid is None else sid,
            num_tokens=num_tokens,
            hashes=self.hashes(text, num_tokens),
            **item,
        )

    def admit(self, text: str, num_tokens: int, sid: int | None = None, **item: Any) -> Admitted:
        answer = self.ask(text, num_tokens, sid, **item)
        assert answer.status is Status.OK, answer
        return answer

    def run(self, text: str, num_tokens: int, **item: Any) -> Admitted:
        sid = next(self.ids)
        answer = self.admit(text, num_tokens, sid, **item)
        self.pool.free(self.session, sid)
        self.next_step()
        return answer

    def hit(self, text: str, num_tokens: int) -> int:
        return self.pool.lookup(self.session, num_tokens=num_tokens, hashes=self.hashes(text, num_tokens)).hit_tokens


def test_hit_02_a_fully_cached_prompt_leaves_one_token_to_compute() -> None:
    """HIT-02."""
    story = Story(make_pool(group(size=16), usable=16, unit=16))
    story.run("P", 64)
    again = story.admit("P", 64)
    assert again.hit_tokens == 48 and len(again.new_blocks[0]) == 1


def test_hit_03_the_chain_goes_on_after_the_last_block_was_computed_again() -> None:
    """HIT-03."""
    story = Story(make_pool(usable=20))
    story.run("P", 8)
    assert story.run("P", 16).hit_tokens == 8
    assert story.hit("P", 17) == 16


def test_hit_05_a_prompt_that_parts_inside_the_last_unit_still_hits_below_it() -> None:
    """HIT-05: sparse retention keeps one unit below each reachable end."""
    window = group(GroupKind.SLIDING_WINDOW, 16, window_tokens=1024)
    pool = make_pool(group(size=32), window, usable=600, unit=16, block=32, retention_interval_tokens=0)
    story = Story(pool)
    story.run("P", 4100)
    assert story.hit("P:4080+Q", 4130) == 4064


def test_hit_06_a_veto_by_the_state_group_is_told_from_no_shared_prefix() -> None:
    """HIT-06: the shared prefix shows as the junction, and the miss is counted under the rule of the state group."""
    state = group(GroupKind.MAMBA, 528, mamba_mode=MambaMode.ALIGN)
    pool = make_pool(group(size=528), state, usable=30, unit=528, retention_interval_tokens=0)
    story = Story(pool)
    story.run("P", 2200)
    second = story.admit("P:1584+Q", 2200, max_new_tokens=1584)  # schedulers stop a chunk at the junction they are told
    assert second.hit_tokens == 0 and second.boundary_tokens == 1584
    statistics = pool.prefix_statistics()
    assert statistics.miss_rule_tokens >= 1584
    story.next_step()
    assert story.admit("P:1584+R", 2200).hit_tokens == 1584, "the junction was kept this time"


def test_hit_07_a_group_that_never_caches_does_not_veto() -> None:
    """HIT-07."""
    story = Story(make_pool(group(size=16), group(GroupKind.RING, 16), usable=20, unit=16))
    story.run("P", 64)
    assert story.hit("P", 80) == 64


def test_a_window_of_one_token_holds_nothing_and_vetoes_nothing() -> None:
    """The original's masks keep no block of such a group, so that nothing ever hits."""
    story = Story(make_pool(group(), group(GroupKind.SLIDING_WINDOW, 4, window_tokens=1), usable=30))
    story.run("P", 16)
    assert story.hit("P", 17) == 16


def test_pool_02_a_second_release_is_refused_and_changes_nothing() -> None:
    """POOL-02."""
    story = Story(make_pool(usable=8))
    story.admit("A", 8, sid=1)
    story.admit("A", 8, sid=2)
    story.pool.free(story.session, 1)
    story.pool.free(story.session, 2)
    before = story.pool.counts()
    with pytest.raises(UnknownSequence):
        story.pool.free(story.session, 1)
    assert story.pool.counts() == before
    story.pool.check_invariants()


def test_pool_04_a_shortage_leaves_list_and_counter_together() -> None:
    """POOL-04."""
    free = FreeList(1, 6)
    with pytest.raises(OutOfBlocks) as shortage:
        free.take(6)
    assert isinstance(shortage.value, Exhausted)
    assert free.count == 5 and list(free.order()) == [1, 2, 3, 4, 5]


def test_pool_05_counts_out_of_range_are_refused() -> None:
    """POOL-05: more external tokens than tokens."""
    story = Story(make_pool(group(size=16), usable=8, unit=16))
    with pytest.raises(BadCount):
        story.ask("A", 64, num_external_tokens=128)
    with pytest.raises(BadCount):
        story.ask("A", 0)
    story.admit("A", 20, sid=7)
    with pytest.raises(BadCount):
        story.pool.extend(story.session, 7, slots_needed=-1, processed_tokens=0)
    assert story.pool.counts().available == 6


def test_pool_06_a_refusal_keeps_nothing() -> None:
    """POOL-06."""
    story = Story(make_pool(usable=10))
    story.admit("B", 24)
    assert story.ask("A", 32).bound is Bound.BLOCKS
    counts = story.pool.counts()
    assert counts.available == 4 and counts.held == 6 and counts.sequences == 1


def test_pool_07_a_recycled_block_loses_its_hash_everywhere() -> None:
    """POOL-07."""
    story = Story(make_pool(usable=2))
    story.run("A", 8)
    story.run("B", 8)
    assert (story.hit("A", 8), story.hit("B", 8)) == (0, 4)


def test_pool_08_the_deepest_block_goes_first() -> None:
    """POOL-08: 200 runs, always the same."""
    for _ in range(200):
        story = Story(make_pool(usable=3))
        story.run("A", 12)
        story.run("B", 4)
        assert story.hit("A", 13) == 8


def test_pool_10_second_turns_hit_in_a_pool_with_windows() -> None:
    """POOL-10: six sessions take turns in a pool of which they need a quarter."""
    pool = make_pool(
        group(size=16), group(GroupKind.SLIDING_WINDOW, 16, window_tokens=32), usable=6 * 2 * 8 * 4, unit=16
    )
    story = Story(pool)
    for name in "ABCDEF":
        assert story.run(name, 100).hit_tokens == 0
    for name in "ABCDEF":
        assert story.run(name, 120).hit_tokens == 96


def test_pool_11_the_null_block_is_never_released() -> None:
    """POOL-11."""
    pool = make_pool(group(GroupKind.SLIDING_WINDOW, 4, window_tokens=8), usable=10)
    story = Story(pool)
    story.run("A", 16)
    story.admit("A", 17, sid=5)
    assert pool.tables(story.session, 5)[0][:2] == [0, 0]
    before = pool.counts()
    pool.free(story.session, 5)
    assert pool.counts().available - before.available == 3
    assert 0 not in pool.describe().free_order and pool.store.refs[0] == 0


def test_pool_12_a_block_that_left_the_window_leaves_the_table() -> None:
    """POOL-12."""
    pool = make_pool(group(GroupKind.SLIDING_WINDOW, 4, window_tokens=8), usable=8)
    story = Story(pool)
    story.admit("A", 4, sid=1)
    for tokens in range(5, 25):
        pool.extend(story.session, 1, slots_needed=tokens, processed_tokens=tokens - 1)
    assert pool.tables(story.session, 1)[0][:4] == [0, 0, 0, 0]
    other = story.admit("B", 4)
    assert not set(other.tables[0]) & set(pool.tables(story.session, 1)[0])


def test_pool_13_drafts_do_not_fill_a_cached_block() -> None:
    """POOL-13."""
    pool = make_pool(group(size=16), usable=8, unit=16)
    story = Story(pool)
    pool.admit(story.session, 1, num_tokens=14, hashes=[], token_budget=BIG, num_lookahead_tokens=3)
    assert pool.describe().cache == []
    pool.extend(story.session, 1, slots_needed=18, num_lookahead_tokens=3, processed_tokens=14, publish_tokens=15)
    assert pool.describe().cache == []
    pool.extend(story.session, 1, slots_needed=17, processed_tokens=15, publish_tokens=16, hashes=[b"h0"])
    assert len(pool.describe().cache) == 1


def test_pool_14_tables_end_at_the_longest_sequence() -> None:
    """POOL-14."""
    story = Story(make_pool(group(size=16), usable=20, unit=16, max_model_len=64))
    answer = story.admit("A", 62, num_lookahead_tokens=8)
    assert len(answer.tables[0]) == 4


def test_pool_14_no_more_tokens_are_granted_than_a_table_covers() -> None:
    """POOL-14: a prompt that is too long gets what fits."""
    story = Story(make_pool(group(size=16), usable=20, unit=16, max_model_len=64))
    answer = story.admit("A", 100)
    assert (answer.new_tokens, answer.bound, len(answer.tables[0])) == (64, Bound.MAX_NEW, 4)


def test_pool_15_never_is_told_from_not_now() -> None:
    """POOL-15."""
    story = Story(make_pool(group(size=16), usable=64, unit=16))
    with pytest.raises(NeverFits):
        story.ask("A", 1100)
    story.admit("B", 1000)
    assert story.ask("C", 100).status is Status.REFUSED


def test_pool_16_two_that_need_one_more_are_refused_at_once() -> None:
    """POOL-16: the refusal is immediate, so somebody can be preempted."""
    pool = make_pool(group(size=16), usable=511, unit=16)
    story = Story(pool)
    story.admit("A", 256 * 16, sid=1)
    story.admit("B", 255 * 16, sid=2)
    extend = {"processed_tokens": 255 * 16}
    assert pool.extend(story.session, 1, slots_needed=256 * 16 + 1, **extend).status is Status.REFUSED
    assert pool.extend(story.session, 2, slots_needed=255 * 16 + 1, **extend).status is Status.REFUSED
    pool.free(story.session, 2)
    assert pool.extend(story.session, 1, slots_needed=256 * 16 + 1, **extend).status is Status.OK


def test_pool_17_a_reset_in_use_is_refused() -> None:
    """POOL-17."""
    story = Story(make_pool(usable=8))
    story.admit("A", 8, sid=1)
    with pytest.raises(BlocksInUse) as refused:
        story.pool.reset()
    assert refused.value.num_held == 2
    assert story.hit("A", 9) == 8
    story.pool.free(story.session, 1)
    story.pool.reset()
    assert story.hit("A", 9) == 0


def test_pool_18_a_forced_reset_cuts_off_what_runs() -> None:
    """POOL-18: what was computed with old weights is never found again, nor what follows it."""
    story = Story(make_pool(usable=8))
    story.admit("A", 8, sid=1)
    assert story.pool.reset(force=True) == [(story.session, 1)]
    story.pool.extend(story.session, 1, slots_needed=12, processed_tokens=8, publish_tokens=12, hashes=[b"A/2"])
    story.pool.free(story.session, 1, computed_tokens=12)
    assert story.hit("A", 13) == 0
    story.pool.check_invariants()


def test_pool_19_an_admission_looks_up_again() -> None:
    """POOL-19: what a lookup saw may be gone; a client that counts on it is told."""
    pool = make_pool(usable=4)
    story = Story(pool)
    story.run("A", 12)
    other = Story.__new__(Story)
    other.__dict__.update(story.__dict__, session=pool.open_session(), step=0)
    other.next_step()
    assert story.hit("A", 16) == 12
    pool.complete(story.session, story.step)
    other.admit("B", 16)
    refused = story.ask("A", 16, expect_hit_tokens=12)
    assert refused.status is Status.CONFLICT and refused.hit_tokens == 0
    assert HitChanged(1, 12, 0).fields()["hit_tokens"] == 0


def test_pool_20_a_lookup_pins_nothing() -> None:
    """POOL-20 to POOL-23: there are no pins to leak, to own or to expire."""
    story = Story(make_pool(usable=8))
    story.run("A", 32)
    before = story.pool.describe()
    assert story.hit("A", 33) == 32
    assert story.pool.describe() == before
    story.admit("B", 32)


def test_pool_24_a_fence_keeps_preempted_blocks_from_everybody_until_the_step_is_complete() -> None:
    """POOL-24."""
    pool = make_pool(usable=4)
    story = Story(pool)
    story.admit("A", 16, sid=1)
    pool.free(story.session, 1, fence_own=True)
    assert story.ask("B", 4).status is Status.REFUSED
    assert pool.counts().fenced == 4
    pool.complete(story.session, story.step)
    story.next_step()
    story.admit("B", 4)


def test_pool_26_draining_needs_no_traffic() -> None:
    """POOL-26: completing is enough."""
    pool = make_pool(usable=4)
    story = Story(pool)
    story.admit("A", 16, sid=1)
    pool.free(story.session, 1)
    other = pool.open_session()
    assert pool.available(other) == 0
    pool.complete(story.session, story.step)
    assert pool.available(other) == 4


def test_pool_27_what_was_not_published_is_freed_without_a_hash() -> None:
    """POOL-27."""
    story = Story(make_pool(usable=4))
    story.admit("A", 8, sid=1, defer_publish=True)
    story.pool.free(story.session, 1)
    assert story.hit("A", 9) == 0
    assert len(story.admit("B", 16).tables[0]) == 4


def test_pool_30_failed_loads_are_named_by_block_and_cut_only_their_group() -> None:
    """POOL-30."""
    pool = make_pool(group(), group(GroupKind.SLIDING_WINDOW, 4, window_tokens=100), usable=20)
    story = Story(pool)
    story.admit("A", 12, sid=1)
    tables = pool.tables(story.session, 1)
    assert pool.invalidate(story.session, 1, [tables[0][1]]) == 2
    hit = pool.lookup(story.session, num_tokens=13, hashes=story.hashes("A", 12))
    assert hit.hit_tokens == 4 and hit.group_hit_tokens == [4, 12]


def test_a_hit_inside_a_block_needs_a_block_for_the_copy() -> None:
    """Two private tails, one for each group; with one free block too few nothing is admitted and nothing breaks."""
    state = group(GroupKind.MAMBA, 16, mamba_mode=MambaMode.ALIGN)
    pool = make_pool(group(size=16), state, usable=9, unit=4, block=16)
    story = Story(pool)
    story.admit("A", 42, sid=1, max_new_tokens=40)
    story.next_step()
    pool.extend(story.session, 1, slots_needed=42, processed_tokens=40, publish_tokens=42)
    story.next_step()
    free = pool.available(story.session)
    story.admit("B", 16 * (free - 3), sid=2)
    assert pool.available(story.session) == 2, "three are needed: two copies, and the state that is hit"
    assert story.hit("A", 46) == 40
    assert story.ask("A", 46).bound is Bound.BLOCKS
    pool.check_invariants()


def test_hash_11_the_hash_of_a_coarse_block_is_its_last_unit() -> None:
    """HASH-11."""
    pool = make_pool(
        group(size=64), group(GroupKind.SLIDING_WINDOW, 16, window_tokens=32), usable=30, unit=16, block=64
    )
    story = Story(pool)
    story.admit("A", 128)
    hashes = story.hashes("A", 128)
    assert [key for key, gid, _ in pool.describe().cache if gid == 0] == [hashes[3], hashes[7]]


def test_evt_02_events_name_the_logical_block_of_each_hash() -> None:
    """EVT-02."""
    state = group(GroupKind.MAMBA, 4, mamba_mode=MambaMode.ALIGN)
    pool = make_pool(group(), state, usable=20)
    story = Story(pool)
    story.admit("A", 12)
    stored = [event for event in pool.take_events() if isinstance(event, Stored) and event.group == 1]
    assert stored[0].indices == [2] and len(stored[0].hashes) == 1


def test_evt_03_every_parent_was_announced_before() -> None:
    """EVT-03: also where hits end inside blocks."""
    state = group(GroupKind.MAMBA, 16, mamba_mode=MambaMode.ALIGN)
    pool = make_pool(group(size=16), state, usable=30, unit=8, block=16)
    story = Story(pool)
    story.admit("A", 24, sid=1)
    story.next_step()
    pool.extend(
        story.session, 1, slots_needed=40, processed_tokens=24, publish_tokens=40, hashes=story.hashes("A", 40)[3:]
    )
    announced: set[bytes] = set()
    for event in pool.take_events():
        if isinstance(event, Stored) and event.group == 0:
            assert event.parent is None or event.parent in announced or event.is_partial
            announced.update(event.hashes)


def test_evt_08_an_eviction_names_its_group() -> None:
    """EVT-08."""
    pool = make_pool(group(), group(GroupKind.SLIDING_WINDOW, 4, window_tokens=100), usable=20)
    story = Story(pool)
    story.admit("A", 4, sid=1)
    pool.take_events()
    pool.evict(pool.tables(story.session, 1)[1])
    (event,) = pool.take_events()
    assert isinstance(event, Removed) and event.group == 1 and event.copies_left == [0]
    assert any(gid == 0 for _, gid, _ in pool.describe().cache)


def test_met_01_readmissions_are_no_hits() -> None:
    """MET-01."""
    pool = make_pool(usable=40)
    story = Story(pool)
    for i in range(20):
        story.admit(f"P{i}", 8, sid=i)
        pool.free(story.session, i)
        story.admit(f"P{i}", 9, sid=i, is_resumed=True)
        pool.free(story.session, i)
    statistics = pool.prefix_statistics()
    assert statistics.hit_own_tokens == statistics.hit_shared_tokens == 0
    assert statistics.resumed_hit_tokens > 0


def test_met_03_hybrid_hits_are_counted() -> None:
    """MET-03."""
    state = group(GroupKind.MAMBA, 4, mamba_mode=MambaMode.ALIGN)
    pool = make_pool(group(), state, usable=30)
    story = Story(pool)
    story.run("A", 16)
    assert story.admit("A", 17).hit_tokens == pool.prefix_statistics().hit_own_tokens == 16


def test_met_04_queries_and_hits_are_tokens_and_the_parts_sum() -> None:
    """MET-04."""
    pool = make_pool(group(size=16), usable=6, unit=16)
    story = Story(pool)
    story.run("A", 40)
    story.run("A", 40)
    story.run("B", 96)
    story.run("A", 40)
    statistics = pool.prefix_statistics()
    assert statistics.query_tokens == 216
    assert statistics.hit_own_tokens == 32
    assert statistics.miss_evicted_tokens == sum(statistics.miss_evicted_by_age_tokens) > 0
    parts = (
        statistics.hit_own_tokens
        + statistics.hit_shared_tokens
        + statistics.miss_never_seen_tokens
        + statistics.miss_evicted_tokens
        + statistics.miss_rule_tokens
        + statistics.miss_other_tokens
    )
    assert parts == statistics.query_tokens


def test_perf_05_an_unchanged_refusal_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PERF-05: 1000 waiting, 100 steps, nothing changes."""
    pool = make_pool(usable=8)
    story = Story(pool)
    story.admit("A", 32)
    lookups = []
    look_up = pool.groups.lookup
    monkeypatch.setattr(pool.groups, "lookup", lambda *a: lookups.append(1) or look_up(*a))
    for sid in range(100, 1100):
        assert story.ask(f"W{sid}", 8, sid=sid).status is Status.REFUSED
    for _ in range(100):
        for sid in range(100, 1100, 50):
            answer = pool.admit(story.session, sid, num_tokens=8, token_budget=BIG)
            assert answer.status is Status.REFUSED
    assert len(lookups) == 1000


def test_perf_06_refusals_change_no_order() -> None:
    """PERF-06."""
    pool = make_pool(usable=4250, max_model_len=1 << 20)
    story = Story(pool)
    story.run("A", 4 * 4096)
    story.admit("B", 4 * 100)
    before = pool.describe()
    for _ in range(20):
        assert story.ask("A", 4 * 4096 + 4 * 100).status is Status.REFUSED
    assert pool.describe() == before


def test_a_remembered_refusal_is_forgotten_with_free_and_bounded() -> None:
    """R19: hashes travel once; the oldest are forgotten first."""
    pool = make_pool(usable=4, max_remembered_refusals=2)
    story = Story(pool)
    story.admit("A", 16)
    for sid in (10, 11, 12):
        story.ask("B", 8, sid=sid)
    assert list(pool.tenures.sessions[story.session].refused) == [11, 12]
    pool.free(story.session, 11)
    assert list(pool.tenures.sessions[story.session].refused) == [12]


def test_r1_a_refused_extend_cancels_the_rest_of_the_step() -> None:
    """R1."""
    pool = make_pool(usable=4)
    story = Story(pool)
    story.admit("A", 8, sid=1)
    story.admit("B", 8, sid=2)
    items = StepInput(step=story.step + 1, token_budget=BIG)
    items.extend.sequence_ids, items.extend.slots_needed, items.extend.processed_tokens = [1, 2], [9, 9], [8, 8]
    items.admit.sequence_ids, items.admit.num_tokens = [3], [4]
    output = pool.step(story.session, items)
    assert output.extend_status == [Status.REFUSED, Status.NOT_TRIED]
    assert output.admit_status == [Status.NOT_TRIED]
