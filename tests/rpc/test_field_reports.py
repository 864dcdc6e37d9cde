"""Faults that users of other block managers reported, as tests over the wire."""

import random

from kvhold.v1 import block_pb2, pool_pb2
from tests.rpc.harness import RunningDaemon, digest


async def counts_of(daemon: RunningDaemon) -> block_pb2.PoolCounts:
    return (await daemon.pools.GetPool(pool_pb2.GetPoolRequest(name="p"))).pool.counts


async def test_pool_21_what_is_held_is_let_go_by_its_id_and_never_by_a_key_computed_again(
    daemon: RunningDaemon,
) -> None:
    """POOL-21: a lookup pins nothing, an unknown id is an error, and what stays held is visible."""
    await daemon.open_pool()
    session = await daemon.open_session()
    await session.keep_alive()
    await session.admit(1, 33, 1, 2)
    await session.step()
    await session.free(1)
    await session.step()
    lookup = block_pb2.LookupItems(num_tokens=[33], num_hashes=[2], hashes=digest(1, 2))
    assert list((await session.step(lookup=lookup)).lookup.hit_tokens) == [32]
    assert (await counts_of(daemon)).num_held_blocks == 0, "a lookup leaves nothing to unlock"
    await session.admit(2, 33, 1, 2)
    assert (await counts_of(daemon)).num_held_blocks == 3
    answer = await session.free(1)
    assert list(answer.num_freed_blocks) == [0]
    assert [(p.part, p.index, p.reason) for p in answer.problems] == [("free", 0, "UNKNOWN_SEQUENCE")]
    assert (await counts_of(daemon)).num_held_blocks == 3
    await session.free(2)
    assert (await counts_of(daemon)).num_held_blocks == 0


async def test_pool_25_blocks_of_an_aborted_load_come_free_though_its_peer_never_reports(
    deadly_daemon: RunningDaemon,
) -> None:
    """POOL-25: the deadline is the session's; until then a fence keeps others off, afterwards nothing is left."""
    daemon = deadly_daemon
    await daemon.open_pool()
    session, other = await daemon.open_session(), await daemon.open_session()
    await session.keep_alive()
    await other.keep_alive()
    admit = block_pb2.AdmitItems(
        sequence_ids=[1], num_tokens=[49], num_hashes=[3], hashes=digest(1, 2, 3), num_external_tokens=[32]
    )
    await session.step(admit=admit)
    await session.step(free=block_pb2.FreeItems(sequence_ids=[1]), completed_step=0)
    assert (await other.step()).counts.num_available_blocks < 99, "the load may still be writing"
    session.break_stream()
    await daemon.until(lambda: len(daemon.node.sessions.sessions()) == 1)
    counts = await counts_of(daemon)
    assert (await other.step()).counts.num_available_blocks == 99
    assert (counts.num_held_blocks, counts.num_quarantined_blocks) == (0, 0)


async def test_pool_28_counters_of_all_states_sum_to_the_pool_after_every_operation(daemon: RunningDaemon) -> None:
    """POOL-28: no counter leaves 0..total, whatever moved between states."""
    rng = random.Random(28)
    await daemon.open_pool(num_blocks=12)
    session = await daemon.open_session()
    await session.keep_alive()
    running: set[int] = set()
    for sequence in range(300):
        if running and rng.random() < 0.5:
            await session.free(gone := rng.choice(sorted(running)))
            running.discard(gone)
        else:
            num = rng.randint(1, 4)
            keys = [rng.randrange(6) * 10 + i for i in range(num)]
            answer = await session.admit(sequence, num * 16 + 1, *keys)
            if answer.admit.statuses[0] == block_pb2.ITEM_STATUS_OK:
                running.add(sequence)
        counts = await counts_of(daemon)
        parts = (
            counts.num_free_blocks,
            counts.num_cached_blocks,
            counts.num_held_blocks,
            counts.num_quarantined_blocks,
        )
        assert min(parts) >= 0 and sum(parts) + 1 == counts.num_blocks == 12, counts
