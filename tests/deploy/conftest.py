"""What the deployment tests share. A missing tool skips its tests by name; `make deploy-test` installs all of them."""

import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.live import LiveDaemon, daemon
from tests.deploy.load import run_load


@pytest.fixture(scope="session")
def deploy_dir(repo_dir: Path) -> Path:
    return repo_dir / "deploy"


@pytest.fixture(scope="session")
def tool(repo_dir: Path) -> Callable[[str], str]:
    """Path of a program: beside this Python, in the checkov environment, or on PATH. Skips where it is in none."""

    def find(name: str) -> str:
        places = [Path(sys.executable).parent, repo_dir / ".venv" / "checkov" / "bin"]
        found = next((str(place / name) for place in places if (place / name).exists()), shutil.which(name))
        if found is None:
            pytest.skip(f"{name} is not installed; `make deploy-test` installs it")
        return found

    return find


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """A live daemon with two pools after some seconds of load; a client vanished on the way, the others stay."""
    with daemon(tmp_path_factory.mktemp("kvhold")) as live:
        asyncio.run(run_load(live.target, seconds=4.0))
        yield live
