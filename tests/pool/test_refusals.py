"""A refused sequence is told the same until something changes that could change its answer."""

from kvhold_server.domain.pool_config import GroupConfig, GroupKind
from kvhold_server.pool.values import Bound, Status
from tests.model.by_hand import HandPool
from tests.pool.test_field_reports import make_pool

BLOCK = 4
FULL = GroupConfig(kind=GroupKind.FULL, block_size_tokens=BLOCK)
BIG = 2**31 - 1


def ask(pool: HandPool, session: int, sequence_id: int, num_tokens: int, hashes: list[bytes] | None) -> Status:
    answer = pool.admit(
        session, sequence_id, num_tokens=num_tokens, token_budget=BIG, hashes=hashes, defer_publish=True
    )
    assert (answer.bound is Bound.BLOCKS) is (answer.status is Status.REFUSED)
    return answer.status


def test_a_refused_sequence_is_admitted_once_blocks_are_freed() -> None:
    pool = make_pool(FULL, usable=4)
    session = pool.open_session()
    pool.begin_step(session, 1)
    assert ask(pool, session, 1, 3 * BLOCK, []) is Status.OK
    assert ask(pool, session, 2, 2 * BLOCK, []) is Status.REFUSED
    assert ask(pool, session, 2, 2 * BLOCK, None) is Status.REFUSED
    pool.free(session, 1)
    assert ask(pool, session, 2, 2 * BLOCK, None) is Status.OK


def test_a_refused_sequence_is_admitted_once_what_it_needs_is_published() -> None:
    pool = make_pool(FULL, usable=4)
    session = pool.open_session()
    pool.begin_step(session, 1)
    assert ask(pool, session, 1, 2 * BLOCK, [b"a", b"b"]) is Status.OK
    assert ask(pool, session, 2, 3 * BLOCK, [b"a", b"b", b"c"]) is Status.REFUSED
    assert ask(pool, session, 2, 3 * BLOCK, None) is Status.REFUSED
    pool.publish(session, 1, publish_tokens=2 * BLOCK)  # nothing is taken or let go
    assert ask(pool, session, 2, 3 * BLOCK, None) is Status.OK
