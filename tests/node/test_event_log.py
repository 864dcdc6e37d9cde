"""The event log against the pool itself: whoever applies the events in order holds exactly what everybody can hit."""

import random

import pytest

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig
from kvhold_server.node.event_log import ClearedAll, EventLog, NumberedChange, StoredRun
from kvhold_server.pool.values import StepInput
from tests.model.by_hand import HandPool

UNIT = 4


def make_pool(num_blocks: int = 24, num_groups: int = 2) -> HandPool:
    groups = (
        GroupConfig(kind=GroupKind.FULL, block_size_tokens=UNIT),
        GroupConfig(kind=GroupKind.SLIDING_WINDOW, block_size_tokens=UNIT, window_tokens=2 * UNIT),
    )
    return HandPool(
        PoolConfig(
            groups=groups[:num_groups],
            num_blocks=num_blocks,
            hash_unit_tokens=UNIT,
            scheduler_block_tokens=UNIT,
            max_model_len=1000,
            report_completed=True,
        )
    )


class Reader:
    """Applies changes in order."""

    def __init__(self) -> None:
        self.index: set[tuple[int, bytes]] = set()
        self.number = 0

    def start(self, log: EventLog) -> None:
        self.index = {(run.group, h) for run in log.snapshot() for h in run.hashes}
        self.number = log.last_number

    def apply(self, events: list[NumberedChange]) -> None:
        for event in events:
            assert event.number == self.number + 1
            self.number = event.number
            change = event.change
            if isinstance(change, ClearedAll):
                self.index.clear()
                continue
            named = {(change.group, h) for h in change.hashes}
            if isinstance(change, StoredRun):
                assert not named & self.index, "stored once"
                self.index |= named
            else:
                assert named <= self.index, "removed once, after it was stored"
                self.index -= named


