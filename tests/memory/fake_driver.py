"""A CUDA driver made of memfds: every call of both protocols, real descriptors, real mappings, errors by code.

The owner's side (`CudaDriver`) backs each physical allocation by a memfd, so that what it exports is a descriptor
that works in other processes. The worker's side (`FakeMapper`) reserves address space and maps those descriptors into
it, so that a test reads and writes through the very addresses that a GPU would use.
"""

import ctypes
import itertools
import mmap
import os
from collections import Counter, deque

from kvhold_client.mapping_errors import CudaCallFailed
from kvhold_server.memory.cuda_driver import INVALID_DEVICE, INVALID_VALUE, OUT_OF_MEMORY
from kvhold_server.memory.errors import DriverCallFailed

GRANULARITY_BYTES = 1 << 16
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_FIXED_NOREPLACE = 0x100000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Faults:
    """The n-th next call of a name fails with a code."""

    def __init__(self) -> None:
        self._codes: dict[str, deque[int]] = {}
        self.num_calls: Counter[str] = Counter()

    def inject(self, call: str, code: int, *, after: int = 0) -> None:
        self._codes.setdefault(call, deque()).extend([*[0] * after, code])

    def next_code(self, call: str) -> int:
        self.num_calls[call] += 1
        codes = self._codes.get(call)
        return codes.popleft() if codes else 0


