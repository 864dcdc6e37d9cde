"""Fixtures that every test directory may use."""

from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo_dir() -> Path:
    """Root of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Recorded vectors and traces: they lie beside the checkout and are no part of it. Skips where they are absent."""
    path = REPO.parent / "shared"
    if not (path / "vectors").is_dir():
        pytest.skip(f"recorded vectors are not at {path}")
    return path
