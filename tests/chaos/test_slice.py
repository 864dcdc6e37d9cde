"""The shortest chaos run that still kills everything once or twice; `make chaos-slice` and `make chaos` are longer."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.soak import segments
from tests.client.test_leash import is_gone

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_seconds_of_chaos_pass() -> None:
    pytest.importorskip("numpy")
    command = [sys.executable, "-m", "tests.chaos.harness", "--seconds", "10", "--seed", "1", "--schedulers", "2"]
    run = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "wrong bytes: 0 blocks" in run.stdout and "leaks: 0" in run.stdout


def children_of(pid: int) -> list[int]:
    """Processes that it has started and that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        if int(rest.split()[1]) == pid and rest.split()[0] != "Z":
            found.append(int(name.split()[0]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    ("program", "num_children"), [("harness", 3), ("soak", 3)], ids=["daemon+2 schedulers", "daemon+2 clients"]
)
def test_a_run_that_is_ended_leaves_no_process_no_mount_and_no_memory(
    program: str, num_children: int, number: signal.Signals, tmp_path: Path
) -> None:
    pytest.importorskip("numpy")
    flags = {"harness": ["--seconds", "60", "--schedulers", "2"], "soak": ["--steps", "100000000"]}[program]
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    command = [sys.executable, "-m", f"tests.chaos.{program}", *flags]
    mounts = Path("/proc/self/mounts").read_text()
    with subprocess.Popen(command, cwd=REPO, env=environment, stdout=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 40
        while len(children := children_of(run.pid)) < num_children and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        children = sorted({*children, *children_of(run.pid)})  # one of the first may have met a fault by now
        directories = list(tmp_path.glob("kvsoak-*"))
        assert all(segments(directory) for directory in directories)
        run.send_signal(number)
        run.wait(timeout=20)
    assert len(children) >= num_children
    deadline = time.monotonic() + 15
    while left := [pid for pid in children if Path(f"/proc/{pid}/cmdline").exists() and not is_gone(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert Path("/proc/self/mounts").read_text() == mounts
    assert [segments(directory) for directory in directories] == [[] for _ in directories]
