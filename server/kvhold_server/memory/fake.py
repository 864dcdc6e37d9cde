"""A backend that only counts: for tests of everything above it, and for dry runs of a daemon.

It keeps the same books and answers the same errors as a real one; the bytes themselves do not exist, so its export
cannot be mapped. Faults are injected by call: the n-th next call of a name raises what the test says.
"""

from collections import Counter, deque

from kvhold_server.domain.errors import KvholdError
from kvhold_server.memory.backend import (
    BackendHealth,
    DeviceUsage,
    ExportedRegion,
    ExportKind,
    MemoryBackend,
    MemoryUsage,
    Region,
    RegionRequest,
    check_request,
    describe_holders,
    round_up,
)
from kvhold_server.memory.errors import DriverCallFailed, OutOfDeviceMemory, UnknownDevice
from kvhold_server.memory.region_table import RegionTable


class FakeBackend(MemoryBackend):
    """`num_devices` devices of `device_bytes` each."""

    name = "fake"

    def __init__(self, *, num_devices: int = 1, device_bytes: int = 1 << 40, granularity_bytes: int = 1 << 21) -> None:
        assert num_devices > 0 and device_bytes > 0 and granularity_bytes > 0
        self._num_devices = num_devices
        self._device_bytes = device_bytes
        self._granularity_bytes = granularity_bytes
        self._table: RegionTable[None] = RegionTable()
        self._faults: dict[str, deque[KvholdError | None]] = {}
        self.num_calls: Counter[str] = Counter()

    def inject(self, call: str, fault: KvholdError, *, after: int = 0) -> None:
        """The call after `after` more successful ones of this method raises `fault`, once."""
        self._faults.setdefault(call, deque()).extend([*[None] * after, fault])

    def inject_code(self, call: str, code: int, *, after: int = 0) -> None:
        """As `inject`, with a driver's error code."""
        self.inject(call, DriverCallFailed(call, code, f"CUDA_ERROR_{code}", "injected"), after=after)

    def granularity_bytes(self, device_index: int) -> int:
        self._uuid(device_index)
        return self._granularity_bytes

    def reserve(self, request: RegionRequest) -> Region:
        check_request(request)
        uuid = self._uuid(request.device_index)
        size_bytes = round_up(request.size_bytes, self._granularity_bytes)
        with self._table.claim(request.region_id):
            self._called("reserve")
            self._check_room(uuid, size_bytes)
            region = Region(
                id=request.region_id,
                pool=request.pool,
                rank=request.rank,
                device_index=request.device_index,
                host=request.host,
                requested_bytes=request.size_bytes,
                size_bytes=size_bytes,
                device_uuid=uuid,
            )
            return self._table.publish(region, None)

    def export(self, region: Region) -> ExportedRegion:
        held = self._table.get(region.id)
        self._called("export")
        return ExportedRegion(
            region_id=held.region.id,
            kind=ExportKind.OPAQUE,
            size_bytes=held.region.size_bytes,
            device_uuid=held.region.device_uuid,
        )

    def release(self, region: Region) -> None:
        self._table.get(region.id)
        self._called("release")
        self._table.take(region.id)

    def health(self) -> BackendHealth:
        self._called("health")
        return BackendHealth(ok=True, detail=f"{len(self._table.all())} imaginary regions")

    def usage(self) -> MemoryUsage:
        devices = []
        for index in range(self._num_devices):
            held_bytes = self._table.held_bytes(self._uuid(index))
            devices.append(
                DeviceUsage(
                    device_uuid=self._uuid(index),
                    total_bytes=self._device_bytes,
                    free_bytes=self._device_bytes - held_bytes,
                    held_bytes=held_bytes,
                )
            )
        return MemoryUsage(devices=tuple(devices), holdings=self._table.holdings())

    def close(self, *, keep: bool = False) -> None:
        for held in self._table.all():
            self._table.take(held.region.id)

    def _uuid(self, device_index: int) -> str:
        if not 0 <= device_index < self._num_devices:
            raise UnknownDevice(device_index, self._num_devices - 1)
        return f"fake-{device_index}"

    def _check_room(self, uuid: str, size_bytes: int) -> None:
        free_bytes = self._device_bytes - self._table.held_bytes(uuid)
        if size_bytes > free_bytes:
            holders = describe_holders(tuple(h for h in self._table.holdings() if h.device_uuid == uuid))
            raise OutOfDeviceMemory(uuid, size_bytes, free_bytes, self._device_bytes, holders)

    def _called(self, call: str) -> None:
        self.num_calls[call] += 1
        faults = self._faults.get(call)
        fault = faults.popleft() if faults else None
        if fault is not None:
            raise fault
