"""Sequences with states after a restart: the same tables, the same future, and no state under a hash it is not of."""

from array import array
from dataclasses import dataclass, field

import pytest

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig
from kvhold_server.pool.restore import HeldSequence, RecordedBlocks, reassert, restore_cached, restore_order
from kvhold_server.pool.values import Completed, Removed, Status
from tests.model.by_hand import HandPool

UNIT, STATE_SIZE, LENGTH = 4, 8, 200
FULL = GroupConfig(kind=GroupKind.FULL, block_size_tokens=UNIT)


def state_group(num_spec: int = 0, mode: MambaMode = MambaMode.ALIGN, **changes: int) -> GroupConfig:
    return GroupConfig(
        kind=GroupKind.MAMBA,
        block_size_tokens=STATE_SIZE,
        mamba_mode=mode,
        num_speculative_blocks=num_spec,
        **changes,
    )


def config(*groups: GroupConfig, unit: int = UNIT) -> PoolConfig:
    return PoolConfig(
        groups=groups,
        num_blocks=200,
        hash_unit_tokens=unit,
        scheduler_block_tokens=STATE_SIZE,
        max_model_len=LENGTH,
        report_completed=True,
    )


def hashes(name: object, num_tokens: int, unit: int = UNIT) -> list[bytes]:
    return [f"{name}.{i}".encode() for i in range(num_tokens // unit)]


@dataclass
class Recorder:
    """What a journal would have on file: whole blocks that completed steps published."""

    pool: HandPool
    rows: dict[int, tuple[int, bytes, int]] = field(default_factory=dict)

    def keep_up(self, completed: Completed | None) -> None:
        if completed is not None:
            for block, group, key, tokens in zip(
                completed.blocks, completed.groups, completed.hashes, completed.key_tokens, strict=True
            ):
                if not tokens % self.pool.config.groups[group].block_size_tokens:
                    self.rows[block] = group, key, tokens
        for event in self.pool.take_events():
            if isinstance(event, Removed):
                for block in event.blocks:
                    self.rows.pop(block, None)
        for block, (group, key, _) in self.rows.items():
            origin = self.pool.store.origin_of[block]
            assert self.pool.store.key_of[block] == key, "what is on file is what the pool says"
            assert origin is not None and origin.group == group and origin.is_public

    def recovered(self) -> HandPool:
        after = HandPool(self.pool.config)
        columns = [(block, *row) for block, row in sorted(self.rows.items())]
        found = RecordedBlocks(
            blocks=[row[0] for row in columns],
            groups=[row[1] for row in columns],
            hashes=[row[2] for row in columns],
            key_tokens=array("i", [row[3] for row in columns]),
        )
        assert restore_cached(after, found) == []
        restore_order(after, found.blocks)
        return after


def shape(tables: list[list[int]]) -> list[list[bool]]:
    return [[block != 0 for block in table] for table in tables]


def grow(pool: HandPool, session: int, tokens: int, num_spec: int, step: int) -> object:
    """One token more, as a decoding sequence asks for it."""
    pool.begin_step(session, step, step - 1)
    done = pool.extend(
        session,
        1,
        slots_needed=tokens + 1 + num_spec,
        processed_tokens=tokens,
        num_lookahead_tokens=num_spec,
        publish_tokens=tokens + 1,
        hashes=hashes("s", tokens + 1)[tokens // UNIT :],
    )
    return done.status, shape(done.new_blocks)


@pytest.mark.parametrize("num_spec", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", [5, 8, 13, 16, 37, 64])
@pytest.mark.parametrize("num_grown", [0, 1, 3, 9, 20])
def test_a_sequence_with_states_goes_on_as_if_nothing_had_happened(
    num_spec: int, num_tokens: int, num_grown: int
) -> None:
    """From any point of its life: equal tables, and for the rest of it equal demands and equal hits for others."""
    before = HandPool(config(FULL, state_group(num_spec)))
    recorder, session = Recorder(before), before.open_session()
    before.begin_step(session, 1)
    admitted = before.admit(
        session,
        1,
        num_tokens=num_tokens,
        token_budget=1000,
        hashes=hashes("s", num_tokens),
        num_lookahead_tokens=num_spec,
    )
    client = [table.copy() for table in admitted.tables]  # as a client's mirror has them: moved blocks stand twice
    for tokens in range(num_tokens, num_tokens + num_grown):
        before.begin_step(session, tokens)
        done = before.extend(
            session,
            1,
            slots_needed=tokens + 1 + num_spec,
            processed_tokens=tokens,
            num_lookahead_tokens=num_spec,
            publish_tokens=tokens + 1,
            hashes=hashes("s", tokens + 1)[tokens // UNIT :],
        )
        for table, new in zip(client, done.new_blocks, strict=True):
            table += new
        released = min((tokens - 1) // STATE_SIZE, len(client[1]))
        client[1][:released] = [0] * released
    tokens = num_tokens + num_grown
    recorder.keep_up(before.complete(session, max(1, tokens - 1 if num_grown else 1)))
    after = recorder.recovered()
    heir = after.open_session()
    claim = HeldSequence(
        sequence_id=1,
        num_tokens=tokens,
        num_prompt_tokens=num_tokens,
        publish_tokens=tokens,
        tables=client,
        hashes=hashes("s", tokens),
    )
    assert reassert(after, heir, [claim]).lost == {}
    after.check_invariants()
    assert after.tables(heir, 1) == before.tables(session, 1)
    for more in range(tokens, min(tokens + 40, LENGTH - num_spec - 1)):
        assert grow(after, heir, more, num_spec, more + 1) == grow(before, session, more, num_spec, more + 1)
        assert shape(after.tables(heir, 1)) == shape(before.tables(session, 1))
        after.check_invariants()
    end = min(tokens + 40, LENGTH - num_spec - 1)
    for pool, owner in ((before, session), (after, heir)):
        pool.complete(owner, end)
        pool.free(owner, 1)
    asked = {"num_tokens": LENGTH, "hashes": hashes("s", end)}
    assert after.lookup(0, **asked).hit_tokens == before.lookup(0, **asked).hit_tokens >= end // STATE_SIZE * STATE_SIZE


@pytest.mark.parametrize("mode", [MambaMode.ALIGN, MambaMode.ALL])
def test_a_recovered_state_is_hit_and_held(mode: MambaMode) -> None:
    full = GroupConfig(kind=GroupKind.FULL, block_size_tokens=STATE_SIZE)
    before = HandPool(config(full, state_group(mode=mode), unit=STATE_SIZE))
    recorder, session = Recorder(before), before.open_session()
    before.begin_step(session, 1)
    before.admit(session, 1, num_tokens=32, token_budget=100, hashes=hashes("s", 32, STATE_SIZE))
    tables = before.tables(session, 1)
    recorder.keep_up(before.complete(session, 1))
    after = recorder.recovered()
    heir = after.open_session()
    admitted = after.admit(heir, 7, num_tokens=50, token_budget=100, hashes=hashes("s", 48, STATE_SIZE))
    assert (admitted.status, admitted.hit_tokens) == (Status.OK, 32)
    assert admitted.tables[0][:4] == tables[0]
    assert admitted.tables[1][:4] == [0, 0, 0, tables[1][3]], "the state after 32 tokens, where its block lay"
    after.check_invariants()


def test_a_state_inside_a_block_is_a_miss_after_a_restart_and_the_block_end_before_it_a_hit() -> None:
    """Hashes of parts of blocks have no record: the block is written on, and the hash moves to a copy."""
    before = HandPool(config(FULL, state_group()))
    recorder, session = Recorder(before), before.open_session()
    for sequence_id, num_tokens in ((1, 32), (2, 44)):
        before.begin_step(session, sequence_id)
        before.admit(session, sequence_id, num_tokens=num_tokens, token_budget=100, hashes=hashes("s", num_tokens))
    recorder.keep_up(before.complete(session, 2))
    asked = {"num_tokens": 100, "hashes": hashes("s", 44)}
    assert before.lookup(session, **asked).hit_tokens == 44
    for step in (3, 4):  # the block is written on: its hash moves to a copy, which comes free
        grow_to = {"slots_needed": 42 + step, "processed_tokens": 41 + step, "publish_tokens": 42 + step}
        before.begin_step(session, step)
        before.extend(session, 2, **grow_to)
        recorder.keep_up(before.complete(session, step))
    assert before.lookup(session, **asked).hit_tokens == 44
    after = recorder.recovered()
    assert after.lookup(0, **asked).hit_tokens == 32
    after.check_invariants()


def test_a_state_exported_inside_a_chunk_is_never_taken_for_the_one_at_its_blocks_end() -> None:
    before = HandPool(config(FULL, state_group(num_checkpoint_blocks=1, checkpoint_alignment_tokens=UNIT)))
    recorder, session = Recorder(before), before.open_session()
    before.begin_step(session, 1)
    before.admit(session, 1, num_tokens=37, token_budget=100, hashes=hashes("s", 36))
    recorder.keep_up(before.complete(session, 1))
    tables = before.tables(session, 1)
    assert tables[1][3] and before.store.prefixes.find(1, hashes("s", 36)[-1], 0) == tables[1][3], (
        "it is the state after 36"
    )
    after = recorder.recovered()
    heir = after.open_session()
    claim = HeldSequence(
        sequence_id=1, num_tokens=37, num_prompt_tokens=37, publish_tokens=37, tables=tables, hashes=hashes("s", 36)
    )
    assert reassert(after, heir, [claim]).lost == {}
    for tokens in range(37, 40):
        grow(after, heir, tokens, 0, tokens)
    after.complete(heir, 39)
    assert after.store.prefixes.find(1, hashes("s", 40)[-1], 0) == tables[1][4], (
        "the running state has reached its block's end"
    )
    assert after.store.prefixes.find(1, hashes("s", 32)[-1], 0) == 0
    after.check_invariants()


def test_a_state_exported_a_block_early_for_a_drafter_comes_back_as_what_it_is() -> None:
    full = GroupConfig(kind=GroupKind.FULL, block_size_tokens=STATE_SIZE, is_eagle=True)
    state = state_group(num_checkpoint_blocks=1, checkpoint_alignment_tokens=STATE_SIZE)
    before = HandPool(config(full, state, unit=STATE_SIZE))
    recorder, session = Recorder(before), before.open_session()
    before.begin_step(session, 1)
    before.admit(session, 1, num_tokens=17, token_budget=100, hashes=hashes("s", 17, STATE_SIZE))
    recorder.keep_up(None)
    recorder.keep_up(before.complete(session, 1))
    tables = before.tables(session, 1)
    after = recorder.recovered()
    heir = after.open_session()
    claim = HeldSequence(
        sequence_id=1,
        num_tokens=17,
        num_prompt_tokens=17,
        publish_tokens=17,
        tables=tables,
        hashes=hashes("s", 17, STATE_SIZE),
    )
    assert reassert(after, heir, [claim]).lost == {}
    assert after.tables(heir, 1) == tables and tables[1][1]
    first, second = hashes("s", 17, STATE_SIZE)
    assert after.store.prefixes.find(1, first, 0) == tables[1][1], "the state after 8, in the entry of that after 16"
    assert after.store.prefixes.find(1, second, 0) == 0
    after.check_invariants()


def test_a_client_that_does_not_say_where_its_prompt_ends_gets_no_state_taken_for_that() -> None:
    pool = HandPool(config(FULL, state_group()))
    session = pool.open_session()
    claim = HeldSequence(
        sequence_id=1,
        num_tokens=13,
        num_prompt_tokens=0,
        publish_tokens=9,
        tables=[[5, 6, 7, 8], [0, 9]],
        hashes=hashes("s", 12),
    )
    assert reassert(pool, session, [claim]).lost == {}
    pool.begin_step(session, 1)
    pool.extend(session, 1, slots_needed=14, processed_tokens=12, publish_tokens=12)
    pool.complete(session, 1)
    assert pool.store.prefixes.find(0, hashes("s", 12)[-1], 0) == 7
    assert pool.store.prefixes.find(1, hashes("s", 12)[-1], 0) == 0, "12 is no end of a prompt that is known"


def test_a_block_of_an_ordinary_group_that_stands_twice_is_refused() -> None:
    pool = HandPool(config(FULL, state_group(num_spec=2)))
    claim = HeldSequence(
        sequence_id=1, num_tokens=8, num_prompt_tokens=8, publish_tokens=0, tables=[[5, 5], [6, 7, 8]], hashes=[]
    )
    assert "twice" in str(reassert(pool, pool.open_session(), [claim]).lost[1])
    across = HeldSequence(
        sequence_id=1, num_tokens=8, num_prompt_tokens=8, publish_tokens=0, tables=[[5, 6], [6, 7, 8]], hashes=[]
    )
    assert "twice" in str(reassert(pool, pool.open_session(), [across]).lost[1])
