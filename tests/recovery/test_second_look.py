"""A table looked at from a second process: the same verdict, and nothing lost without that process."""

import errno
import random
import sys
from pathlib import Path

import pytest

from kvhold_server.domain.ids import PoolName
from kvhold_server.domain.pool_config import GroupConfig, GroupKind, PoolConfig
from kvhold_server.memory import second_look
from kvhold_server.memory.block_table import BlockTable
from kvhold_server.memory.block_table_header import RECORDS_OFFSET, TableIdentity
from kvhold_server.memory.second_look import SecondLook
from kvhold_server.node.filling import fill_from
from tests.recovery.test_warm_restart import directory, pool_request, posix

__all__ = ["directory"]  # the fixture

IDENTITY = TableIdentity.of(plan="plan", byte_format="format", options="options", regions="regions", content="content")
NUM_BLOCKS = 200
CONFIG = PoolConfig(
    groups=(GroupConfig(kind=GroupKind.FULL, block_size_tokens=16),) * 3,
    num_blocks=NUM_BLOCKS,
    hash_unit_tokens=16,
    scheduler_block_tokens=16,
    max_model_len=10_000,
)


@pytest.fixture(autouse=True)
def any_table_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_look, "MIN_BLOCKS", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})


def table_with(path: Path, seed: int, *, num_old: int = 0, num_torn: int = 0) -> BlockTable:
    """Some blocks of two generations in a random order of use, some of them damaged behind our back."""
    choice = random.Random(seed)
    table = BlockTable.create(path, IDENTITY, num_blocks=NUM_BLOCKS, hash_size_bytes=16)
    blocks = choice.sample(range(1, NUM_BLOCKS), choice.randint(num_old + num_torn + 1, NUM_BLOCKS - 1))
    for number, block in enumerate(blocks):
        if number == num_old and num_old:
            table.start_generation(b"new content".ljust(16))
        table.record([block], [block % 3], [block.to_bytes(16, "big")], [16])
    for block in blocks[len(blocks) - num_torn :]:
        table._file.bytes[RECORDS_OFFSET + block * table._header.record_size_bytes + 40] ^= 1
    return table


@pytest.mark.parametrize(("num_old", "num_torn"), [(0, 0), (0, 3), (5, 0), (5, 2)])
def test_it_comes_to_the_verdict_that_this_process_comes_to(tmp_path: Path, num_old: int, num_torn: int) -> None:
    table = table_with(tmp_path / "t", seed=num_old + num_torn, num_old=num_old, num_torn=num_torn)
    look = SecondLook.begin(table.path, NUM_BLOCKS)
    assert look is not None
    verdict = look.verdict()
    assert verdict == table.verdict()
    assert verdict is not None and len(verdict.torn) == num_torn


@pytest.mark.parametrize(("num_old", "num_torn"), [(0, 0), (0, 3), (5, 2)])
def test_a_pool_filled_on_trust_has_what_is_whole_and_current(tmp_path: Path, num_old: int, num_torn: int) -> None:
    expected = table_with(tmp_path / "a", seed=7, num_old=num_old, num_torn=num_torn).scan()
    filled = fill_from(table_with(tmp_path / "b", seed=7, num_old=num_old, num_torn=num_torn), CONFIG)
    filled.pool.check_invariants()
    cached = [block for block in filled.pool.store.free.order() if filled.pool.store.key_of[block] is not None]
    assert cached == expected.order
    assert (filled.found.num_torn, filled.found.num_old_generation) == (num_torn, num_old)
    assert filled.pool.counts().cached == len(expected.blocks)


def test_without_a_second_process_this_one_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-such-python"))
    table = table_with(tmp_path / "t", seed=1, num_torn=2)
    assert SecondLook.begin(table.path, NUM_BLOCKS) is None
    assert fill_from(table, CONFIG).found.num_torn == 2


def test_without_a_file_for_the_verdict_this_one_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("os.memfd_create", refused)
    assert fill_from(table_with(tmp_path / "t", seed=1, num_torn=2), CONFIG).found.num_torn == 2


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_if_it_dies_this_one_looks(tmp_path: Path, end: str) -> None:
    look = SecondLook.begin(table_with(tmp_path / "t", seed=1).path, NUM_BLOCKS)
    assert look is not None
    getattr(look._process, end)()
    assert look.verdict() is None or look._process.returncode == 0


def test_if_it_takes_too_long_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_look, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(second_look, "_PROGRAM", "import time; time.sleep(60)")
    look = SecondLook.begin(table_with(tmp_path / "t", seed=1).path, NUM_BLOCKS)
    assert look is not None and look.verdict() is None
    assert look._process.returncode is not None


async def test_a_second_look_that_fails_leaves_a_warning_and_the_cache(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await daemon.open_session()
        await session.admit(1, 48, 1, 2, 3)
        await session.admit(2, 16)  # what the first one computed counts from now on
    monkeypatch.setattr(second_look, "_PROGRAM", "raise SystemExit(7)")
    async with posix(directory) as daemon:
        assert daemon.node.pools[PoolName("p")].recovery.num_kept_blocks
    (line,) = [record for record in caplog.records if "second look" in record.message]
    assert line.levelname == "WARNING" and "pool p" in line.message and "ended with 7" in line.message


def test_one_core_or_a_small_table_is_not_worth_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table_with(tmp_path / "t", seed=1).path
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert SecondLook.begin(path, NUM_BLOCKS) is None
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(second_look, "MIN_BLOCKS", NUM_BLOCKS + 1)
    assert SecondLook.begin(path, NUM_BLOCKS) is None


def test_a_damaged_stamp_costs_the_order_and_nothing_else(tmp_path: Path) -> None:
    """It is not covered by the checksum; what is recorded after it must still have room to count."""
    table = table_with(tmp_path / "t", seed=3)
    (block, *_) = table.scan().blocks
    table._file.words[(RECORDS_OFFSET + block * table._header.record_size_bytes) // 8 + 1] = 2**64 - 1
    expected = table.scan().blocks
    table.record([block], [block % 3], [block.to_bytes(16, "big")], [16])
    table.touch([block])
    assert table.scan().blocks == expected
