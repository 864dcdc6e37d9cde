"""Mapping device memory: chunks in one address range, the right device, and undoing every half-done mapping."""

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvhold_client.cuda_memory import DeviceMemory, map_device_region
from kvhold_client.host_memory import RegionExport
from kvhold_client.mapping_errors import (
    ChannelRefused,
    CudaCallFailed,
    DeviceNotVisible,
    LibraryMissing,
    MappingInUse,
    RegionNotMappable,
)
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.memory.cuda_ipc import CudaIpcBackend
from kvhold_server.memory.cuda_vmm import CudaVmmBackend
from kvhold_server.rpc.fd_channel import FdChannel, OpenedRegion
from kvhold_server.rpc.fd_tokens import FdGrant
from tests.memory.fake_driver import GRANULARITY_BYTES, FakeDriver, FakeMapper

CHUNK = 2 * GRANULARITY_BYTES
GRANT = FdGrant(owner="", pool=PoolName("m"), rank=1)


class Daemon:
    """A rank on device 1, in three chunks."""

    def __init__(self, directory: Path) -> None:
        self.driver = FakeDriver()
        self.backend = CudaVmmBackend(self.driver, chunk_bytes=CHUNK)
        self.region = self.backend.reserve(
            RegionRequest(pool=PoolName("m"), rank=1, device_index=1, size_bytes=5 * GRANULARITY_BYTES)
        )
        self.num_gone = 0
        self.channel = FdChannel(
            directory / "fd.sock", open_region=self._open, on_peer_mapped=lambda _: None, on_peer_gone=self._gone
        )

    def _open(self, grant: FdGrant) -> OpenedRegion:
        return OpenedRegion(exported=self.backend.export(self.region), fds=self.backend.open_fds(self.region))

    def _gone(self, _: object) -> None:
        self.num_gone += 1

    def export(self) -> RegionExport:
        exported = self.backend.export(self.region)
        return RegionExport(
            size_bytes=exported.size_bytes,
            fd_socket_path=str(self.channel.path),
            fd_token=self.channel.issue(GRANT),
            device_uuid=exported.device_uuid,
            chunk_sizes_bytes=exported.chunk_sizes_bytes,
        )

    async def map(self, mapper: FakeMapper, **how: int) -> DeviceMemory:
        export = self.export()
        return await asyncio.to_thread(lambda: map_device_region(export, mapper, read_only=False, **how))


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(tmp_path)
    await daemon.channel.start()
    yield daemon
    await daemon.channel.close()
    daemon.backend.close()
    assert daemon.driver.handles == {}


async def test_chunks_form_one_range_that_two_processes_could_share(daemon: Daemon) -> None:
    mapper, other = FakeMapper(), FakeMapper()
    first, second = await daemon.map(mapper), await daemon.map(other)
    content = os.urandom(first.size_bytes)
    ctypes.memmove(first.address, content, len(content))
    assert ctypes.string_at(second.address, len(content)) == content
    assert mapper.imported == {}  # handles are not needed once mapped
    for memory in (first, second):
        await asyncio.to_thread(memory.close)
    assert mapper.holds_nothing and other.holds_nothing


async def test_the_device_is_found_by_uuid_in_any_order(daemon: Daemon) -> None:
    mapper = FakeMapper(uuids=("GPU-fake-1", "GPU-fake-7", "GPU-fake-0"))
    memory = await daemon.map(mapper)
    assert memory.device == 0
    assert mapper.access == [(0, memory.address, memory.size_bytes, False)]
    await asyncio.to_thread(memory.close)


@pytest.mark.parametrize("visible", [(), ("GPU-fake-0",)])
async def test_a_device_that_is_not_visible_is_named(daemon: Daemon, visible: tuple[str, ...]) -> None:
    """K8S-03: claims with void visible-devices fail fast, by uuid."""
    with pytest.raises(DeviceNotVisible) as caught:
        await daemon.map(FakeMapper(uuids=visible))
    assert caught.value.device_uuid == "GPU-fake-1"


MAPPING_CALLS = (
    "cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap",
    "cuMemRelease", "cuMemSetAccess",
)  # fmt: skip


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("call", MAPPING_CALLS)
async def test_a_failure_anywhere_undoes_everything(daemon: Daemon, call: str, after: int) -> None:
    mapper = FakeMapper()
    mapper.faults.inject(call, 2, after=after)
    fds = len(os.listdir("/proc/self/fd"))
    try:
        memory = await daemon.map(mapper)
    except CudaCallFailed as error:
        assert error.call == call
        assert mapper.holds_nothing or call == "cuMemRelease"
        await _until(lambda: daemon.num_gone == 1)
        await _until(lambda: len(os.listdir("/proc/self/fd")) <= fds)
    else:
        await asyncio.to_thread(memory.close)
        assert mapper.faults.num_calls[call] <= after, "the fault was swallowed"


async def _until(condition: object) -> None:
    for _ in range(400):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


async def test_remapping_at_the_same_address_after_the_daemon_was_replaced(daemon: Daemon) -> None:
    mapper = FakeMapper()
    memory = await daemon.map(mapper)
    address = memory.address
    await asyncio.to_thread(memory.close)
    again = await daemon.map(mapper, wanted_address=address)
    assert again.address == address
    with pytest.raises(RegionNotMappable):  # taken: nothing is mapped elsewhere in its stead
        await daemon.map(mapper, wanted_address=address)
    await asyncio.to_thread(again.close)
    assert mapper.holds_nothing


async def test_a_living_pointer_keeps_the_memory(daemon: Daemon) -> None:
    mapper = FakeMapper()
    memory = await daemon.map(mapper)
    pointer = memory.pointer()
    with pytest.raises(MappingInUse):
        await asyncio.to_thread(memory.close)
    assert pointer.__cuda_array_interface__["data"] == (memory.address, False)
    del pointer
    await asyncio.to_thread(memory.close)
    await _until(lambda: daemon.num_gone == 1)


async def test_a_used_token_maps_nothing(daemon: Daemon) -> None:
    mapper = FakeMapper()
    export = daemon.export()
    memory = await asyncio.to_thread(lambda: map_device_region(export, mapper, read_only=True))
    assert mapper.access[-1][3] is True
    await asyncio.to_thread(memory.close)
    with pytest.raises(ChannelRefused):
        await asyncio.to_thread(lambda: map_device_region(export, mapper, read_only=False))
    assert mapper.holds_nothing


def test_an_ipc_handle_opens_at_its_base_and_the_region_lies_behind_it() -> None:
    """DMN-12."""
    driver = FakeDriver()
    driver.region_offset_bytes = 1 << 20
    backend = CudaIpcBackend(driver)
    exported = backend.export(backend.reserve(RegionRequest(pool=PoolName("m"), rank=0, size_bytes=100)))
    export = RegionExport(
        size_bytes=exported.size_bytes,
        ipc_handle=exported.handle,
        ipc_offset_bytes=exported.offset_bytes,
        device_uuid=exported.device_uuid,
    )
    mapper = FakeMapper()
    memory = map_device_region(export, mapper, read_only=False)
    (base,) = mapper.opened_ipc
    assert memory.address == base + (1 << 20)
    memory.close()
    assert mapper.holds_nothing


def test_numpy_cannot_view_device_memory(tmp_path: Path) -> None:
    memory = DeviceMemory(FakeMapper(), device=0, address=1 << 30, size_bytes=64, label="x", chunks=(), lease=None)
    with pytest.raises((RegionNotMappable, LibraryMissing)):
        memory.make_views("numpy")
