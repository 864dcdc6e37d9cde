"""Every kind of fault as one row: how often, and what it does to the world. All return within seconds."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvhold_client.errors import Exhausted, KvholdError, Unreachable
from kvhold_client.pools import PoolRequest
from kvhold_server.memory import block_table, record_slots
from tests.chaos.world import World, plan_request

PLACES = (*block_table.PLACES, *record_slots.PLACES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One row."""

    name: str
    weight: int
    inject: Callable[[World, random.Random], bool]  # False: not possible now, nothing happened


def kill_scheduler(world: World, choice: random.Random) -> bool:
    slot = choice.randrange(world.num_schedulers)
    if slot in world.stopped or not world.counters.get(slot, "ready"):
        return False
    world.expected_deaths.add(slot)
    world.signal_scheduler(slot, signal.SIGKILL)
    return True


def stop_scheduler(world: World, choice: random.Random) -> bool:
    """Long enough, now and then, that its session is taken away while it sleeps."""
    slot = choice.randrange(world.num_schedulers)
    if slot in world.stopped:
        return False
    world.signal_scheduler(slot, signal.SIGSTOP)
    world.stopped[slot] = time.monotonic() + choice.choice([0.2, 1.0, 3.0, 9.0])
    return True


def kill_daemon(world: World, choice: random.Random) -> bool:
    world.kill_daemon(signal.SIGKILL)
    time.sleep(choice.choice([0.0, 0.0, 0.3]))
    world.start_daemon()
    return True


def drain_daemon(world: World, choice: random.Random) -> bool:
    """As an upgrade does: its successor goes on with the same pool."""
    world.kill_daemon(signal.SIGTERM)
    world.start_daemon()
    return True


def stop_daemon(world: World, choice: random.Random) -> bool:
    assert world.daemon is not None
    world.daemon.send_signal(signal.SIGSTOP)
    time.sleep(choice.choice([0.1, 0.5, 1.5]))
    world.daemon.send_signal(signal.SIGCONT)
    return True


def kill_daemon_between_two_stores(world: World, choice: random.Random) -> bool:
    """Restarts it with a failpoint at which it kills itself; the next fault finds it dead, or it never gets there."""
    world.kill_daemon(signal.SIGKILL)
    world.start_daemon(f"{choice.choice(PLACES)}=exit@{choice.randint(1, 60)}")
    return True


def cut_connections(world: World, choice: random.Random) -> bool:
    assert world.proxy is not None
    return world.proxy.cut() > 0


def delay_connections(world: World, choice: random.Random) -> bool:
    assert world.proxy is not None
    world.proxy.set_delay(choice.choice([0.02, 0.1]))
    time.sleep(0.5)
    world.proxy.set_delay(0.0)
    return True


def stall_connections(world: World, choice: random.Random) -> bool:
    assert world.proxy is not None
    world.proxy.stall()
    time.sleep(choice.choice([0.2, 1.0, 2.0]))
    if choice.random() < 0.5:
        world.proxy.cut()
    world.proxy.resume()
    return True


def fill_memory(world: World, choice: random.Random) -> bool:
    """With the file system full, a second pool is refused and leaves nothing; the first goes on."""
    if not world.owns_memory:
        return False
    file = world.fill_memory()
    before = world.leftovers()
    try:
        with world.client() as client:
            client.open_pool(PoolRequest(name="second", plan=plan_request(), backend="posix_shm"))
        world.tally.unexpected.append("a pool was made on a full file system")
    except Exhausted:
        pass
    except Unreachable:  # a failpoint has just killed the daemon: nobody was there to refuse
        return False
    except KvholdError as error:
        world.tally.unexpected.append(f"a full file system is answered with {error}")
    finally:
        file.unlink()
    if world.leftovers() != before:
        world.tally.unexpected.append(f"a refused pool left {world.leftovers()}")
    return True


KINDS = (
    FaultKind(name="scheduler killed", weight=6, inject=kill_scheduler),
    FaultKind(name="scheduler stopped and continued", weight=4, inject=stop_scheduler),
    FaultKind(name="daemon killed", weight=4, inject=kill_daemon),
    FaultKind(name="daemon killed between two stores", weight=4, inject=kill_daemon_between_two_stores),
    FaultKind(name="daemon drained and replaced", weight=2, inject=drain_daemon),
    FaultKind(name="daemon stopped and continued", weight=2, inject=stop_daemon),
    FaultKind(name="connections cut", weight=5, inject=cut_connections),
    FaultKind(name="connections delayed", weight=2, inject=delay_connections),
    FaultKind(name="connections stalled", weight=2, inject=stall_connections),
    FaultKind(name="memory's file system filled", weight=2, inject=fill_memory),
)
