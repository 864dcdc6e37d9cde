"""A daemon for each test, on its own socket."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.rpc.harness import RunningDaemon, running


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name (sun_path is short, pytest's tmp_path is not)."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as path:
        yield Path(path)


@pytest.fixture
async def daemon(short_dir: Path) -> AsyncIterator[RunningDaemon]:
    async with running(short_dir) as started:
        yield started
        started.check()


@pytest.fixture
async def deadly_daemon(short_dir: Path) -> AsyncIterator[RunningDaemon]:
    """One that gives a silent client hardly any time: for tests that wait for deaths."""
    async with running(short_dir, grace_period_s=0.15) as started:
        yield started
        started.check()
