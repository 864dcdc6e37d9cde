"""Runs a module as a process that ends when its parent does, however the parent ends: `python -m kvhold_client.leash`.

    parent ── holds a pipe's one end ──▶ child's standard input ──▶ end of file
                                                                      │
    it is closed by the kernel with the parent, SIGKILL included      ▼
                                          SIGTERM to ourselves … SIGTERM again (a daemon stops waiting) … SIGKILL

The module runs in this very process, as `python -m MODULE` would: signals and the process id are its own. A pipe and
not PR_SET_PDEATHSIG, because that one means the *thread* that started us, and threads end earlier. It only wakes us
here, in case that somebody stopped us.

Whoever starts one: `Popen(leashed("kvhold_server", "serve"), stdin=PIPE)`, and keeps the Popen. Processes that it forks
without exec have the pipe's end, too, and must be over before the child ends.
"""

import atexit
import contextlib
import ctypes
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PAUSE_S = 5.0  # between one signal and the next
REMOVE = "--remove"
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 4096


def leashed(module: str, *arguments: str, remove: Path | None = None) -> list[str]:
    """The command for `python -m module arguments`. `remove`: a directory that goes if the parent cannot see to it."""
    options = [REMOVE, str(remove)] if remove is not None else []
    return [sys.executable, "-m", __spec__.name if __spec__ else __name__, *options, module, *arguments]


def hold(remove: Path | None = None) -> None:
    """Begins to watch standard input: this process ends soon after its end.

    With something to remove, SIGTERM ends it like an exception until the module has a handler of its own.
    """
    if remove is not None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere a stopped process stays
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    threading.Thread(target=_wait_and_end, args=(remove,), name="leash", daemon=True).start()


def _wait_and_end(remove: Path | None) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, _READ_BYTES):
            pass
    if remove is not None:
        atexit.register(shutil.rmtree, remove, ignore_errors=True)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PAUSE_S)
    if remove is not None:
        shutil.rmtree(remove, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Runs `[--remove DIR] MODULE ARGUMENT…`."""
    rest = list(arguments)
    remove = None
    if rest[:1] == [REMOVE]:
        remove = Path(rest[1])
        del rest[:2]
    if not rest:
        sys.exit("usage: python -m kvhold_client.leash [--remove DIR] MODULE [ARGUMENT…]")
    hold(remove)
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
