"""A state inside a block is its holder's to write on: other sessions, whose kernels know no order with his, wait."""

from kvhold_server.pool.values import Status
from tests.model.by_hand import HandPool
from tests.recovery.test_states import FULL, config, hashes, state_group


def test_a_state_inside_a_block_is_hit_by_others_once_nobody_writes_on_it() -> None:
    pool = HandPool(config(FULL, state_group()))
    owner, other = pool.open_session(), pool.open_session()
    asked = {"num_tokens": 100, "hashes": hashes("s", 12)}
    pool.begin_step(owner, 1)
    pool.admit(owner, 1, num_tokens=12, token_budget=100, hashes=hashes("s", 12))
    pool.complete(owner, 1)
    assert pool.lookup(owner, **asked).hit_tokens == 12
    assert pool.lookup(other, **asked).hit_tokens == 0, "the owner's next step overwrites it"
    pool.begin_step(owner, 2)
    grown = pool.extend(owner, 1, slots_needed=13, processed_tokens=12)
    assert grown.status is Status.OK
    (copy,) = pool.end_step(owner).copies
    assert pool.lookup(other, **asked).hit_tokens == 0, "the copy that has its hash now is not written yet"
    pool.complete(owner, 2)
    pool.begin_step(other, 1)
    admitted = pool.admit(other, 1, num_tokens=13, token_budget=100, hashes=hashes("s", 12))
    assert admitted.hit_tokens == 12
    assert [(c.source, c.group) for c in pool.end_step(other).copies] == [(copy.target, 1)]
    pool.check_invariants()


def test_a_state_inside_a_block_that_its_session_let_go_is_everybodys() -> None:
    pool = HandPool(config(FULL, state_group()))
    owner, other = pool.open_session(), pool.open_session()
    pool.begin_step(owner, 1)
    pool.admit(owner, 1, num_tokens=12, token_budget=100, hashes=hashes("s", 12))
    pool.free(owner, 1)
    pool.complete(owner, 1)
    assert pool.lookup(other, num_tokens=100, hashes=hashes("s", 12)).hit_tokens == 12
