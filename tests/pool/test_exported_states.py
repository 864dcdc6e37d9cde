"""Each hash of a state names a block with just that state: of its own prefix, after just so many tokens.

What kernels leave in blocks is modelled: the tokens that went into a state, written where hand-offs and tables say.
"""

import random

import pytest

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig
from kvhold_server.pool.values import Status
from tests.model.by_hand import HandPool

SIZE, LENGTH, STATES = 16, 200, 1
Tokens = tuple[int, ...]


def make_pool(unit: int, *, eagle: bool, retention: int | None = None, num_blocks: int = 60) -> HandPool:
    state = GroupConfig(
        kind=GroupKind.MAMBA,
        block_size_tokens=SIZE,
        mamba_mode=MambaMode.ALIGN,
        num_checkpoint_blocks=1,
        checkpoint_alignment_tokens=unit,
    )
    return HandPool(
        PoolConfig(
            groups=(GroupConfig(kind=GroupKind.FULL, block_size_tokens=SIZE, is_eagle=eagle), state),
            num_blocks=num_blocks,
            hash_unit_tokens=unit,
            scheduler_block_tokens=SIZE,
            max_model_len=LENGTH,
            use_eagle=eagle,
            retention_interval_tokens=retention,
        )
    )


class Engine:
    """One session whose kernels run as soon as they are asked for."""

    def __init__(self, pool: HandPool) -> None:
        self.pool = pool
        self.unit = pool.config.hash_unit_tokens
        self.session = pool.open_session()
        self.step = 0
        self.running: dict[int, tuple[Tokens, int]] = {}  # tokens of the longest text, computed so far
        self.holds: dict[int, Tokens] = {}  # block → what went into its state
        self.prefix_of: dict[bytes, Tokens] = {}

    def admit(self, sid: int, tokens: Tokens, num_tokens: int, num_hashed: int = LENGTH, **item: int) -> int:
        """Returns the hit."""
        self._begin()
        admitted = self.pool.admit(
            self.session,
            sid,
            num_tokens=num_tokens,
            token_budget=1000,
            hashes=self._hashes(tokens, 0, min(num_tokens, num_hashed)),
            **item,
        )
        if admitted.status is not Status.OK:
            return 0
        self._run(sid, tokens, admitted.hit_tokens, admitted.hit_tokens + admitted.new_tokens)
        return admitted.hit_tokens

    def extend(self, sid: int, num: int, *, is_late: bool = False) -> None:
        """Late: as with a step under way, whose tokens are not known and whose blocks are still read."""
        tokens, start = self.running[sid]
        self._begin()
        known = len(self.pool._alive(self.session).sequences[sid].hashes) * self.unit
        grown = self.pool.extend(
            self.session,
            sid,
            slots_needed=start + num,
            processed_tokens=max(start - SIZE, 0) if is_late else start,
            computed_tokens=start,
            publish_tokens=start if is_late else start + num,
            hashes=self._hashes(tokens, known, start + num),
        )
        if grown.status is Status.OK:
            self._run(sid, tokens, start, start + num)

    def publish(self, sid: int) -> None:
        """What is computed, and nothing more."""
        self._begin()
        self.pool.extend(
            self.session, sid, slots_needed=0, processed_tokens=0, publish_tokens=self.running[sid][1], hashes=[]
        )
        assert not self.pool.end_step(self.session).copies

    def free(self, sid: int) -> None:
        self._begin()
        self.pool.free(self.session, sid)
        del self.running[sid]

    def check(self) -> None:
        self.pool.check_invariants()
        for key, block in self.pool.store.index[STATES].items():
            wanted = self.prefix_of[key]
            assert self.holds[block] == wanted, f"hash of {len(wanted)} tokens, state after {len(self.holds[block])}"

    def _begin(self) -> None:
        self.step += 1
        self.pool.begin_step(self.session, self.step, self.step - 1)

    def _hashes(self, tokens: Tokens, start: int, end: int) -> list[bytes]:
        ends = range(start // self.unit * self.unit + self.unit, end + 1, self.unit)
        self.prefix_of |= {repr(tokens[:n]).encode(): tokens[:n] for n in ends}
        return [repr(tokens[:n]).encode() for n in ends]

    def _run(self, sid: int, tokens: Tokens, start: int, end: int) -> None:
        output, table = self.pool.end_step(self.session), self.pool.tables(self.session, sid)[STATES]
        for copy in output.copies:
            if copy.group == STATES:
                self.holds[copy.target] = self.holds[copy.source]
        if start:
            assert self.holds[table[(start - 1) // SIZE]] == tokens[:start], "it goes on from its own state"
        for hand in output.hand_offs:
            if start < hand.boundary_tokens <= end:
                self.holds[hand.block] = tokens[: hand.boundary_tokens]
        self.holds[table[(end - 1) // SIZE]] = tokens[:end]
        self.running[sid] = tokens, end


def text(name: int, num_shared: int = 0) -> Tokens:
    """Texts are alike in their first tokens."""
    return (0,) * num_shared + (name,) * (LENGTH - num_shared)


def test_a_state_exported_a_block_early_for_a_drafter_is_hit_where_it_is() -> None:
    """33 tokens: the draft head computes the last matched block again, so the state is that after 16, in entry 1."""
    engine = Engine(make_pool(SIZE, eagle=True))
    engine.admit(1, text(1), 33)
    block = engine.pool.tables(engine.session, 1)[STATES][1]
    assert block and len(engine.holds[block]) == 16
    engine.check()
    assert engine.admit(2, text(1), 33) == 16, "32 are cached, the last block of them is computed again"
    assert engine.pool.tables(engine.session, 2)[STATES][0] == block
    assert engine.admit(3, text(1), 70) == 16, "nobody exported the state after 32"
    engine.check()


@pytest.mark.parametrize("retention", [None, 0, 32])
@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("unit", [4, 16])
def test_no_hash_names_another_state(unit: int, eagle: bool, retention: int | None) -> None:
    rng = random.Random(f"{unit} {eagle} {retention}")
    num_hit = 0
    for _ in range(10):
        engine = Engine(make_pool(unit, eagle=eagle, retention=retention))
        for sid in range(1, 80):
            choice = rng.random()
            if engine.running and choice < 0.5:
                running = rng.choice(list(engine.running))
                done = engine.running[running][1]
                if rng.random() < 0.1:
                    engine.publish(running)
                elif done < LENGTH - 50:
                    engine.extend(running, rng.choice([1, SIZE - done % SIZE, 40]), is_late=rng.random() < 0.3)
            elif engine.running and choice < 0.65:
                engine.free(rng.choice(list(engine.running)))
            elif len(engine.running) < 6:
                tokens = text(rng.randrange(1, 3), rng.choice([0, 20, 48, 60]))
                most, is_deferred = rng.choice([-1, -1, 16, 33, 48]), rng.random() < 0.2
                item = {"max_new_tokens": most, "defer_publish": is_deferred}
                hit = engine.admit(sid, tokens, rng.randint(8, 90), rng.choice([LENGTH, LENGTH, 20, 0]), **item)
                num_hit += hit > 0
            engine.check()
    assert num_hit > 5
