"""Where a measurement takes place: a daemon pinned to one core, the yardstick's simulator pinned to another."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhold_client.leash import leashed

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
YARDSTICK = HERE / "yardstick"
RECORDED_TRACE = REPO.parent / "shared" / "traces" / "conversation_trace.jsonl"
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Cores:
    """The same core twice where there is only one."""

    daemon: int
    scheduler: int


def choose_cores() -> Cores:
    """The last core for the scheduler, the one before for the daemon."""
    cores = sorted(os.sched_getaffinity(0))
    return Cores(daemon=cores[-2] if len(cores) > 1 else cores[-1], scheduler=cores[-1])


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running one."""

    target: str
    pid: int

    def cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def daemon(cores: Cores) -> Iterator[Daemon]:
    """Starts one with the fake backend on a socket of its own, and ends it."""
    with tempfile.TemporaryDirectory(prefix="kvhold-bench-") as place:
        socket = Path(place) / "kvhold.sock"
        command = leashed("kvhold_server", "serve", "--socket", str(socket), "--backend", "fake", "--no-keep-pools")
        with (Path(place) / "log").open("w") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
            os.sched_setaffinity(process.pid, {cores.daemon})
            try:
                _await(process, socket, Path(place) / "log")
                yield Daemon(target=f"unix:{socket}", pid=process.pid)
            finally:
                process.terminate()
                process.wait(timeout=60)
                assert process.stdin is not None
                process.stdin.close()


def _await(process: "subprocess.Popen[bytes]", socket: Path, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the daemon did not start:\n{log.read_text()}")
        time.sleep(0.05)
    time.sleep(0.3)


def simulate(
    live: Daemon, cores: Cores, manager: str, arguments: Sequence[str], interpreter: str = sys.executable
) -> dict[str, Any]:
    """One replay by one manager in a process of its own, pinned. Returns the simulator's report, case by case."""
    command = ["taskset", "-c", str(cores.scheduler), interpreter, str(YARDSTICK / "simulator.py"), *arguments]
    env = {**os.environ, "KVHOLD_TARGET": live.target, "PYTHONPATH": os.pathsep.join(_import_paths(interpreter))}
    done = subprocess.run([*command, "--worker", manager], capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{manager} failed with {' '.join(arguments)}:\n{done.stderr[-4000:]}")
    cases: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return cases


def _import_paths(interpreter: str) -> list[str]:
    """Our packages for our interpreter; the incumbent's environment sees the yardstick alone."""
    ours = [str(REPO / part) for part in ("proto", "client")] if interpreter == sys.executable else []
    return [str(YARDSTICK), *ours]


def trace() -> Path:
    """The recorded trace beside the checkout, or the small one that comes with the client."""
    if RECORDED_TRACE.exists():
        return RECORDED_TRACE
    return REPO / "client" / "kvhold_client" / "replay" / "demo_trace.jsonl"
