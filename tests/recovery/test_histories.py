"""Random histories with restarts: whatever dies when, no byte is wrong, no setting forgotten, nothing left behind.

history_bytes, history_world and history_engine have what is checked in every step.
"""

import random
from pathlib import Path

import pytest

from tests.recovery.history_engine import Engine
from tests.recovery.history_world import World

NUM_TURNS = 250


def turn(world: World) -> None:
    choice = world.choice
    alive = world.alive()
    chance = choice.random()
    if len(alive) < 2 or (chance < 0.03 and len(alive) < 4):
        world.guarded(lambda: world.engines.append(Engine(world, choice.choice("ab"))))
    elif chance < 0.48:
        choice.choice(alive).step()
    elif chance < 0.78:
        choice.choice(alive).run_kernels(choice.randint(1, 6))
    elif chance < 0.82:
        world.pass_time(choice.uniform(0, 6))
    elif chance < 0.85:
        world.die(in_the_middle=False)
    elif chance < 0.88:
        world.arm(choice.randint(1, 60))
    elif chance < 0.91:
        world.set_quota(choice.choice("ab"), choice.choice([0, 8, 20, 40]))
    elif chance < 0.92:
        world.update_content()
    elif chance < 0.925:
        world.reset()
    elif chance < 0.94:
        world.evict()
    elif chance < 0.97:
        choice.choice(alive).is_alive = False  # with its workers
    else:
        choice.choice(alive).close()


@pytest.mark.parametrize("groups", ["f", "fw", "fs", "fws"])
@pytest.mark.parametrize("seed", range(6))
def test_no_byte_is_wrong_and_nothing_is_forgotten(tmp_path: Path, groups: str, seed: int) -> None:
    world = World(tmp_path, random.Random(f"{groups} {seed}"), groups)
    for _ in range(NUM_TURNS):
        turn(world)
        world.check()
    end(world)
    assert world.num_restarts > 3


def end(world: World) -> None:
    """Everybody leaves, and nothing is left; what was computed last is hit by others, daemon after daemon."""
    for engine in world.alive():
        engine.close()
    for tenant in "ab":
        world.set_quota(tenant, 0)
    for _ in range(8):
        world.pass_time(5.0)
    world.die(in_the_middle=False)
    counts = world.live.pool.counts()
    assert (counts.held, counts.quarantined, counts.sessions) == (0, 0, 0)
    num_hit_tokens = []
    for num_tokens in (24, 27, 27):
        engine = Engine(world, "a")
        num_hit_tokens.append(engine.admit(prompt=99, num_tokens=num_tokens))
        engine.close()
        world.die(in_the_middle=False)
    assert num_hit_tokens[1:] == [24, 24]


def lonely_turn(world: World) -> None:
    """One engine at a time: what its sequences need it draws by itself, and says so two steps later."""
    choice = world.choice
    alive = world.alive()
    chance = choice.random()
    if not alive:
        world.pass_time(6.0)
        world.guarded(lambda: world.engines.append(Engine(world, "a")))
    elif chance < 0.60:
        alive[0].step()
    elif chance < 0.80:
        alive[0].run_kernels(choice.randint(1, 6))
    elif chance < 0.84:
        world.pass_time(choice.uniform(0, 6))
    elif chance < 0.87:
        world.die(in_the_middle=False)
    elif chance < 0.91:
        world.arm(choice.randint(1, 60))
    elif chance < 0.925:
        world.update_content()
    elif chance < 0.935:
        world.reset()
    elif chance < 0.96:
        world.evict()
    elif chance < 0.97:
        alive[0].is_alive = False  # with its workers, and with what it drew
    elif chance < 0.98:
        alive[0].close()


@pytest.mark.parametrize("groups", ["f", "fw"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_drawn_and_not_said_survives_a_daemon(tmp_path: Path, groups: str, seed: int) -> None:
    world = World(tmp_path, random.Random(f"alone {groups} {seed}"), groups)
    for _ in range(NUM_TURNS):
        lonely_turn(world)
        world.check()
    assert sum(engine.num_drawn_blocks for engine in world.engines) > 20
    assert world.num_deaths_with_draws > 0
    end(world)
