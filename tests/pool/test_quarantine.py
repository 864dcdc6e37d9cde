"""The quarantine by itself, against sets of who holds what."""

import random

import pytest

from kvhold_server.pool.blocks import BlockStore

NUM_BLOCKS = 12


def num_only_dead(holders: dict[int, list[int]], dead: set[int]) -> int:
    """Blocks that some dead session holds and nobody else."""
    of_block: dict[int, set[int]] = {}
    for session, blocks in holders.items():
        for block in blocks:
            of_block.setdefault(block, set()).add(session)
    return sum(sessions <= dead for sessions in of_block.values())


@pytest.mark.parametrize("seed", range(8))
def test_it_counts_what_only_the_dead_hold(seed: int) -> None:
    rng = random.Random(seed)
    store = BlockStore(num_blocks=NUM_BLOCKS, num_groups=1)
    holders: dict[int, list[int]] = {session: [] for session in range(1, 6)}
    dead: set[int] = set()
    most = 0
    for _ in range(300):
        session = rng.randint(1, 5)
        held = holders[session]
        if session in dead:
            if rng.random() < 0.3:
                store.let_go_of_dead(held)
                holders[session] = []
                dead.remove(session)
        elif rng.random() < 0.2:
            store.quarantine.enter(held)
            dead.add(session)
        elif rng.random() < 0.3 and held:
            store.let_go([held.pop(rng.randrange(len(held)))], None)
        elif rng.random() < 0.5 and store.free.count:
            held += store.take(1, session)
        else:
            others = {block for blocks in holders.values() for block in blocks} - set(held)
            hits = rng.sample(sorted(others), min(2, len(others)))
            store.hold(hits)
            held += hits
        store.quarantine.check_invariants()
        assert store.quarantine.num_blocks == num_only_dead(holders, dead)
        most = max(most, store.quarantine.num_blocks)
    assert most > 1, "something was quarantined"
