"""Our use of cuda-bindings: its real types and call signatures, over a driver that is not there.

The package imports without a GPU. Its functions are replaced by ones that check what they are given with the
package's own types and pass on to the fake driver, so that a wrong argument, order or enumeration is found on a
laptop.
"""

import ctypes
import os
from typing import Any

import pytest

from kvhold_client.cuda_driver import BindingsMapper
from kvhold_client.mapping_errors import CudaCallFailed, RegionNotMappable
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory import cuda_driver
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.memory.cuda_driver import OUT_OF_MEMORY, BindingsDriver
from kvhold_server.memory.cuda_ipc import CudaIpcBackend
from kvhold_server.memory.cuda_vmm import CudaVmmBackend
from kvhold_server.memory.errors import BackendUnavailable, DriverCallFailed, OutOfDeviceMemory
from tests.memory.fake_driver import GRANULARITY_BYTES, FakeDriver, FakeMapper

cuda = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: pip install 'kvhold[cuda]'")

CHUNK = 2 * GRANULARITY_BYTES
FD_KIND = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
SMALLEST = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
ON_DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE


class FakeLibrary:
    """libcuda's functions with the package's calling convention: a tuple that begins with a CUresult."""

    def __init__(self) -> None:
        self.owner = FakeDriver()
        self.worker = FakeMapper()
        self.contexts: list[int] = []
        self.retained = 0
        self.filled: list[tuple[int, int, int]] = []

    def cuInit(self, flags: int) -> None:
        assert flags == 0

    def cuDeviceGetCount(self) -> int:
        return self.owner.device_count()

    def cuDeviceGet(self, ordinal: int) -> Any:
        assert 0 <= ordinal < self.owner.num_devices
        return cuda.CUdevice(ordinal)

    def cuDeviceGetUuid(self, device: Any) -> Any:
        assert isinstance(device, cuda.CUdevice)
        uuid = cuda.CUuuid()
        ctypes.memmove(int(uuid.getPtr()), bytes([int(device)] * 16), 16)
        return uuid

    def cuDeviceTotalMem(self, device: Any) -> int:
        return self.owner.total_bytes(int(device))

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> int:
        assert attribute == cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        return int(self.owner.supports_fds(int(device)))

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> int:
        assert option == SMALLEST
        return self.owner.granularity_bytes(self._device_of(properties))

    def cuMemCreate(self, size_bytes: int, properties: Any, flags: int) -> Any:
        assert flags == 0
        return cuda.CUmemGenericAllocationHandle(self.owner.create(self._device_of(properties), size_bytes))

    def cuMemExportToShareableHandle(self, handle: Any, kind: Any, flags: int) -> int:
        assert isinstance(handle, cuda.CUmemGenericAllocationHandle) and kind == FD_KIND and flags == 0
        return self.owner.export_fd(int(handle))

    def cuMemRelease(self, handle: Any) -> None:
        side = self.owner if int(handle) in self.owner.handles else self.worker
        side.release(int(handle))

    def cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> Any:
        assert kind == FD_KIND
        return cuda.CUmemGenericAllocationHandle(self.worker.import_fd(fd))

    def cuMemAddressReserve(self, size_bytes: int, alignment: int, address: int, flags: int) -> Any:
        assert alignment == 0 and flags == 0
        return cuda.CUdeviceptr(self.worker.reserve_address(size_bytes, address))

    def cuMemMap(self, address: int, size_bytes: int, offset: int, handle: Any, flags: int) -> None:
        assert offset == 0 and flags == 0
        self.worker.map(address, size_bytes, int(handle))

    def cuMemSetAccess(self, address: int, size_bytes: int, access: list[Any], count: int) -> None:
        assert count == len(access) == 1 and access[0].location.type == ON_DEVICE
        read_only = access[0].flags == cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self.worker.set_access(access[0].location.id, address, size_bytes, read_only=read_only)

    def cuMemUnmap(self, address: int, size_bytes: int) -> None:
        self.worker.unmap(address, size_bytes)

    def cuMemAddressFree(self, address: int, size_bytes: int) -> None:
        self.worker.free_address(address, size_bytes)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        self.retained += 1
        return cuda.CUcontext(int(device) + 1)

    def cuCtxPushCurrent(self, context: Any) -> None:
        self.contexts.append(int(context) - 1)

    def cuCtxPopCurrent(self) -> Any:
        return cuda.CUcontext(self.contexts.pop() + 1)

    def cuCtxSynchronize(self) -> None:
        assert self.contexts

    def cuMemAlloc(self, size_bytes: int) -> Any:
        return cuda.CUdeviceptr(self.owner.allocate(self.contexts[-1], size_bytes))

    def cuMemsetD8(self, address: int, value: int, size_bytes: int) -> None:
        self.filled.append((address, value, size_bytes))

    def cuMemFree(self, address: int) -> None:
        self.owner.free(self.contexts[-1], address)

    def cuMemGetAddressRange(self, address: int) -> Any:
        return cuda.CUdeviceptr(self.owner.allocation_base(self.contexts[-1], address)), 1 << 20

    def cuPointerGetAttribute(self, attribute: Any, address: int) -> bool:
        assert attribute == cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        return self.owner.can_export_ipc(self.contexts[-1], address)

    def cuIpcGetMemHandle(self, address: int) -> Any:
        handle = cuda.CUipcMemHandle()
        ctypes.memmove(int(handle.getPtr()), self.owner.ipc_handle(self.contexts[-1], address), 64)
        return handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:
        assert flags == cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        raw = ctypes.string_at(int(handle.getPtr()), 64)
        return cuda.CUdeviceptr(self.worker.open_ipc(self.contexts[-1], raw))

    def cuIpcCloseMemHandle(self, address: int) -> None:
        self.worker.close_ipc(address)

    @staticmethod
    def _device_of(properties: Any) -> int:
        assert properties.type == cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        assert properties.location.type == ON_DEVICE
        assert properties.requestedHandleTypes == FD_KIND
        return int(properties.location.id)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    library = FakeLibrary()

    def convention(function: Any) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            try:
                result = function(*arguments)
            except (DriverCallFailed, CudaCallFailed) as error:
                code = getattr(error, "error_code", None) or error.code
                return (cuda.CUresult(code), *([None] if function.__name__ != "cuInit" else []))
            success = cuda.CUresult.CUDA_SUCCESS
            if result is None:
                return (success,)
            return (success, *result) if isinstance(result, tuple) else (success, result)

        return call

    for name in (name for name in dir(FakeLibrary) if name.startswith("cu")):
        monkeypatch.setattr(cuda, name, convention(getattr(library, name)))
    monkeypatch.setattr(cuda_driver, "DRIVER_LIBRARY", None)  # this very process
    monkeypatch.setattr(cuda, "cuGetErrorString", lambda status: (cuda.CUresult.CUDA_SUCCESS, b"a reason"))
    return library


