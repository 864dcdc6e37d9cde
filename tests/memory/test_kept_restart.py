"""A daemon over memfd restarts warm, because a holder kept the descriptors."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhold.v1 import block_pb2, pool_pb2
from tests.memory.test_holder import HolderThread
from tests.rpc.harness import RunningDaemon, digest, llama, running

REQUEST = pool_pb2.OpenPoolRequest(
    name="p", plan=llama(), options=pool_pb2.PoolOptions(enable_prefix_caching=True), content={"model": "m"}
)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for a socket's path."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def memfd(directory: Path, holder: str) -> Any:
    return running(directory, backend="memfd", grace_period_s=2.0, holder=holder, keep_pools=True)


async def hit_tokens(daemon: RunningDaemon, *hashes: int) -> int:
    items = block_pb2.LookupItems(num_tokens=[16 * len(hashes) + 1], num_hashes=[len(hashes)], hashes=digest(*hashes))
    response = await daemon.blocks.Lookup(block_pb2.LookupRequest(pool="p", lookup=items))
    return int(response.lookup.hit_tokens[0])


async def fill(daemon: RunningDaemon) -> None:
    assert (await daemon.pools.OpenPool(REQUEST)).outcome == pool_pb2.OPEN_POOL_OUTCOME_FRESH
    session = await daemon.open_session()
    await session.keep_alive()
    await session.admit(1, 48, 1, 2, 3)
    await session.admit(2, 40, 7, 8)


async def test_an_anonymous_pool_is_recovered_with_a_holder(directory: Path) -> None:
    holder = HolderThread(directory / "h.sock")
    async with memfd(directory, str(holder.path)) as daemon:
        await fill(daemon)
    assert list(holder.store.entries) == ["memfd:p/0"]
    async with memfd(directory, str(holder.path)) as daemon:
        assert await hit_tokens(daemon, 1, 2, 3) == 48
        assert (await daemon.pools.OpenPool(REQUEST)).outcome == pool_pb2.OPEN_POOL_OUTCOME_RECOVERED
        assert (await daemon.pools.DeletePool(pool_pb2.DeletePoolRequest(name="p", force=True))).freed_bytes
        assert holder.store.entries == {}
    holder.store.close()


async def test_a_holder_that_is_away_at_the_start_is_in_the_log(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with memfd(directory, str(directory / "nobody.sock")) as daemon:
        await daemon.pools.OpenPool(REQUEST)
    lines = [record for record in caplog.records if "nobody.sock" in record.message]
    assert lines and lines[0].levelname == "WARNING" and "nothing outlives this daemon" in lines[0].message


async def test_a_holder_that_lost_everything_makes_the_pool_fresh_and_says_so(directory: Path) -> None:
    holder = HolderThread(directory / "h.sock")
    async with memfd(directory, str(holder.path)) as daemon:
        await fill(daemon)
    holder.store.close()
    async with memfd(directory, str(holder.path)) as daemon:
        opened = await daemon.pools.OpenPool(REQUEST)
        assert (opened.outcome, opened.recovery.reason) == (pool_pb2.OPEN_POOL_OUTCOME_FRESH, "REGION_MISSING")
    holder.store.close()


async def test_without_a_holder_an_anonymous_pool_begins_fresh(directory: Path) -> None:
    async with memfd(directory, "") as daemon:
        await fill(daemon)
    async with memfd(directory, "") as daemon:
        assert (await daemon.pools.OpenPool(REQUEST)).outcome == pool_pb2.OPEN_POOL_OUTCOME_FRESH
