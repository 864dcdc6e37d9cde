"""What a restart must not forget of sequences that still run: whether their contents were replaced, and kernels."""

import asyncio
import random
from pathlib import Path

import pytest

from kvhold.v1 import admin_pb2, block_pb2, pool_pb2, session_pb2
from kvhold_server.domain.ids import PoolName
from tests.recovery.history_engine import Engine
from tests.recovery.history_world import World
from tests.recovery.test_warm_restart import CONTENT, directory, fill, hit_tokens, pool_request, posix
from tests.rpc.harness import ClientSession, RunningDaemon, digest

__all__ = ["directory"]  # the fixture
NEW = pool_pb2.ContentIdentity(model="m", weight_version="2")


async def replace_contents(daemon: RunningDaemon, how: str) -> None:
    if how == "update":
        request = pool_pb2.UpdateContentRequest(pool="p", expected_generation=1, content=NEW)
        await daemon.pools.UpdateContent(request)
    else:
        await daemon.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(pool="p", force=True))


async def reassert(daemon: RunningDaemon, session: ClientSession, table: list[int]) -> ClientSession:
    """Sequence 1, all of whose 48 tokens are computed, under the hashes 1 2 3."""
    held = session_pb2.HeldSequence(
        sequence_id=1, num_tokens=48, publish_tokens=48, num_blocks=[3], block_ids=table, hashes=digest(1, 2, 3)
    )
    request = session_pb2.OpenSessionRequest(pool="p", resume_token=session.opened.resume_token, held=[held])
    opened = await daemon.sessions.OpenSession(request)
    assert not opened.lost_sequence_ids
    resumed = ClientSession(daemon, opened)
    resumed.next_step = session.next_step
    return resumed


def table_of(daemon: RunningDaemon) -> list[int]:
    return daemon.node.pools[PoolName("p")].pool.tables(daemon.node.sessions.sessions()[0].slot, 1)[0]


@pytest.mark.parametrize("num_restarts", [1, 2])
@pytest.mark.parametrize("how", ["update", "reset"])
async def test_what_ran_when_contents_were_replaced_is_never_hit_after_restarts(
    directory: Path, how: str, num_restarts: int
) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        await session.step()
        table = table_of(daemon)
        await replace_contents(daemon, how)
    for _ in range(num_restarts):
        async with posix(directory) as daemon:
            await daemon.pools.OpenPool(pool_request(content=NEW if how == "update" else CONTENT))
            session = await reassert(daemon, session, table)
            more = block_pb2.ExtendItems(sequence_ids=[1], slots_needed=[49], publish_tokens=[48])
            await session.step(extend=more)
            await session.step()
            assert await hit_tokens(daemon, 1, 2, 3) == 0, "computed with the old weights"
    async with posix(directory) as daemon:
        session = await reassert(daemon, session, table)
        await session.free(1)
        await daemon.until(lambda: not daemon.node.sessions.sessions()[0].is_outdated)
        await session.admit(5, 48, 1, 2, 3)
        await session.step()
        assert await hit_tokens(daemon, 1, 2, 3) == 48, "what is admitted afterwards is of the new ones"
        table = daemon.node.pools[PoolName("p")].pool.tables(daemon.node.sessions.sessions()[0].slot, 5)[0]
    async with posix(directory) as daemon:
        await reassert(daemon, session, table)
        assert await hit_tokens(daemon, 1, 2, 3) == 48
        daemon.check()


async def test_what_is_re_asserted_after_contents_were_replaced_is_outdated(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        await session.step()
        table = table_of(daemon)
    async with posix(directory) as daemon:
        await replace_contents(daemon, "update")
        session = await reassert(daemon, session, table)
        await session.step()
        assert await hit_tokens(daemon, 1, 2, 3) == 0


async def test_a_newcomer_waits_for_kernels_of_before_the_restart_and_their_own_session_does_not(
    directory: Path,
) -> None:
    """What the former session had let go is in no table; a kernel of its last step may still write there."""
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        table = table_of(daemon)
        await session.step(free=block_pb2.FreeItems(sequence_ids=[2]), completed_step=1)
    async with posix(directory) as daemon:
        clock = asyncio.get_running_loop().time
        began = clock()
        session = await reassert(daemon, session, table)
        await session.admit(3, 100, 7)
        assert clock() - began < 0.8
        newcomer = await daemon.open_session()
        await newcomer.admit(1, 100, 8)
        assert 0.9 < clock() - began < 3.0


@pytest.mark.parametrize("num_stores", range(1, 7))
def test_a_kill_while_contents_are_replaced_leaves_all_as_before_or_all_replaced(
    tmp_path: Path, num_stores: int
) -> None:
    """The table's header decides, with the third store; the manifest, which is written before, says both."""
    world = World(tmp_path, random.Random(1), "f")
    engine = Engine(world, "a")
    engine.admit(prompt=1, num_tokens=24)
    engine.close()
    world.arm(num_stores)
    world.update_content()
    assert world.num_restarts == 1
    is_replaced = num_stores >= 3
    for _ in range(2):
        assert world.live.content_generation == world.version == 1 + is_replaced
        assert world.live.identity.content.weight_version == str(world.version)
        world.die(in_the_middle=False)
    engine = Engine(world, "a")
    assert engine.admit(prompt=1, num_tokens=25) == (0 if is_replaced else 24)
    engine.close()
    world.update_content()
    world.die(in_the_middle=False)
    assert world.live.content_generation == world.version == 2 + is_replaced
