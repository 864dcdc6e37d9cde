"""Hypothesis drives the pool and the naive model, so that a disagreement shrinks to a short story."""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.model.pair import CONFIGS, Engine, Pair

RANDOMS = st.randoms(use_true_random=False)


class PoolMachine(RuleBasedStateMachine):
    """Up to three sessions on one pool."""

    @initialize(name=st.sampled_from(sorted(CONFIGS)))
    def open_pool(self, name: str) -> None:
        self.pair = Pair(CONFIGS[name])
        self.pair.open_session()

    def engine(self, rng: random.Random) -> Engine:
        return rng.choice(list(self.pair.engines.values()))

    @precondition(lambda self: len(self.pair.engines) < 3)
    @rule()
    def open_session(self) -> None:
        self.pair.open_session()

    @precondition(lambda self: self.pair.engines)
    @rule(rng=RANDOMS)
    def admit(self, rng: random.Random) -> None:
        self.pair.admit(self.engine(rng), rng)

    @precondition(lambda self: self.pair.engines)
    @rule(rng=RANDOMS)
    def extend(self, rng: random.Random) -> None:
        self.pair.extend(self.engine(rng), rng)

    @precondition(lambda self: self.pair.engines)
    @rule(rng=RANDOMS)
    def free(self, rng: random.Random) -> None:
        self.pair.free(self.engine(rng), rng)

    @precondition(lambda self: self.pair.engines)
    @rule(rng=RANDOMS)
    def next_step(self, rng: random.Random) -> None:
        self.pair.next_step(self.engine(rng), rng)

    @precondition(lambda self: self.pair.engines)
    @rule(rng=RANDOMS)
    def complete(self, rng: random.Random) -> None:
        self.pair.complete(self.engine(rng), rng)

    @precondition(lambda self: self.pair.engines)
    @rule(rng=RANDOMS)
    def look_up_and_publish_late(self, rng: random.Random) -> None:
        self.pair.late(self.engine(rng), rng)

    @precondition(lambda self: self.pair.engines)
    @rule(rng=RANDOMS)
    def evict_invalidate_or_reset(self, rng: random.Random) -> None:
        self.pair.upkeep(self.engine(rng), rng)

    @precondition(lambda self: len(self.pair.engines) > 1)
    @rule(rng=RANDOMS)
    def end_session(self, rng: random.Random) -> None:
        self.pair.end_session(self.engine(rng), rng)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
