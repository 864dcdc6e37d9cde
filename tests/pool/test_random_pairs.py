"""Volume: the pool and the naive model under long random loads, every count, table and order compared after each
operation.

About 200,000 operations in all by default; KVHOLD_RANDOM_OPERATIONS sets how many per configuration.
"""

import os
import random

import pytest

from tests.model.pair import CONFIGS, Pair

NUM_OPERATIONS = int(os.environ.get("KVHOLD_RANDOM_OPERATIONS", "6000"))
NUM_PER_RUN = 500  # then everybody leaves, and a new pool starts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_pool_and_the_model_agree_after_every_operation(name: str) -> None:
    """POOL-29: the categories sum to the total at every step, too."""
    for run in range(max(1, NUM_OPERATIONS // NUM_PER_RUN)):
        rng = random.Random(f"{name}/{run}")
        pair = Pair(CONFIGS[name], max_sessions=1 + run % 4, check_every=8, tells_stored=bool(run % 2))
        for _ in range(NUM_PER_RUN):
            pair.random_operation(rng)
        pair.drain()
