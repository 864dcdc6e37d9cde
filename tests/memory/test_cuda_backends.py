"""The CUDA backends against a driver that can fail every call, with every code that the driver documents for it."""

import os
from pathlib import Path

import pytest

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory import cuda_driver as codes
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.memory.cuda_errors import DeviceLost
from kvhold_server.memory.cuda_ipc import CudaIpcBackend
from kvhold_server.memory.cuda_vmm import CudaVmmBackend
from kvhold_server.memory.errors import (
    BackendUnavailable,
    DriverCallFailed,
    ExportNotPossible,
    InvalidRegionRequest,
    OutOfDeviceMemory,
    UnknownDevice,
)
from tests.memory.fake_driver import GRANULARITY_BYTES, FakeDriver

CHUNK = 4 * GRANULARITY_BYTES
COMMON = (codes.NOT_INITIALIZED, codes.DEINITIALIZED, codes.INVALID_VALUE, codes.NOT_PERMITTED, codes.NOT_SUPPORTED)


def ask(chunks: float = 2.5, *, rank: int = 0, device: int = 0) -> RegionRequest:
    return RegionRequest(pool=PoolName("m"), rank=rank, device_index=device, size_bytes=int(chunks * CHUNK))


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def vmm(driver: FakeDriver) -> CudaVmmBackend:
    return CudaVmmBackend(driver, chunk_bytes=CHUNK)


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


CREATING = {
    codes.OUT_OF_MEMORY: OutOfDeviceMemory,
    codes.INVALID_DEVICE: DeviceLost,
    codes.NOT_INITIALIZED: DeviceLost,
    codes.DEINITIALIZED: DeviceLost,
    codes.NOT_PERMITTED: BackendUnavailable,
    codes.NOT_SUPPORTED: BackendUnavailable,
    codes.INVALID_VALUE: DriverCallFailed,
    999: DriverCallFailed,
}
EXPORTING = {
    codes.NOT_INITIALIZED: DeviceLost,
    codes.DEINITIALIZED: DeviceLost,
    codes.NOT_PERMITTED: ExportNotPossible,
    codes.NOT_SUPPORTED: ExportNotPossible,
    codes.INVALID_VALUE: DriverCallFailed,
}


@pytest.mark.parametrize("fail_at", [0, 1, 2])
@pytest.mark.parametrize(("code", "expected"), CREATING.items())
def test_a_failed_chunk_undoes_the_others(
    driver: FakeDriver, vmm: CudaVmmBackend, code: int, expected: type[KvholdError], fail_at: int
) -> None:
    """DMN-11: creating the third of three physical planes fails; nothing stays, and trying again works."""
    fds = num_open_fds()
    driver.faults.inject("cuMemCreate", code, after=fail_at)
    with pytest.raises(expected):
        vmm.reserve(ask())
    assert driver.handles == {}
    assert num_open_fds() == fds
    assert vmm.usage().holdings == ()
    assert vmm.reserve(ask()).size_bytes == int(2.5 * CHUNK)


@pytest.mark.parametrize("fail_at", [0, 2])
@pytest.mark.parametrize(("code", "expected"), EXPORTING.items())
def test_a_failed_export_closes_the_descriptors_it_had(
    driver: FakeDriver, vmm: CudaVmmBackend, code: int, expected: type[KvholdError], fail_at: int
) -> None:
    region = vmm.reserve(ask())
    fds = num_open_fds()
    driver.faults.inject("cuMemExportToShareableHandle", code, after=fail_at)
    with pytest.raises(expected):
        vmm.open_fds(region)
    assert num_open_fds() == fds
    for fd in vmm.open_fds(region):
        os.close(fd)


@pytest.mark.parametrize("code", COMMON)
def test_a_failed_release_tries_the_rest_and_says_so(driver: FakeDriver, vmm: CudaVmmBackend, code: int) -> None:
    region = vmm.reserve(ask())
    driver.faults.inject("cuMemRelease", code)
    with pytest.raises(DriverCallFailed) as caught:
        vmm.release(region)
    assert (caught.value.call, caught.value.code) == ("cuMemRelease", code)
    assert driver.handles == {}
    assert vmm.usage().holdings == ()


@pytest.mark.parametrize("call", ["cuMemGetAllocationGranularity"])
@pytest.mark.parametrize("code", COMMON)
def test_a_failed_question_reserves_nothing(driver: FakeDriver, vmm: CudaVmmBackend, call: str, code: int) -> None:
    driver.faults.inject(call, code)
    with pytest.raises(DriverCallFailed):
        vmm.reserve(ask())
    assert driver.handles == {}


@pytest.mark.parametrize("call", ["cuDeviceGetCount", "cuDeviceGetUuid", "cuDeviceGetAttribute"])
def test_a_driver_that_fails_at_start_makes_no_backend(driver: FakeDriver, call: str) -> None:
    driver.faults.inject(call, codes.NOT_INITIALIZED)
    with pytest.raises(DriverCallFailed):
        CudaVmmBackend(driver)


def test_out_of_memory_says_how_much_is_free_and_who_holds_the_rest(driver: FakeDriver, vmm: CudaVmmBackend) -> None:
    vmm.reserve(ask(rank=3))
    vmm.reserve(ask(rank=4, device=1))
    with pytest.raises(OutOfDeviceMemory) as caught:
        vmm.reserve(ask(driver.device_bytes / CHUNK))
    assert caught.value.free_bytes == driver.device_bytes - int(2.5 * CHUNK)
    assert caught.value.holders == f"pool m rank 3: {int(2.5 * CHUNK)} bytes"
    assert caught.value.device == "GPU-fake-0"


