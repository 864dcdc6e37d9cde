"""The few CUDA driver calls that owning device memory takes, behind a protocol, so that tests can fail each of them.

`cuMemCreate` and its sisters need `cuInit` and no context: a daemon that only creates, exports and releases costs no
device memory of its own and launches nothing. Only the IPC fallback allocates in a primary context.

Free memory cannot be asked of the driver without a context, so it comes from NVML, where that is installed.
"""

import ctypes
import uuid
from typing import Any, Protocol

from kvhold_server.memory.errors import BackendUnavailable, DriverCallFailed

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
DEINITIALIZED = 4
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
MAP_FAILED = 205
INVALID_HANDLE = 400
NOT_PERMITTED = 800
NOT_SUPPORTED = 801

DRIVER_LIBRARY = "libcuda.so.1"
UNKNOWN_BYTES = -1
IPC_HANDLE_BYTES = 64


class CudaDriver(Protocol):
    """Every method raises DriverCallFailed with the driver's code. Devices are ordinals as this process sees them."""

    def device_count(self) -> int: ...

    def device_uuid(self, device: int) -> str:
        """ "GPU-…", as nvidia-smi prints it."""

    def total_bytes(self, device: int) -> int: ...

    def free_bytes(self, device: int) -> int:
        """What no process uses; UNKNOWN_BYTES without NVML."""

    def supports_fds(self, device: int) -> bool:
        """Can memory of this device be exported as POSIX file descriptors?"""

    def granularity_bytes(self, device: int) -> int: ...

    def create(self, device: int, size_bytes: int) -> int:
        """Physical memory, mapped nowhere; returns its handle."""

    def export_fd(self, handle: int) -> int:
        """A new descriptor that the caller closes."""

    def release(self, handle: int) -> None: ...

    def allocate(self, device: int, size_bytes: int) -> int:
        """Address of memory mapped in this process, for legacy IPC."""

    def free(self, device: int, address: int) -> None: ...

    def allocation_base(self, device: int, address: int) -> int:
        """Where the allocation begins that holds the address: what a handle for it opens at."""

    def can_export_ipc(self, device: int, address: int) -> bool:
        """False for memory of the virtual-memory API, which accepts the export and breaks later."""

    def ipc_handle(self, device: int, address: int) -> bytes: ...


class BindingsDriver:
    """The real driver, through cuda-bindings."""

    def __init__(self, backend: str) -> None:
        """Raises BackendUnavailable where there is no binding, no driver or no device."""
        check_driver_library(backend)  # quicker than importing the bindings in order to hear the same
        try:
            from cuda.bindings import driver
        except ImportError:
            raise BackendUnavailable(backend, "cuda-bindings is not installed: pip install 'kvhold[cuda]'") from None
        self._driver = driver
        self._contexts: dict[int, Any] = {}
        try:
            self._call("cuInit", 0)
            num_devices = self.device_count()
        except DriverCallFailed as error:
            raise BackendUnavailable(backend, str(error)) from error
        except Exception as error:  # the bindings' own kinds of "no libcuda here"
            raise BackendUnavailable(backend, f"the CUDA driver cannot be loaded: {error}") from error
        if num_devices == 0:
            raise BackendUnavailable(backend, "the CUDA driver sees no device")

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def device_uuid(self, device: int) -> str:
        raw = self._call("cuDeviceGetUuid", self._device(device)).bytes
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    def total_bytes(self, device: int) -> int:
        return int(self._call("cuDeviceTotalMem", self._device(device)))

    def free_bytes(self, device: int) -> int:
        try:
            from cuda.bindings import nvml

            nvml.init_v2()
            handle = nvml.device_get_handle_by_uuid(self.device_uuid(device).encode())
            return int(nvml.device_get_memory_info_v2(handle).free)
        except Exception:  # not installed, not loadable, or forbidden in this container: nobody can say
            return UNKNOWN_BYTES

    def supports_fds(self, device: int) -> bool:
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        return bool(self._call("cuDeviceGetAttribute", attribute, self._device(device)))

    def granularity_bytes(self, device: int) -> int:
        minimum = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(device), minimum))

    def create(self, device: int, size_bytes: int) -> int:
        return int(self._call("cuMemCreate", size_bytes, self._properties(device), 0))

    def export_fd(self, handle: int) -> int:
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(self._call("cuMemExportToShareableHandle", self._handle(handle), kind, 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", self._handle(handle))

    def allocate(self, device: int, size_bytes: int) -> int:
        with self._primary_context(device):
            address = int(self._call("cuMemAlloc", size_bytes))
            self._call("cuMemsetD8", address, 0, size_bytes)
            self._call("cuCtxSynchronize")
            return address

    def free(self, device: int, address: int) -> None:
        with self._primary_context(device):
            self._call("cuMemFree", address)

    def allocation_base(self, device: int, address: int) -> int:
        with self._primary_context(device):
            return int(self._call("cuMemGetAddressRange", address)[0])

    def can_export_ipc(self, device: int, address: int) -> bool:
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        with self._primary_context(device):
            return bool(self._call("cuPointerGetAttribute", attribute, address))

    def ipc_handle(self, device: int, address: int) -> bytes:
        with self._primary_context(device):
            handle = self._call("cuIpcGetMemHandle", address)
            return ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_BYTES)

    def _primary_context(self, device: int) -> "_PrimaryContext":
        """Retained once, until the process ends: its memory lives as long as it does."""
        if device not in self._contexts:
            self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", self._device(device))
        return _PrimaryContext(self, self._contexts[device])

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    def _handle(self, handle: int) -> Any:
        return self._driver.CUmemGenericAllocationHandle(handle)

    def _properties(self, device: int) -> Any:
        properties = self._driver.CUmemAllocationProp()
        properties.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        properties.requestedHandleTypes = (
            self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        return properties

    def _call(self, name: str, *arguments: Any) -> Any:
        """The call's one result, a tuple of several, or None."""
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != SUCCESS:
            _, text = self._driver.cuGetErrorString(status)
            meaning = text.decode() if isinstance(text, bytes) else ""
            raise DriverCallFailed(name, int(status), status.name, meaning)
        if len(results) <= 1:
            return results[0] if results else None
        return tuple(results)


def check_driver_library(backend: str) -> None:
    """Raises BackendUnavailable on a machine without the NVIDIA driver."""
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        raise BackendUnavailable(backend, f"the CUDA driver cannot be loaded: {error}") from error


class _PrimaryContext:
    """The device's primary context, current in this thread for the length of a block."""

    def __init__(self, driver: BindingsDriver, context: Any) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        self._driver._call("cuCtxPushCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        self._driver._call("cuCtxPopCurrent")
