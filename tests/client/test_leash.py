"""Processes that are started for a while end with whoever started them, however that one ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvhold_client.leash import leashed

SLEEPER = "import sys, time; print(sys.argv, flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
PARENT = """
import os, subprocess, sys, threading, time
from kvhold_client.leash import leashed
def start():
    child = subprocess.Popen(leashed("sleeper", "--flag"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
    children.append(child)
children = []
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(60)
"""
DAEMON_PARENT = """
import time
from kvhold_client.local_daemon import LocalDaemon
with LocalDaemon() as daemon:
    print(daemon.pid, daemon.directory, flush=True)
    time.sleep(60)
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def is_gone(pid: int) -> bool:
    """Ended; a zombie that nobody has waited for has, too."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_until(what: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()


def start(code: str, directory: Path) -> "tuple[subprocess.Popen[str], list[str]]":
    """A parent, and the words of its first line."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, process.stdout.readline().split()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_child_ends_with_its_parent_and_not_with_the_thread_that_started_it(
    tmp_path: Path, number: signal.Signals, is_stopped: bool
) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    parent, (pid,) = start(PARENT, tmp_path)
    try:
        time.sleep(0.3)
        assert not is_gone(int(pid)), "the thread is over, the parent is not"
        if is_stopped:
            os.kill(int(pid), signal.SIGSTOP)
    finally:
        parent.send_signal(number)
        parent.wait()
    assert wait_until(lambda: is_gone(int(pid)), 5)


def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeper.py").write_text(STUBBORN)
    code = "import kvhold_client.leash as l; l.PAUSE_S = 0.2; l.main(['--remove', 'goes', 'sleeper'])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    (tmp_path / "goes").mkdir()
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as child:  # type: ignore[call-overload]
        child.stdout.readline()
        child.stdin.close()
        assert child.wait(timeout=5) == -signal.SIGKILL
    assert not (tmp_path / "goes").exists()


def test_what_is_to_be_removed_goes_even_if_the_module_does_not_know_the_signal(tmp_path: Path) -> None:
    """A daemon whose parent is killed while it starts: it answers already and has no handler yet."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    (tmp_path / "goes").mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = leashed("sleeper", remove=tmp_path / "goes")
    with subprocess.Popen(command, env=environment, **pipes) as child:  # type: ignore[call-overload]
        child.stdout.readline()
        child.stdin.close()
        assert child.wait(timeout=5) == 128 + signal.SIGTERM
    assert not (tmp_path / "goes").exists()


def test_a_module_runs_as_it_would_by_itself(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(7)")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = leashed("sleeper", "--flag", "x", remove=tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout.read() == "__main__ ['--flag', 'x']\n"
        assert child.wait(timeout=5) == 7
    assert (tmp_path / "kept").exists(), "its parent is there and sees to it"


def test_a_local_daemon_and_its_directory_go_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent, (pid, directory) = start(DAEMON_PARENT, tmp_path)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: is_gone(int(pid)), 15)
    assert not Path(directory).exists()
