"""Host memory without a name: memfd, handed out by descriptor only.

Needs no /dev/shm mount, no common uid and no common namespace, and takes the same way to its clients as CUDA memory
does: SCM_RIGHTS over the fd channel. The region is sealed against growing and shrinking, so that no client can
truncate it under the others. It lives as long as somebody has it open or mapped: a restart of the daemon starts
FRESH.
"""

import fcntl
import os
from dataclasses import dataclass, field

from kvhold_server.memory.backend import (
    HOST_DEVICE_UUID,
    BackendHealth,
    DeviceUsage,
    ExportedRegion,
    ExportKind,
    MemoryBackend,
    MemoryUsage,
    Region,
    RegionRequest,
    check_request,
    round_up,
)
from kvhold_server.memory.errors import BackendUnavailable
from kvhold_server.memory.host_limits import HostLimits
from kvhold_server.memory.host_pages import HostPageOptions, HugePages, Pin, allocate, huge_page_bytes
from kvhold_server.memory.posix_shm import host_region, reopen, system_call_failed
from kvhold_server.memory.region_table import RegionTable

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(slots=True, kw_only=True)
class _File:
    fd: int
    pin: Pin


@dataclass(frozen=True, slots=True, kw_only=True)
class MemfdOptions:
    """How pages are made."""

    pages: HostPageOptions = field(default_factory=HostPageOptions)
    limits: HostLimits = field(default_factory=HostLimits)


class MemfdBackend(MemoryBackend):
    """Anonymous host memory."""

    name = "memfd"

    def __init__(self, options: MemfdOptions | None = None) -> None:
        """Raises BackendUnavailable, HugePagesUnavailable."""
        if not hasattr(os, "memfd_create"):
            raise BackendUnavailable(self.name, "this system has no memfd_create")
        self._options = options or MemfdOptions()
        self._granularity_bytes = huge_page_bytes(self._options.pages.huge_pages)
        self._table: RegionTable[_File] = RegionTable()

    def granularity_bytes(self, device_index: int) -> int:
        return self._granularity_bytes

    def reserve(self, request: RegionRequest) -> Region:
        check_request(request)
        size_bytes = round_up(request.size_bytes, self._granularity_bytes)
        with self._table.claim(request.region_id):
            if self._options.pages.huge_pages is not HugePages.EXPLICIT:  # those are set aside already
                self._options.limits.check(size_bytes, self._table.holdings())
            file = self._create(request, size_bytes)
            return self._table.publish(host_region(request, size_bytes), file)

    def export(self, region: Region) -> ExportedRegion:
        held = self._table.get(region.id)
        return ExportedRegion(
            region_id=held.region.id,
            kind=ExportKind.FD,
            size_bytes=held.region.size_bytes,
            device_uuid=HOST_DEVICE_UUID,
            chunk_sizes_bytes=(held.region.size_bytes,),
        )

    def open_fds(self, region: Region, *, read_only: bool = False) -> tuple[int, ...]:
        return (reopen(self._table.get(region.id).memory.fd, read_only=read_only),)

    def release(self, region: Region) -> None:
        file = self._table.take(region.id).memory
        file.pin.close()
        os.close(file.fd)

    def health(self) -> BackendHealth:
        return BackendHealth(ok=True, detail=f"{len(self._table.all())} anonymous regions")

    def usage(self) -> MemoryUsage:
        device = DeviceUsage(
            device_uuid=HOST_DEVICE_UUID,
            total_bytes=self._options.limits.mem_total_bytes(),
            free_bytes=self._options.limits.free_bytes(),
            held_bytes=self._table.held_bytes(HOST_DEVICE_UUID),
        )
        return MemoryUsage(devices=(device,), holdings=self._table.holdings())

    def close(self, *, keep: bool = False) -> None:
        """Nothing can be kept: the memory has no name."""
        for held in self._table.all():
            self.release(held.region)

    def _create(self, request: RegionRequest, size_bytes: int) -> _File:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if self._options.pages.huge_pages is HugePages.EXPLICIT:
            flags |= os.MFD_HUGETLB
        name = f"kvhold-{request.region_id}"[:200]
        try:
            fd = os.memfd_create(name, flags)
        except OSError as error:
            raise system_call_failed("memfd_create", name, error) from error
        try:
            pin = allocate(fd, name, size_bytes, self._options.pages)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return _File(fd=fd, pin=pin)
