"""A device backend whose pools may have host-resident parts: those go to a host backend beside it.

request.host = False ──▶ device backend
request.host = True  ──▶ host backend, which also serves pools of its own and reports their use
"""

from kvhold_server.memory.backend import (
    BackendHealth,
    ExportedRegion,
    MemoryBackend,
    MemoryUsage,
    ReclaimReport,
    Region,
    RegionRequest,
)


class DeviceWithHost(MemoryBackend):
    """Goes by the device backend's name. Closing it closes the device backend only: the host backend is shared."""

    def __init__(self, device: MemoryBackend, host: MemoryBackend) -> None:
        self.name = device.name
        self._device = device
        self._host = host
        self.keeps_regions = device.keeps_regions and host.keeps_regions

    def granularity_bytes(self, device_index: int) -> int:
        return self._device.granularity_bytes(device_index)

    def reserve(self, request: RegionRequest) -> Region:
        return self._of(host=request.host).reserve(request)

    def export(self, region: Region) -> ExportedRegion:
        return self._of(host=region.host).export(region)

    def open_fds(self, region: Region, *, read_only: bool = False) -> tuple[int, ...]:
        return self._of(host=region.host).open_fds(region, read_only=read_only)

    def release(self, region: Region) -> None:
        self._of(host=region.host).release(region)

    def resize(self, region: Region, size_bytes: int) -> Region:
        return self._of(host=region.host).resize(region, size_bytes)

    def list_existing(self) -> tuple[Region, ...]:
        on_host = (region for region in self._host.list_existing() if region.host)
        return (*self._device.list_existing(), *on_host)

    def adopt(self, region: Region) -> Region:
        return self._of(host=region.host).adopt(region)

    def reclaim_stale(self) -> ReclaimReport:
        """Of the devices; the host backend is asked by itself."""
        return self._device.reclaim_stale()

    def health(self) -> BackendHealth:
        device, host = self._device.health(), self._host.health()
        return BackendHealth(ok=device.ok and host.ok, detail=f"{device.detail}; {host.detail}")

    def usage(self) -> MemoryUsage:
        """Of the devices; the host backend reports its own."""
        return self._device.usage()

    def close(self, *, keep: bool = False) -> None:
        self._device.close(keep=keep)

    def _of(self, *, host: bool) -> MemoryBackend:
        return self._host if host else self._device