def ask(device: int = 1) -> RegionRequest:
    return RegionRequest(pool=PoolName("m"), rank=0, device_index=device, size_bytes=2 * CHUNK + 1)


def test_virtual_memory_goes_from_owner_to_worker_through_the_real_types(library: FakeLibrary) -> None:
    backend = CudaVmmBackend(BindingsDriver("cuda_vmm"), chunk_bytes=CHUNK)
    region = backend.reserve(ask())
    assert region.device_uuid == "GPU-01010101-0101-0101-0101-010101010101"
    assert {device for device, _, _ in library.owner.handles.values()} == {1}
    assert library.retained == 0, "owning needs no context"
    fds = backend.open_fds(region)
    mapper = BindingsMapper()
    assert mapper.device_uuids().index(region.device_uuid) == 1
    assert mapper.granularity_bytes(1) == GRANULARITY_BYTES
    address = mapper.reserve_address(region.size_bytes, 0)
    start = address
    for fd in fds:
        size = os.fstat(fd).st_size
        handle = mapper.import_fd(fd)
        mapper.map(start, size, handle)
        mapper.release(handle)
        os.close(fd)
        start += size
    mapper.set_access(1, address, region.size_bytes, read_only=True)
    assert library.worker.access == [(1, address, region.size_bytes, True)]
    ctypes.memset(address, 7, region.size_bytes)
    for fd in backend.open_fds(region):
        assert set(os.pread(fd, 1 << 20, 0)) == {7}
        os.close(fd)
    for end, size in ((start, GRANULARITY_BYTES), (start - GRANULARITY_BYTES, CHUNK), (address + CHUNK, CHUNK)):
        mapper.unmap(end - size, size)
    mapper.free_address(address, region.size_bytes)
    backend.close()
    assert library.worker.holds_nothing and library.owner.handles == {}


