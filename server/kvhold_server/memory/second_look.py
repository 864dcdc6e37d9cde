"""A second process that looks whether a large table's records are whole, while this one fills a pool from them.

    daemon      begin ──▶ reads records, fills the pool ────────▶ verdict ──▶ believes, or drops what is torn
    second        └─────▶ checksums, order of use ─▶ memory file ───┘

A million records take each side most of a second. The second one only reads, and is not needed: without it (no process
to be had, too slow, killed) the daemon looks for itself.
"""

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Final

from kvhold_server.memory.block_table_header import RECORDS_OFFSET, read_header
from kvhold_server.memory.mapped_file import MappedFile
from kvhold_server.memory.table_records import RecordReader, Verdict

MIN_BLOCKS: Final = 200_000  # below, starting a process costs more than it saves
TIMEOUT_S: Final = 10.0
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kvhold_server.memory.second_look import look; look(sys.argv[2], int(sys.argv[3]))"
)


class SecondLook:
    """One look at one table. `verdict` ends it."""

    def __init__(self, process: "subprocess.Popen[bytes]", fd: int) -> None:
        """Use `begin`."""
        self.problem = ""  # why there was no verdict
        self._process = process
        self._fd = fd

    @classmethod
    def begin(cls, path: Path, num_blocks: int) -> "SecondLook | None":
        """None where there is nothing to be gained, or no process to be had."""
        if num_blocks < MIN_BLOCKS or len(os.sched_getaffinity(0)) < 2:
            return None
        try:
            fd = os.memfd_create("kvhold.verdict", os.MFD_CLOEXEC)
        except OSError:
            return None
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path), str(path), str(fd)]
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(fd,))
        except OSError:
            os.close(fd)
            return None
        return cls(process, fd)

    def verdict(self) -> Verdict | None:
        """Waits for it. None: the caller must look for itself."""
        try:
            if self._process.wait(TIMEOUT_S) == 0:
                return _unpacked(self._fd)
            self.problem = f"it ended with {self._process.returncode}"
        except ValueError as error:
            self.problem = f"its verdict is not whole: {error}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self.problem = f"it took more than {TIMEOUT_S:g} s"
        finally:
            os.close(self._fd)
        return None


def look(path: str, fd: int) -> None:
    """What the second process does. Whatever goes wrong ends it, and then it has said nothing."""
    file = MappedFile.open(Path(path))
    header = read_header(file.bytes[:RECORDS_OFFSET])
    assert header is not None
    verdict = RecordReader(memoryview(file.bytes), header).verdict()
    words = array("Q", [len(verdict.torn), len(verdict.order), verdict.newest_stamp, *verdict.torn])
    with open(fd, "wb", closefd=False) as out:
        words.tofile(out)
        array("I", verdict.order).tofile(out)


def _unpacked(fd: int) -> Verdict:
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    num_torn, num_order, newest = array("Q", data[:24])
    order_offset = 24 + 8 * num_torn
    order = array("I", data[order_offset:])
    if len(order) != num_order:
        raise ValueError(f"{len(order)} of {num_order} blocks")
    return Verdict(torn=array("Q", data[24:order_offset]).tolist(), order=order.tolist(), newest_stamp=newest)