class Engine:
    """Random work of several sessions on one pool; everything goes into the log."""

    def __init__(self, seed: int, log_after: int = 0) -> None:
        self.random = random.Random(seed)
        self.pool = make_pool()
        self.log = EventLog(config=self.pool.config, max_events=1000)
        self.steps: dict[int, int] = {}
        self.held: dict[int, set[int]] = {}
        self.next_id = 1

    def prompt(self) -> list[bytes]:
        """One of few families, so that prefixes are shared."""
        family, length = self.random.randrange(3), self.random.randint(1, 5)
        return [bytes([family, i]) + b"x" * 30 for i in range(length)]

    def act(self) -> None:
        random_ = self.random
        if not self.steps or (len(self.steps) < 3 and random_.random() < 0.1):
            self.steps[self.pool.open_session()] = 0
        session = random_.choice(list(self.steps))
        self.steps[session] += 1
        step = self.steps[session]
        self.held.setdefault(session, set())
        if step > 1:
            self.log.absorb(self.pool.complete(session, random_.randint(0, step - 1)), self.pool.take_events())
        self.pool.begin_step(session, step)
        choice = random_.random()
        if choice < 0.45:
            hashes = self.prompt()
            tokens = len(hashes) * UNIT + random_.randrange(UNIT)
            answer = self.pool.admit(session, self.next_id, num_tokens=tokens, token_budget=10**6, hashes=hashes)
            if answer.status == 0:
                self.held[session].add(self.next_id)
            self.next_id += 1
        elif choice < 0.7 and self.held[session]:
            self.pool.free(session, self.held[session].pop())
        elif choice < 0.75:
            self.pool.evict([random_.randrange(1, self.pool.config.num_blocks)])
        elif choice < 0.77:
            self.pool.reset(force=True)
        elif choice < 0.82:
            self.pool.kill_session(session)
            while not self.pool.release_quarantine(session, 5):
                pass
            del self.steps[session], self.held[session]
        self.log.absorb(None, self.pool.take_events())

    def visible(self) -> set[tuple[int, bytes]]:
        public = self.pool.published()
        return set(zip(public.groups, public.hashes, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_holds_what_everybody_can_hit(seed: int) -> None:
    engine = Engine(seed)
    reader = Reader()
    for turn in range(300):
        engine.act()
        if turn == seed * 5:
            engine.log.follow(engine.pool.published())
            reader.start(engine.log)
        if engine.log.is_following:
            events = engine.log.since(reader.number)
            assert events is not None
            reader.apply(events)
            assert reader.index == engine.visible(), f"turn {turn}"
            again = Reader()
            again.start(engine.log)
            assert again.index == reader.index
    engine.pool.check_invariants()


def test_runs_follow_the_prompt_and_name_their_parent() -> None:
    pool = make_pool()
    log = EventLog(config=pool.config, max_events=10)
    log.follow(pool.published())
    session = pool.open_session()
    pool.begin_step(session, 1)
    hashes = [bytes([i]) * 32 for i in range(4)]
    pool.admit(session, 1, num_tokens=9, token_budget=100, hashes=hashes[:2])
    log.absorb(None, pool.take_events())
    assert log.last_number == 0, "provisional"
    pool.begin_step(session, 2)
    log.absorb(pool.complete(session, 1), pool.take_events())
    full = log.since(0)
    assert full is not None
    first = full[0].change
    assert isinstance(first, StoredRun)
    assert (first.group, first.hashes, first.indexes, first.parent) == (0, tuple(hashes[:2]), (0, 1), b"")
    pool.extend(session, 1, slots_needed=17, processed_tokens=0, publish_tokens=16, hashes=hashes[2:])
    log.absorb(None, pool.take_events())
    log.absorb(pool.complete(session, 2), [])
    run = next(e.change for e in log.since(len(full)) or [] if isinstance(e.change, StoredRun) and e.change.group == 0)
    assert (run.hashes, run.indexes, run.parent) == (tuple(hashes[2:]), (2, 3), hashes[1])


def test_the_ring_is_bounded_and_says_when_it_forgot() -> None:
    log = EventLog(config=make_pool().config, max_events=3)
    log.is_following = True
    from kvhold_server.pool.values import Cleared

    for _ in range(5):
        log.absorb(None, [Cleared()])
    assert [event.number for event in log.since(2) or []] == [3, 4, 5]
    assert log.since(1) is None and log.since(6) is None and log.since(5) == []


def test_a_hash_that_its_block_loses_and_gets_again_in_one_step_is_still_told() -> None:
    """A step that names itself as complete: what it publishes comes after what it evicts."""
    pool = make_pool(num_blocks=2, num_groups=1)
    log = EventLog(config=pool.config, max_events=10)
    log.follow(pool.published())
    session = pool.open_session()
    reader = Reader()
    for step, name in enumerate((b"a", b"a", b"b"), start=1):
        items = StepInput(step=step, completed_step=step)
        items.free.sequence_ids = [step - 1] if step > 1 else []
        items.admit.sequence_ids, items.admit.num_tokens = [step], [UNIT]
        items.admit.hash_counts, items.admit.hashes = [1], [name * 32]
        items.token_budget, items.admit.skip_lookup = 10**6, [True]
        output = pool.step(session, items)
        log.absorb(output.completed, output.events)
        log.absorb(output.completed_last, ())
        reader.apply(log.since(reader.number) or [])
        public = pool.published()
        assert reader.index == set(zip(public.groups, public.hashes, strict=True)) and reader.index


def test_hashes_of_parts_of_blocks_are_not_told() -> None:
    """A state that goes on being written hands its hash to a copy, without an event."""
    state = GroupConfig(kind=GroupKind.MAMBA, block_size_tokens=16, mamba_mode=MambaMode.ALIGN)
    config = PoolConfig(
        groups=(GroupConfig(kind=GroupKind.FULL, block_size_tokens=16), state),
        num_blocks=40,
        hash_unit_tokens=UNIT,
        scheduler_block_tokens=16,
        max_model_len=1000,
        report_completed=True,
    )
    pool = HandPool(config)
    log = EventLog(config=config, max_events=100)
    log.follow(pool.published())
    session = pool.open_session()
    hashes = [bytes([i]) * 32 for i in range(12)]
    reader = Reader()
    for step, slots in enumerate((32, 40, 41, 48, 49), start=1):
        pool.begin_step(session, step)
        if step == 1:
            pool.admit(
                session, 1, num_tokens=41, num_prompt_tokens=41, max_new_tokens=32, token_budget=100, hashes=hashes[:10]
            )
        else:
            new = hashes[10:] if slots == 48 else []
            pool.extend(
                session, 1, slots_needed=slots, processed_tokens=slots - 1, publish_tokens=min(slots, 48), hashes=new
            )
        log.absorb(pool.complete(session, step), pool.take_events())
    assert any(tokens % 16 for tokens in pool.published().key_tokens), "a part has a hash"
    reader.apply(log.since(0) or [])
    whole = {(0, hashes[3]), (0, hashes[7]), (0, hashes[11])}
    assert {entry for entry in reader.index if entry[0] == 0} == whole
    assert all(entry[1] in (hashes[3], hashes[7], hashes[11]) for entry in reader.index)
    pool.free(session, 1)
    pool.evict(range(1, 40))
    log.absorb(None, pool.take_events())
    reader.apply(log.since(reader.number) or [])
    assert reader.index == set()
