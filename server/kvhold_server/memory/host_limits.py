"""How much host memory may be taken before somebody is killed for it.

Reserving a region touches every page of it, so a region that does not fit is answered here, by a number, and not
later, by the kernel's out-of-memory killer. Three limits hold at once: the machine's MemAvailable, the control
group's (v2) headroom, and for named memory the file system's size.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from kvhold_server.memory.backend import Holding, describe_holders
from kvhold_server.memory.errors import HostMemoryTooSmall, ShmTooSmall


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Where to read the limits; other paths serve tests and chroots."""

    meminfo: Path = Path("/proc/meminfo")
    cgroup: Path = Path("/sys/fs/cgroup")

    def mem_total_bytes(self) -> int:
        return self._meminfo_bytes("MemTotal")

    def mem_available_bytes(self) -> int:
        return self._meminfo_bytes("MemAvailable")

    def cgroup_headroom_bytes(self) -> int | None:
        """memory.max − memory.current + what the kernel can drop at once; None without a limit."""
        limit = self._read(self.cgroup / "memory.max")
        current = self._read(self.cgroup / "memory.current")
        if not limit.isdigit() or not current.isdigit():  # "max", or no v2 controller here
            return None
        droppable = self._stat_bytes("inactive_file") + self._stat_bytes("active_file")
        return max(0, int(limit) - int(current) + droppable)

    def free_bytes(self) -> int:
        """The tighter of machine and control group."""
        headroom = self.cgroup_headroom_bytes()
        available = self.mem_available_bytes()
        return available if headroom is None else min(available, headroom)

    def check(self, requested_bytes: int, holdings: tuple[Holding, ...]) -> None:
        """Raises HostMemoryTooSmall naming the limit that binds and who holds what."""
        holders = describe_holders(holdings)
        headroom = self.cgroup_headroom_bytes()
        if headroom is not None and headroom < requested_bytes:
            raise HostMemoryTooSmall(str(self.cgroup / "memory.max"), headroom, requested_bytes, holders)
        available = self.mem_available_bytes()
        if available < requested_bytes:
            raise HostMemoryTooSmall("MemAvailable", available, requested_bytes, holders)

    def _meminfo_bytes(self, field: str) -> int:
        for line in self._read(self.meminfo).splitlines():
            name, _, rest = line.partition(":")
            if name == field:
                return int(rest.split()[0]) * 1024
        return 0

    def _stat_bytes(self, field: str) -> int:
        for line in self._read(self.cgroup / "memory.stat").splitlines():
            name, _, rest = line.partition(" ")
            if name == field:
                return int(rest)
        return 0

    @staticmethod
    def _read(path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:
            return ""


def check_file_system(directory: Path, requested_bytes: int) -> None:
    """Raises ShmTooSmall when the mount cannot hold the file."""
    stat = os.statvfs(directory)
    free_bytes = stat.f_bavail * stat.f_frsize
    if free_bytes < requested_bytes:
        raise ShmTooSmall(str(directory), stat.f_blocks * stat.f_frsize, free_bytes, requested_bytes)
