"""The devices that a driver shows: what both CUDA backends say of them."""

from typing import Any

from kvhold_server.memory.backend import BackendHealth, DeviceUsage, MemoryUsage
from kvhold_server.memory.cuda_driver import CudaDriver
from kvhold_server.memory.errors import DriverCallFailed, UnknownDevice
from kvhold_server.memory.region_table import RegionTable


class CudaDevices:
    """Named once, at the start: a device that appears or goes later is ill health."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self.uuids = tuple(driver.device_uuid(device) for device in range(driver.device_count()))

    def check(self, device_index: int) -> None:
        """Raises UnknownDevice."""
        if not 0 <= device_index < len(self.uuids):
            raise UnknownDevice(device_index, len(self.uuids) - 1)

    def health(self) -> BackendHealth:
        """Does the driver answer, and are they all there?"""
        try:
            num_devices = self._driver.device_count()
        except DriverCallFailed as error:
            return BackendHealth(ok=False, detail=str(error))
        return BackendHealth(ok=num_devices == len(self.uuids), detail=f"{num_devices} devices")

    def usage(self, table: RegionTable[Any]) -> MemoryUsage:
        """Memory of each, and what of it the table's regions hold."""
        devices = tuple(
            DeviceUsage(
                device_uuid=uuid,
                total_bytes=self._driver.total_bytes(device),
                free_bytes=self._driver.free_bytes(device),
                held_bytes=table.held_bytes(uuid),
            )
            for device, uuid in enumerate(self.uuids)
        )
        return MemoryUsage(devices=devices, holdings=table.holdings())
