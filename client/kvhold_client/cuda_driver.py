"""The CUDA driver calls that mapping a daemon's device memory takes, behind a protocol so that tests need no GPU."""

import ctypes
import uuid
from typing import Any, Protocol

from kvhold_client.mapping_errors import CudaCallFailed, LibraryMissing, RegionNotMappable

IPC_HANDLE_BYTES = 64


class CudaMapper(Protocol):
    """Every method raises CudaCallFailed. Devices are ordinals as this process, and torch in it, sees them."""

    def device_uuids(self) -> tuple[str, ...]: ...

    def granularity_bytes(self, device: int) -> int: ...

    def reserve_address(self, size_bytes: int, wanted_address: int) -> int:
        """Address space without memory; at `wanted_address` if that is not 0 and the driver can."""

    def free_address(self, address: int, size_bytes: int) -> None: ...

    def import_fd(self, fd: int) -> int:
        """Handle of the memory behind a descriptor, which the caller may then close."""

    def release(self, handle: int) -> None:
        """Lets go of a handle; a mapping of it stays."""

    def map(self, address: int, size_bytes: int, handle: int) -> None: ...

    def set_access(self, device: int, address: int, size_bytes: int, *, read_only: bool) -> None: ...

    def unmap(self, address: int, size_bytes: int) -> None: ...

    def open_ipc(self, device: int, handle: bytes) -> int:
        """Address at which the handle's allocation begins."""

    def close_ipc(self, address: int) -> None: ...


class BindingsMapper:
    """The real driver, through cuda-bindings, in the primary contexts that torch uses, too."""

    def __init__(self) -> None:
        """Raises LibraryMissing, RegionNotMappable where there is no driver."""
        try:
            from cuda.bindings import driver
        except ImportError:
            raise LibraryMissing("cuda-bindings", "kvhold[cuda]") from None
        self._driver = driver
        self._contexts: dict[int, Any] = {}
        try:
            self._call("cuInit", 0)
        except Exception as error:  # the bindings have their own kinds of "no libcuda here"
            raise RegionNotMappable("device region", f"the CUDA driver cannot be loaded: {error}") from error

    def device_uuids(self) -> tuple[str, ...]:
        count = self._call("cuDeviceGetCount")
        return tuple(
            f"GPU-{uuid.UUID(bytes=bytes(self._call('cuDeviceGetUuid', self._device(index)).bytes))}"
            for index in range(count)
        )

    def granularity_bytes(self, device: int) -> int:
        properties = self._driver.CUmemAllocationProp()
        properties.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location(device)
        properties.requestedHandleTypes = self._fd_kind()
        minimum = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", properties, minimum))

    def reserve_address(self, size_bytes: int, wanted_address: int) -> int:
        return int(self._call("cuMemAddressReserve", size_bytes, 0, wanted_address, 0))

    def free_address(self, address: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", address, size_bytes)

    def import_fd(self, fd: int) -> int:
        return int(self._call("cuMemImportFromShareableHandle", fd, self._fd_kind()))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", self._driver.CUmemGenericAllocationHandle(handle))

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        self._call("cuMemMap", address, size_bytes, 0, self._driver.CUmemGenericAllocationHandle(handle), 0)

    def set_access(self, device: int, address: int, size_bytes: int, *, read_only: bool) -> None:
        flags = self._driver.CUmemAccess_flags
        access = self._driver.CUmemAccessDesc()
        access.location = self._location(device)
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READ if read_only else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size_bytes, [access], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", address, size_bytes)

    def open_ipc(self, device: int, handle: bytes) -> int:
        opened = self._driver.CUipcMemHandle()
        ctypes.memmove(int(opened.getPtr()), handle, IPC_HANDLE_BYTES)
        lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        if device not in self._contexts:
            self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", self._device(device))
        self._call("cuCtxPushCurrent", self._contexts[device])
        try:
            return int(self._call("cuIpcOpenMemHandle", opened, lazily.value))
        finally:
            self._call("cuCtxPopCurrent")

    def close_ipc(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    def _location(self, device: int) -> Any:
        location = self._driver.CUmemLocation()
        location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        return location

    def _fd_kind(self) -> Any:
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status):
            raise CudaCallFailed(name, int(status), status.name)
        return results[0] if results else None
