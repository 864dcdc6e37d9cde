"""Quotas are operators' settings: a daemon that died forgets none that it had confirmed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvhold.v1 import admin_pb2, block_pb2, pool_pb2
from kvhold_server.domain.ids import PoolName
from kvhold_server.failpoints import Failpoints, Stopped
from kvhold_server.memory.quota_records import QuotaRecords
from kvhold_server.memory.record_slots import PLACES
from kvhold_server.memory.recovery_errors import RecordsFull
from kvhold_server.node.warm_restart import WarmRestart
from tests.recovery.test_warm_restart import directory, pool_request, posix, segments
from tests.rpc.harness import RunningDaemon

__all__ = ["directory"]  # the fixture
POOL = PoolName("p")


def reopen(path: Path) -> dict[str, int]:
    records, former = QuotaRecords.open(path, max_tenants=4)
    records.close()
    return former


def state(path: Path, **settings: object) -> WarmRestart:
    return WarmRestart(path, boot_id="b", max_sessions=4, max_workers=4, **settings)  # type: ignore[arg-type]


def set_quota(daemon: RunningDaemon, tenant: str, num_blocks: int) -> object:
    request = admin_pb2.SetQuotaRequest(pool="p", tenant=tenant, max_held_blocks=num_blocks)
    return daemon.admin.SetQuota(request)


async def test_a_tenant_is_bounded_as_before_after_a_restart(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        await set_quota(daemon, "t", 4)
        await set_quota(daemon, "t", 3)
        await set_quota(daemon, "u", 5)
        await set_quota(daemon, "u", 0)
    for _ in range(2):
        async with posix(directory) as daemon:
            await daemon.pools.OpenPool(pool_request())
            assert daemon.node.pools[POOL].quotas == {"t": 3}
    async with posix(directory) as daemon:
        session = await daemon.open_session(tenant="t")
        answer = await session.admit(1, 100, 1, 2, 3)
        assert answer.admit.statuses == [block_pb2.ITEM_STATUS_QUOTA_EXCEEDED]
        assert (await session.admit(1, 40, 1, 2)).admit.statuses == [block_pb2.ITEM_STATUS_OK]
        other = await daemon.open_session(tenant="u")
        assert (await other.admit(1, 100, 1, 2, 3)).admit.statuses == [block_pb2.ITEM_STATUS_OK]


async def test_quotas_go_with_their_pool(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        await set_quota(daemon, "t", 3)
        await daemon.pools.DeletePool(pool_pb2.DeletePoolRequest(name="p"))
        assert list((directory / "pools").iterdir()) == []
        await daemon.pools.OpenPool(pool_request())
        assert daemon.node.pools[POOL].quotas == {}
    async with posix(directory) as daemon:
        assert daemon.node.pools[POOL].quotas == {}


async def test_a_daemon_killed_while_it_deletes_a_pool_leaves_no_quota_to_the_next_of_its_name(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        await set_quota(daemon, "t", 3)
    (directory / "pools" / "p.json").unlink()  # as far as it came
    for _ in range(2):
        async with posix(directory) as daemon:
            await daemon.pools.OpenPool(pool_request())
            assert daemon.node.pools[POOL].quotas == {}


async def test_a_pool_whose_memory_is_lost_keeps_its_quotas(directory: Path) -> None:
    """To its operators it is the same pool; only its cache is empty."""
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        await set_quota(daemon, "t", 3)
    for region in segments(directory):
        region.unlink()
    async with posix(directory) as daemon:
        opened = await daemon.pools.OpenPool(pool_request())
        assert opened.recovery.reason == "REGION_MISSING"
        assert daemon.node.pools[POOL].quotas == {"t": 3}
    async with posix(directory) as daemon:
        assert daemon.node.pools[POOL].quotas == {"t": 3}


def as_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_anybodys(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize("spoil", [as_a_directory, as_anybodys])
async def test_quotas_that_cannot_be_read_cost_the_quotas_and_not_the_cache(
    directory: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await daemon.open_session()
        await session.admit(1, 48, 1, 2, 3)
        await session.admit(2, 16)  # what the first one computed counts from now on
        await set_quota(daemon, "t", 3)
    spoil(directory / "pools" / "p.quotas")
    async with posix(directory) as daemon:
        opened = await daemon.pools.OpenPool(pool_request())
        assert opened.outcome == pool_pb2.OPEN_POOL_OUTCOME_RECOVERED and opened.recovery.num_kept_blocks
        assert daemon.node.pools[POOL].quotas == {}
    (line,) = [record for record in caplog.records if "begins without quotas" in record.message]
    assert line.levelname == "WARNING" and "pool p " in line.message and "p.quotas" in line.message


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_in_the_middle_of_a_change_leaves_one_of_the_two_quotas(tmp_path: Path, place: str) -> None:
    warm = state(tmp_path)
    warm.set_quota(POOL, "t", 3)
    warm.set_quota(POOL, "u", 7)
    warm.close()
    warm = state(tmp_path, hit=Failpoints.parse(f"{place}=raise"))
    assert warm.quotas(POOL) == {"t": 3, "u": 7}
    with pytest.raises(Stopped):
        warm.set_quota(POOL, "t", 5)
    warm.close()
    assert state(tmp_path).quotas(POOL) == {"t": 3 if place == PLACES[0] else 5, "u": 7}


def test_a_quota_that_is_lifted_is_not_found_again_and_makes_no_file(tmp_path: Path) -> None:
    warm = state(tmp_path)
    warm.set_quota(POOL, "t", 0)
    assert list((tmp_path / "pools").iterdir()) == []
    warm.set_quota(POOL, "t", 3)
    warm.set_quota(POOL, "t", 0)
    warm.close()
    assert state(tmp_path).quotas(POOL) == {}


def test_the_longest_tenants_fit_and_the_file_is_bounded(tmp_path: Path) -> None:
    records, _ = QuotaRecords.open(tmp_path / "q", max_tenants=4)
    names = ["\x01" * 64, "\U0001f600" * 64, '"' * 64, "x"]
    for i, name in enumerate(names):
        records.put(name, 2**31 - 1 - i)
    with pytest.raises(RecordsFull):
        records.put("one more", 1)
    records.put("x", 1)
    records.close()
    assert reopen(tmp_path / "q") == {name: 2**31 - 1 - i for i, name in enumerate(names[:3])} | {"x": 1}
