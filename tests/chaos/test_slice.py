"""The shortest chaos run that still kills everything once or twice; `make chaos-slice` and `make chaos` are longer."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_seconds_of_chaos_pass() -> None:
    pytest.importorskip("numpy")
    command = [sys.executable, "-m", "tests.chaos.harness", "--seconds", "10", "--seed", "1", "--schedulers", "2"]
    run = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "wrong bytes: 0 blocks" in run.stdout and "leaks: 0" in run.stdout