def test_ipc_handles_keep_their_64_bytes_and_contexts_are_put_back(library: FakeLibrary) -> None:
    library.owner.region_offset_bytes = 4096
    backend = CudaIpcBackend(BindingsDriver("cuda_ipc"))
    region = backend.reserve(ask())
    assert [(value, size) for _, value, size in library.filled] == [(0, region.size_bytes)]
    exported = backend.export(region)
    assert (len(exported.handle), exported.offset_bytes) == (64, 4096)
    mapper = BindingsMapper()
    address = mapper.open_ipc(1, exported.handle)
    assert address == next(iter(library.owner.addresses))
    mapper.close_ipc(address)
    backend.close()
    assert library.owner.addresses == {} and library.contexts == []
    assert library.retained == 2, "once by the owner, once by the worker"


def test_failures_carry_call_code_name_and_meaning(library: FakeLibrary) -> None:
    driver = BindingsDriver("cuda_vmm")
    library.owner.faults.inject("cuMemCreate", OUT_OF_MEMORY)
    with pytest.raises(DriverCallFailed) as caught:
        driver.create(0, GRANULARITY_BYTES)
    assert caught.value.fields() == {
        "call": "cuMemCreate", "code": 2, "name": "CUDA_ERROR_OUT_OF_MEMORY", "meaning": "a reason",
    }  # fmt: skip
    library.owner.faults.inject("cuMemCreate", OUT_OF_MEMORY)
    with pytest.raises(OutOfDeviceMemory) as full:
        CudaVmmBackend(driver).reserve(ask())
    assert full.value.total_bytes == library.owner.device_bytes
    library.worker.faults.inject("cuMemMap", 999)
    mapper = BindingsMapper()
    address = mapper.reserve_address(GRANULARITY_BYTES, 0)
    fd = os.memfd_create("x")
    os.ftruncate(fd, GRANULARITY_BYTES)
    handle = mapper.import_fd(fd)
    with pytest.raises(CudaCallFailed) as failed:
        mapper.map(address, GRANULARITY_BYTES, handle)
    assert (failed.value.call, failed.value.error_code, failed.value.name) == ("cuMemMap", 999, "CUDA_ERROR_UNKNOWN")
    os.close(fd)
    mapper.release(handle)
    mapper.free_address(address, GRANULARITY_BYTES)


def test_no_device_and_no_library_are_told_apart(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    library.owner.num_devices = 0
    with pytest.raises(BackendUnavailable) as caught:
        BindingsDriver("cuda_vmm")
    assert "no device" in str(caught.value)

    def missing(flags: int) -> None:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda, "cuInit", missing)
    with pytest.raises(BackendUnavailable) as caught:
        BindingsDriver("cuda_vmm")
    assert "libcuda" in str(caught.value)
    with pytest.raises(RegionNotMappable):
        BindingsMapper()
    monkeypatch.setattr(cuda_driver, "DRIVER_LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(BackendUnavailable) as caught:
        BindingsDriver("cuda_vmm")
    assert "libcuda-that-is-not-there" in str(caught.value)
