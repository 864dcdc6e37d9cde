"""The processes of a chaos run: one daemon, K schedulers, a proxy between them, and what they all left behind."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kvhold.v1 import plan_pb2
from kvhold_client.client import Client, PoolStatus
from kvhold_client.errors import KvholdError
from kvhold_client.leash import leashed
from kvhold_client.pools import PoolRequest
from kvhold_client.replay.counters import SharedCounters
from tests.chaos.proxy import Proxy
from tests.chaos.rows import NUM_ROWS
from tests.chaos.scheduler import EXIT_FATAL, EXIT_UNREACHABLE, EXIT_WRONG_BYTES, Job

POOL = "chaos"
POOL_BYTES = 24 << 20  # about 1500 blocks: too few for all, so that blocks are evicted and sequences preempted
MEMORY_BYTES = 96 << 20
READY_TIMEOUT_S = 20.0
CLONE_NEWNS = 0x00020000
REPO = Path(__file__).resolve().parents[2]


def plan_request() -> plan_pb2.PlanRequest:
    """A dense model of two small layers."""
    geometry = plan_pb2.AttentionGeometry(num_kv_heads=2, head_size_elems=64, dtype=plan_pb2.DTYPE_BFLOAT16)
    spec = plan_pb2.LayerSpec(block_size_tokens=16, geometry=geometry, full_attention=plan_pb2.FullAttention())
    layers = [plan_pb2.Layer(layer_name=f"layers.{i}", layer_spec_index=0) for i in range(2)]
    config = plan_pb2.PlannerConfig(
        layout=plan_pb2.LAYOUT_LBNHC, max_model_len_tokens=4096, max_num_batched_tokens=2048, enable_prefix_caching=True
    )
    return plan_pb2.PlanRequest(
        config=config, layer_specs=[spec], ranks=[plan_pb2.Rank(available_memory_bytes=POOL_BYTES, layers=layers)]
    )


@dataclass(slots=True, kw_only=True)
class Tally:
    """What happened to processes, beside the faults that were meant to."""

    wrong_bytes: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    num_fenced: int = 0  # schedulers that learned that they had lost their session, and ended
    num_restarts: int = 0  # of schedulers
    recoveries_s: list[float] = field(default_factory=list)  # from the daemon's start to its first answer
    outcomes: dict[str, int] = field(default_factory=dict)


class World:
    """Everything is in one directory, memory included where a file system can be mounted there."""

    def __init__(self, directory: Path, num_schedulers: int) -> None:
        self.directory = directory
        self.tally = Tally()
        self.memory, self.owns_memory = _mount(directory / "memory")
        self.daemon_socket = directory / "kvhold.sock"
        self.findings = directory / "findings"
        self.num_schedulers = num_schedulers
        self.counters = SharedCounters(directory / "counters", num_schedulers, NUM_ROWS)
        self.daemon: subprocess.Popen[bytes] | None = None
        self.armed = ""  # failpoints of the daemon that runs
        self.schedulers: list[subprocess.Popen[bytes] | None] = [None] * num_schedulers
        self.stopped: dict[int, float] = {}  # schedulers under SIGSTOP → when they may go on
        self.expected_deaths: set[int] = set()  # schedulers that we have killed
        self._logs: dict[str, IO[bytes]] = {}
        self.proxy: Proxy | None = None

    # ------------------------------------------------------------------ the daemon
    def start_daemon(self, failpoints: str = "") -> None:
        """Starts it and waits until the pool answers."""
        started = time.monotonic()
        arguments = [str(self.directory), str(self.memory), failpoints]
        self.armed = failpoints
        self.daemon = self._spawn("daemon", "tests.chaos.daemon", *arguments)
        with Client(f"unix:{self.daemon_socket}", timeout_s=5.0) as client:
            while True:
                try:
                    opened = client.open_pool(PoolRequest(name=POOL, plan=plan_request(), backend="posix_shm"))
                    break
                except KvholdError as error:
                    if self.daemon.poll() is not None:  # a failpoint was reached already
                        self.start_daemon()
                        return
                    if time.monotonic() - started > READY_TIMEOUT_S:
                        raise RuntimeError(f"the daemon does not answer: {error}") from error
                    time.sleep(0.01)
        self.tally.recoveries_s.append(time.monotonic() - started)
        outcome = opened.info.outcome + (f" ({opened.info.recovery_reason})" if opened.info.recovery_reason else "")
        self.tally.outcomes[outcome] = self.tally.outcomes.get(outcome, 0) + 1
        if self.proxy is None:
            self.proxy = Proxy(self.directory / "proxy.sock", self.daemon_socket)

    def kill_daemon(self, number: signal.Signals) -> None:
        """Ends it with a signal and waits for its end."""
        assert self.daemon is not None
        self.daemon.send_signal(number)  # nothing happens to one that has reached its failpoint
        code = self.daemon.wait(timeout=READY_TIMEOUT_S)
        at_failpoint = bool(self.armed) and code == -signal.SIGKILL
        if number is signal.SIGTERM and code != 0 and not at_failpoint:
            self.tally.unexpected.append(f"the daemon ended with {code} after SIGTERM")

    def client(self) -> Client:
        """A connection that no fault is meant for."""
        return Client(f"unix:{self.daemon_socket}", timeout_s=10.0)

    def status(self) -> PoolStatus:
        """The pool now."""
        with self.client() as client:
            return client.get_pool(POOL).status()

    # ------------------------------------------------------------------ schedulers
    def start_scheduler(self, slot: int) -> None:
        """A first one, or the successor of one that ended."""
        assert self.proxy is not None
        job = Job(
            target=f"unix:{self.proxy.path}",
            pool=POOL,
            name=f"scheduler-{slot}",
            counters=str(self.directory / "counters"),
            slot=slot,
            num_slots=self.num_schedulers,
        )
        path = self.directory / f"job-{slot}.json"
        path.write_text(job.dump())
        self.schedulers[slot] = self._spawn(f"scheduler-{slot}", "tests.chaos.scheduler", str(path))

    def look_after_schedulers(self) -> None:
        """Lets stopped ones go on when it is time, and replaces those that ended."""
        for slot, until in list(self.stopped.items()):
            if time.monotonic() >= until:
                self.signal_scheduler(slot, signal.SIGCONT)
                del self.stopped[slot]
        for slot, process in enumerate(self.schedulers):
            if process is not None and process.poll() is not None:
                self._note_end(slot, process.returncode)
                self.tally.num_restarts += 1
                self.start_scheduler(slot)

    def signal_scheduler(self, slot: int, number: signal.Signals) -> None:
        """To the process, if it still runs."""
        process = self.schedulers[slot]
        if process is not None and process.poll() is None:
            process.send_signal(number)

    def _note_end(self, slot: int, code: int) -> None:
        tail = "\n  ".join(self._log_path(f"scheduler-{slot}").read_text(errors="replace").splitlines()[-12:])
        if code == EXIT_WRONG_BYTES:
            self.tally.wrong_bytes.append(f"scheduler {slot}: {tail}")
        elif code in (EXIT_FATAL, EXIT_UNREACHABLE):
            self.tally.num_fenced += 1
        elif code == -signal.SIGKILL and slot in self.expected_deaths:
            self.expected_deaths.discard(slot)
        elif code:
            self.tally.unexpected.append(f"scheduler {slot} ended with {code}:\n  {tail}")

    # ------------------------------------------------------------------ the end
    def finish_schedulers(self, timeout_s: float) -> None:
        """Lets everybody finish what was begun."""
        deadline = time.monotonic() + timeout_s
        for slot in list(self.stopped):
            self.signal_scheduler(slot, signal.SIGCONT)
        for slot in range(self.num_schedulers):
            self.signal_scheduler(slot, signal.SIGTERM)
        for slot, process in enumerate(self.schedulers):
            if process is None:
                continue
            try:
                code = process.wait(timeout=max(0.1, deadline - time.monotonic()))
                self._note_end(slot, 0 if code == -signal.SIGTERM else code)  # told before it could listen
            except subprocess.TimeoutExpired:
                self.tally.unexpected.append(f"scheduler {slot} did not finish within {timeout_s} s")

    def close(self) -> None:
        """Ends every process and takes the memory away. Bytes left in it are for `leftovers`."""
        for process in (*self.schedulers, self.daemon):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        if self.proxy is not None:
            self.proxy.close()
        for log in self._logs.values():
            log.close()
        self.counters.close()
        if self.owns_memory:
            subprocess.run(["umount", str(self.memory)], check=False)

    def leftovers(self) -> list[str]:
        """Segments that nobody owns any more."""
        return sorted(path.name for path in self.memory.glob("kvhold.*") if path.suffix != ".lock")

    def fill_memory(self) -> Path:
        """Takes all that is left of the memory's file system, as somebody else's file."""
        path = self.memory / "somebody-elses"
        with path.open("wb") as file:
            stat = os.statvfs(self.memory)
            os.posix_fallocate(file.fileno(), 0, max(1, (stat.f_bavail - 1) * stat.f_frsize))
        return path

    def _spawn(self, name: str, module: str, *arguments: str) -> "subprocess.Popen[bytes]":
        log = self._logs.setdefault(name, self._log_path(name).open("ab"))
        environment = dict(os.environ) | {
            "PYTHONPATH": os.pathsep.join(str(REPO / part) for part in ("", "proto", "server", "client")),
            "PYTHONPYCACHEPREFIX": str(self.directory / "bytecode"),  # restarts are timed: compile once
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = leashed(module, *arguments)
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, cwd=REPO)

    def _log_path(self, name: str) -> Path:
        return self.directory / f"{name}.log"


def end_in_order() -> None:
    """SIGTERM ends this program as an exception would: processes are ended, memory is given back. Of SIGKILL, which
    nobody can answer, the leash of each child takes care."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def have_own_mounts() -> None:
    """What this thread mounts from now on goes with its last process, even after SIGKILL. Needs the right to mount."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=False, capture_output=True)


def _mount(path: Path) -> tuple[Path, bool]:
    """A small tmpfs, so that it can be filled; without the right to mount one, /dev/shm, which is not."""
    path.mkdir()
    if shutil.which("mount"):
        command = ["mount", "-t", "tmpfs", "-o", f"size={MEMORY_BYTES}", "tmpfs", str(path)]
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            return path, True
    return Path("/dev/shm"), False
