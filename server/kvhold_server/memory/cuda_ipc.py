"""Device memory as legacy CUDA IPC handles: the fallback where descriptors cannot be exported.

The driver allocates in a primary context of the daemon and gives out 64 bytes that another process opens. Memory
handles meet in the driver and need no /dev/shm; we export no event handles, which would. Its limits, against
`cuda_vmm`:

* the daemon holds a CUDA context: some hundred MiB on every device that it uses;
* the memory dies with the daemon: a worker that still maps it reads garbage or faults, so a restart is always FRESH;
* no resize, and no read-only mapping;
* exporter and importer must see the same GPU, and the daemon cannot open its own handle.
"""

from dataclasses import dataclass

from kvhold_server.memory.backend import (
    BackendHealth,
    ExportedRegion,
    ExportKind,
    MemoryBackend,
    MemoryUsage,
    Region,
    RegionRequest,
    check_on_device,
    check_request,
    round_up,
)
from kvhold_server.memory.cuda_devices import CudaDevices
from kvhold_server.memory.cuda_driver import CudaDriver
from kvhold_server.memory.cuda_errors import creating, exporting
from kvhold_server.memory.errors import ExportNotPossible
from kvhold_server.memory.region_table import RegionTable

GRANULARITY_BYTES = 2 << 20  # a handle opens whole 2 MiB pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Where the driver put it, in our address space."""

    address: int


class CudaIpcBackend(MemoryBackend):
    """All devices that the driver shows us."""

    name = "cuda_ipc"

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._table: RegionTable[Allocation] = RegionTable()
        self._devices = CudaDevices(driver)

    def granularity_bytes(self, device_index: int) -> int:
        self._devices.check(device_index)
        return GRANULARITY_BYTES

    def reserve(self, request: RegionRequest) -> Region:
        check_request(request)
        check_on_device(request)
        device = request.device_index
        size_bytes = round_up(request.size_bytes, self.granularity_bytes(device))
        with self._table.claim(request.region_id):
            with creating(self._driver, device, self._devices.uuids[device], size_bytes, self._table.holdings()):
                address = self._driver.allocate(device, size_bytes)
            region = Region(
                id=request.region_id,
                pool=request.pool,
                rank=request.rank,
                device_index=device,
                host=request.host,
                requested_bytes=request.size_bytes,
                size_bytes=size_bytes,
                device_uuid=self._devices.uuids[device],
            )
            return self._table.publish(region, Allocation(address=address))

    def export(self, region: Region) -> ExportedRegion:
        """Refuses memory that legacy handles cannot carry, at the door."""
        held = self._table.get(region.id)
        device, address = held.region.device_index, held.memory.address
        with exporting(held.region.id, "ipc_handle"):
            if not self._driver.can_export_ipc(device, address):
                raise ExportNotPossible(held.region.id, "ipc_handle", "it is memory of the virtual-memory API")
            handle = self._driver.ipc_handle(device, address)
            offset_bytes = address - self._driver.allocation_base(device, address)
        return ExportedRegion(
            region_id=held.region.id,
            kind=ExportKind.IPC_HANDLE,
            size_bytes=held.region.size_bytes,
            device_uuid=held.region.device_uuid,
            handle=handle,
            offset_bytes=offset_bytes,
        )

    def release(self, region: Region) -> None:
        held = self._table.take(region.id)
        self._driver.free(held.region.device_index, held.memory.address)

    def health(self) -> BackendHealth:
        return self._devices.health()

    def usage(self) -> MemoryUsage:
        return self._devices.usage(self._table)

    def close(self, *, keep: bool = False) -> None:
        for held in self._table.all():
            self.release(held.region)
