"""The programs in examples/ run as they stand and say what their texts promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvhold_client.local_daemon import LocalDaemon


def run(path: Path, **env: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVHOLD_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **env}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scheduler_hits_the_system_prompt(repo_dir: Path, daemon: LocalDaemon) -> None:
    shown = run(repo_dir / "examples/scheduler.py", KVHOLD_TARGET=daemon.target)
    found = re.fullmatch(r"(\d+) of (\d+) prompt tokens came from the cache\n", shown)
    assert found
    assert int(found[1]) >= 512 * 20


def test_the_second_asyncio_engine_hits_what_the_first_computed(repo_dir: Path) -> None:
    pytest.importorskip("prometheus_client")
    assert run(repo_dir / "examples/asyncio_engine.py") == (
        "first: 0 of 800 tokens cached\nsecond: 784 of 800 tokens cached\n"
    )


def test_the_shipped_trace_is_what_its_maker_makes(repo_dir: Path) -> None:
    made = run(repo_dir / "examples/make_trace.py")
    assert made == (repo_dir / "client/kvhold_client/replay/demo_trace.jsonl").read_text()