class FakeDriver:
    """The owner's side."""

    def __init__(self, *, num_devices: int = 2, device_bytes: int = 1 << 26) -> None:
        self.faults = Faults()
        self.device_bytes = device_bytes
        self.num_devices = num_devices
        self.handles: dict[int, tuple[int, int, int]] = {}  # handle → device, size, fd
        self.addresses: dict[int, tuple[int, int]] = {}  # address → device, size
        self.ipc_capable = True
        self.fds_supported = True
        self.region_offset_bytes = 0  # where in its allocation a pointer lies
        self._ids = itertools.count(1000)

    def held_bytes(self, device: int) -> int:
        return sum(size for owner, size, _ in self.handles.values() if owner == device) + sum(
            size for owner, size in self.addresses.values() if owner == device
        )

    def device_count(self) -> int:
        self._call("cuDeviceGetCount")
        return self.num_devices

    def device_uuid(self, device: int) -> str:
        self._call("cuDeviceGetUuid", device)
        return f"GPU-fake-{device}"

    def total_bytes(self, device: int) -> int:
        self._call("cuDeviceTotalMem", device)
        return self.device_bytes

    def free_bytes(self, device: int) -> int:
        return self.device_bytes - self.held_bytes(device)

    def supports_fds(self, device: int) -> bool:
        self._call("cuDeviceGetAttribute", device)
        return self.fds_supported

    def granularity_bytes(self, device: int) -> int:
        self._call("cuMemGetAllocationGranularity", device)
        return GRANULARITY_BYTES

    def create(self, device: int, size_bytes: int) -> int:
        self._call("cuMemCreate", device)
        if size_bytes % GRANULARITY_BYTES:
            raise DriverCallFailed("cuMemCreate", INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "size")
        self._check_room("cuMemCreate", device, size_bytes)
        fd = os.memfd_create("fake-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        handle = next(self._ids)
        self.handles[handle] = (device, size_bytes, fd)
        return handle

    def export_fd(self, handle: int) -> int:
        self._call("cuMemExportToShareableHandle")
        return os.dup(self.handles[handle][2])

    def release(self, handle: int) -> None:
        _, _, fd = self.handles.pop(handle)
        os.close(fd)
        self._call("cuMemRelease")

    def allocate(self, device: int, size_bytes: int) -> int:
        self._call("cuMemAlloc", device)
        self._check_room("cuMemAlloc", device, size_bytes)
        address = (next(self._ids) << 32) + self.region_offset_bytes
        self.addresses[address] = (device, size_bytes)
        return address

    def free(self, device: int, address: int) -> None:
        self._call("cuMemFree", device)
        del self.addresses[address]

    def allocation_base(self, device: int, address: int) -> int:
        self._call("cuMemGetAddressRange", device)
        return address - self.region_offset_bytes

    def can_export_ipc(self, device: int, address: int) -> bool:
        self._call("cuPointerGetAttribute", device)
        return self.ipc_capable

    def ipc_handle(self, device: int, address: int) -> bytes:
        self._call("cuIpcGetMemHandle", device)
        return f"{address:x}".encode().ljust(64, b"\0")

    def _check_room(self, call: str, device: int, size_bytes: int) -> None:
        if size_bytes > self.free_bytes(device):
            raise DriverCallFailed(call, OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")

    def _call(self, call: str, device: int | None = None) -> None:
        code = self.faults.next_code(call)
        if not code and device is not None and not 0 <= device < self.num_devices:
            code = INVALID_DEVICE
        if code:
            raise DriverCallFailed(call, code, f"CUDA_ERROR_{code}", "injected")


class FakeMapper:
    """The worker's side: the same uuids, perhaps in another order, and real mappings of the descriptors."""

    def __init__(self, uuids: tuple[str, ...] = ("GPU-fake-0", "GPU-fake-1")) -> None:
        self.faults = Faults()
        self.uuids = uuids
        self.reserved: dict[int, int] = {}
        self.imported: dict[int, int] = {}  # handle → fd
        self.mapped: dict[int, int] = {}
        self.access: list[tuple[int, int, int, bool]] = []
        self.opened_ipc: set[int] = set()
        self._ids = itertools.count(1)

    @property
    def holds_nothing(self) -> bool:
        return not (self.reserved or self.imported or self.mapped or self.opened_ipc)

    def device_uuids(self) -> tuple[str, ...]:
        self._call("cuDeviceGetUuid")
        return self.uuids

    def granularity_bytes(self, device: int) -> int:
        self._call("cuMemGetAllocationGranularity")
        return GRANULARITY_BYTES

    def reserve_address(self, size_bytes: int, wanted_address: int) -> int:
        self._call("cuMemAddressReserve")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = -1
        if wanted_address:
            address = _map(wanted_address, size_bytes, _PROT_NONE, flags | _MAP_FIXED_NOREPLACE, -1)
        if address < 0:  # a hint that cannot be had is only a hint
            address = _map(0, size_bytes, _PROT_NONE, flags, -1)
        self.reserved[address] = size_bytes
        return address

    def free_address(self, address: int, size_bytes: int) -> None:
        assert self.reserved.pop(address) == size_bytes
        assert not any(address <= start < address + size_bytes for start in self.mapped), "still mapped"
        _libc.munmap(address, size_bytes)
        self._call("cuMemAddressFree")

    def import_fd(self, fd: int) -> int:
        self._call("cuMemImportFromShareableHandle")
        handle = next(self._ids)
        self.imported[handle] = os.dup(fd)
        return handle

    def release(self, handle: int) -> None:
        os.close(self.imported.pop(handle))
        self._call("cuMemRelease")

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        self._call("cuMemMap")
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        assert _map(address, size_bytes, writable, mmap.MAP_SHARED | _MAP_FIXED, self.imported[handle]) == address
        self.mapped[address] = size_bytes

    def set_access(self, device: int, address: int, size_bytes: int, *, read_only: bool) -> None:
        self._call("cuMemSetAccess")
        self.access.append((device, address, size_bytes, read_only))

    def unmap(self, address: int, size_bytes: int) -> None:
        assert self.mapped.pop(address) == size_bytes
        _map(address, size_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)
        self._call("cuMemUnmap")

    def open_ipc(self, device: int, handle: bytes) -> int:
        self._call("cuIpcOpenMemHandle")
        address = int(handle.rstrip(b"\0"), 16)
        self.opened_ipc.add(address)
        return address

    def close_ipc(self, address: int) -> None:
        self.opened_ipc.remove(address)
        self._call("cuIpcCloseMemHandle")

    def _call(self, call: str) -> None:
        code = self.faults.next_code(call)
        if code:
            raise CudaCallFailed(call, code, f"CUDA_ERROR_{code}")


def _map(address: int, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address or None, size_bytes, protection, flags, fd, 0)
    return -1 if result in (None, 2**64 - 1) else int(result)