def test_a_device_without_descriptors_is_told_at_start(driver: FakeDriver) -> None:
    driver.fds_supported = False
    with pytest.raises(BackendUnavailable) as caught:
        CudaVmmBackend(driver)
    assert "cuda_ipc" in str(caught.value)


def test_each_rank_gets_its_own_device_and_its_uuid(driver: FakeDriver, vmm: CudaVmmBackend) -> None:
    regions = [vmm.reserve(ask(rank=rank, device=rank)) for rank in range(2)]
    assert [region.device_uuid for region in regions] == ["GPU-fake-0", "GPU-fake-1"]
    assert [vmm.export(region).device_uuid for region in regions] == ["GPU-fake-0", "GPU-fake-1"]
    with pytest.raises(UnknownDevice):
        vmm.reserve(ask(rank=2, device=2))


def test_growing_keeps_every_chunk_where_it_is(driver: FakeDriver, vmm: CudaVmmBackend) -> None:
    region = vmm.reserve(ask(2))
    before = list(driver.handles)
    grown = vmm.resize(region, 5 * CHUNK - 1)
    assert grown.size_bytes == 5 * CHUNK
    assert list(driver.handles)[:2] == before
    assert vmm.export(grown).chunk_sizes_bytes == (CHUNK,) * 5
    assert vmm.usage().holdings[0].size_bytes == 5 * CHUNK


def test_shrinking_drops_whole_chunks_at_the_tail(driver: FakeDriver, vmm: CudaVmmBackend) -> None:
    region = vmm.reserve(ask(4))
    before = list(driver.handles)
    shrunk = vmm.resize(region, CHUNK + 1)
    assert shrunk.size_bytes == 2 * CHUNK
    assert list(driver.handles) == before[:2]
    assert driver.held_bytes(0) == 2 * CHUNK
    with pytest.raises(InvalidRegionRequest):
        vmm.resize(shrunk, 0)
    vmm.release(shrunk)
    assert driver.handles == {}


def test_a_failed_growth_leaves_the_region_as_it_was(driver: FakeDriver, vmm: CudaVmmBackend) -> None:
    region = vmm.reserve(ask(2))
    before = dict(driver.handles)
    driver.faults.inject("cuMemCreate", codes.OUT_OF_MEMORY, after=1)
    with pytest.raises(OutOfDeviceMemory):
        vmm.resize(region, 5 * CHUNK)
    assert driver.handles == before
    assert vmm.export(region).size_bytes == 2 * CHUNK


def test_a_lost_driver_is_ill_health_and_nothing_else_is(driver: FakeDriver, vmm: CudaVmmBackend) -> None:
    vmm.reserve(ask(driver.device_bytes / CHUNK))  # full is not ill
    assert vmm.health().ok
    driver.faults.inject("cuDeviceGetCount", codes.DEINITIALIZED)
    assert not vmm.health().ok
    driver.num_devices = 1
    assert not vmm.health().ok


def test_an_ipc_export_carries_the_offset_inside_its_allocation(driver: FakeDriver) -> None:
    """DMN-12: a handle opens at the allocation's base, not at the tensor."""
    driver.region_offset_bytes = 1 << 20
    backend = CudaIpcBackend(driver)
    exported = backend.export(backend.reserve(ask()))
    assert exported.offset_bytes == 1 << 20
    assert len(exported.handle) == 64


def test_memory_of_the_other_api_is_refused_at_export(driver: FakeDriver) -> None:
    """DMN-13: the driver accepts a legacy export of virtual-memory allocations and breaks later."""
    backend = CudaIpcBackend(driver)
    region = backend.reserve(ask())
    driver.ipc_capable = False
    with pytest.raises(ExportNotPossible):
        backend.export(region)
    assert driver.faults.num_calls["cuIpcGetMemHandle"] == 0


@pytest.mark.parametrize(("code", "expected"), CREATING.items())
def test_a_failed_ipc_allocation_is_typed(driver: FakeDriver, code: int, expected: type[KvholdError]) -> None:
    backend = CudaIpcBackend(driver)
    driver.faults.inject("cuMemAlloc", code)
    with pytest.raises(expected):
        backend.reserve(ask())
    assert driver.addresses == {}
    backend.reserve(ask())


@pytest.mark.parametrize("call", ["cuIpcGetMemHandle", "cuPointerGetAttribute", "cuMemGetAddressRange"])
@pytest.mark.parametrize("code", [codes.INVALID_HANDLE, codes.INVALID_CONTEXT, codes.MAP_FAILED, codes.OUT_OF_MEMORY])
def test_a_failed_ipc_export_is_typed_and_changes_nothing(driver: FakeDriver, call: str, code: int) -> None:
    backend = CudaIpcBackend(driver)
    region = backend.reserve(ask())
    driver.faults.inject(call, code)
    with pytest.raises(DriverCallFailed) as caught:
        backend.export(region)
    assert (caught.value.call, caught.value.code) == (call, code)
    assert backend.export(region).handle
    backend.release(region)
    assert driver.addresses == {}


def test_a_machine_without_the_bindings_or_driver_says_what_is_missing() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a CUDA driver")
    with pytest.raises(BackendUnavailable) as caught:
        codes.BindingsDriver("cuda_vmm")
    assert "kvhold[cuda]" in str(caught.value) or "driver" in str(caught.value)
