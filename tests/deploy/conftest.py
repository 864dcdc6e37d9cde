"""What the deployment tests share. A tool that is not installed skips its tests by name; `make deploy-test` installs all."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


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
