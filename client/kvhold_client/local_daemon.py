"""A daemon for as long as a `with` block lasts: for demos, tests, and commands that need one and find none.

It runs as a process of its own (`python -m kvhold_server serve`) on a socket in a new temporary directory, and is
stopped with SIGTERM, so that it drains and gives its memory back. It never outlives us: if we are killed and cannot
stop it, it stops itself (leash.py).
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvhold_client.channels import TLS_VARIABLES
from kvhold_client.leash import leashed
from kvhold_client.target import TARGET_VARIABLE

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02
LOG_TAIL_LINES = 12


class DaemonFailed(RuntimeError):
    """It did not start; the text ends with what it said."""


class LocalDaemon:
    """Starts on entry, stops on exit. `target` is where to connect, `metrics_url` where to scrape."""

    def __init__(self, *flags: str, directory: Path | None = None) -> None:
        """`flags` are flags of `kvhold serve` beyond the socket and the metrics address."""
        self._flags = flags
        self._given_directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.directory = Path()
        self.metrics_url = ""

    @property
    def socket_path(self) -> Path:
        """The unix socket."""
        return self.directory / "kvhold.sock"

    @property
    def target(self) -> str:
        """For `Client`."""
        return f"unix:{self.socket_path}"

    @property
    def pid(self) -> int:
        """Of the daemon's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What it wrote so far."""
        path = self.directory / "daemon.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> "LocalDaemon":
        """Returns when the daemon answers. Raises DaemonFailed."""
        self.directory = self._given_directory or Path(tempfile.mkdtemp(prefix="kvhold-"))
        port = _free_port()
        self.metrics_url = f"http://127.0.0.1:{port}/metrics"
        flags = ["serve", "--socket", str(self.socket_path), "--metrics", f"127.0.0.1:{port}", *self._flags]
        if self._given_directory is None:
            flags.append("--no-keep-pools")  # nobody could come back to a directory that is deleted
        command = leashed("kvhold_server", *flags, remove=None if self._given_directory else self.directory)
        with (self.directory / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=daemon_environment()
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not socket_answers(self.socket_path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(self.log.splitlines()[-LOG_TAIL_LINES:])
                self.stop()
                raise DaemonFailed(f"the daemon did not start ({' '.join(command)}):\n{tail}")
            time.sleep(POLL_S)
        return self

    def stop(self) -> None:
        """Drains it, and kills it if that takes too long. Removes the directory if it was made here."""
        self._end(signal.SIGTERM)
        if self._given_directory is None and self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL, as an out-of-memory killer would; the directory stays, and `start` may follow."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None

    def __enter__(self) -> "LocalDaemon":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


CLIENT_VARIABLES: Sequence[str] = (TARGET_VARIABLE, "KVHOLD_OUTPUT", "KVHOLD_TIMEOUT_S", *TLS_VARIABLES)


def daemon_environment() -> dict[str, str]:
    """The environment without what only the client reads: the daemon refuses settings that it does not know."""
    return {key: value for key, value in os.environ.items() if key not in CLIENT_VARIABLES}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def socket_answers(path: Path) -> bool:
    """Does somebody listen there? A socket file alone says nothing: a killed daemon leaves it behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
