"""Maps device regions: descriptors of the virtual-memory API into one address range, or a legacy IPC handle.

    address range     ├───────────┼───────────┼─────┤      reserved once
    chunks            │ import,   │ import,   │ …   │      each mapped behind the one before
                      │ map       │ map       │     │

A failure undoes what was done, in reverse order. A mapping keeps its memory alive without the daemon.
"""

import os
import weakref

from kvhold_client.cuda_driver import CudaMapper
from kvhold_client.fd_client import MappingLease, ReceivedRegion, fetch_region
from kvhold_client.host_memory import RegionExport
from kvhold_client.mapping_errors import DeviceNotVisible, MappingInUse, RegionNotMappable
from kvhold_client.torch_views import DevicePointer, TorchViews


class DeviceMemory:
    """A mapped device region of this process's device `device`."""

    def __init__(
        self,
        driver: CudaMapper,
        *,
        device: int,
        address: int,
        size_bytes: int,
        label: str,
        chunks: tuple[int, ...],
        lease: MappingLease | None,
        ipc_base: int = 0,
        read_only: bool = False,
    ) -> None:
        self.device = device
        self.address = address
        self.size_bytes = size_bytes
        self.read_only = read_only
        self._driver = driver
        self._label = label
        self._chunks = chunks  # sizes of what is mapped, in order of address
        self._lease = lease
        self._ipc_base = ipc_base
        self._pointer: weakref.ref[DevicePointer] | None = None

    def make_views(self, library: str) -> TorchViews:
        """What makes tensors of these bytes. Raises LibraryMissing, RegionNotMappable."""
        if library == "numpy":
            raise RegionNotMappable(self._label, "numpy cannot view device memory; use torch")
        return TorchViews(self.pointer(), f"cuda:{self.device}")

    def pointer(self) -> DevicePointer:
        """For torch, whose tensors keep it alive: so we know when the last of them has gone."""
        pointer = DevicePointer(self.address, self.size_bytes, read_only=self.read_only)
        self._pointer = weakref.ref(pointer)
        return pointer

    def close(self) -> None:
        """Unmaps, then tells the daemon. Raises MappingInUse, changing nothing, while a tensor is alive."""
        if self._pointer is not None and self._pointer() is not None:
            raise MappingInUse(self._label)
        if self._ipc_base:
            self._driver.close_ipc(self._ipc_base)
            self._ipc_base = 0
        _unmap_chunks(self._driver, self.address, self._chunks)
        if self._chunks:
            self._driver.free_address(self.address, sum(self._chunks))
            self._chunks = ()
        if self._lease is not None:
            self._lease.unmapped()
            self._lease = None


def map_device_region(
    export: RegionExport, driver: CudaMapper, *, read_only: bool, wanted_address: int = 0
) -> DeviceMemory:
    """Maps a region on whichever of our devices has its uuid. Attaching writes nothing (R11).

    `wanted_address`: where an earlier mapping lay, so that captured graphs stay valid after a daemon was replaced; the
    driver may not give it, and then RegionNotMappable is raised. Raises DeviceNotVisible, CudaCallFailed, and the
    channel's errors.
    """
    device = device_with_uuid(export.device_uuid, driver.device_uuids())
    if export.ipc_handle:
        base = driver.open_ipc(device, export.ipc_handle)
        return DeviceMemory(
            driver,
            device=device,
            address=base + export.ipc_offset_bytes,
            size_bytes=export.size_bytes,
            label=export.label,
            chunks=(),
            lease=None,
            ipc_base=base,
        )
    received = fetch_region(export.fd_socket_path, export.fd_token)
    try:
        return _map_received(export, driver, device, received, read_only=read_only, wanted_address=wanted_address)
    except BaseException:
        received.lease.unmapped()
        raise
    finally:
        for fd in received.fds:
            os.close(fd)


def device_with_uuid(uuid: str, visible: tuple[str, ...]) -> int:
    """Our ordinal of the device; CUDA_VISIBLE_DEVICES may number and order devices differently in every process."""
    if uuid not in visible:
        raise DeviceNotVisible(uuid, ", ".join(visible) or "no GPU")
    return visible.index(uuid)


def _map_received(
    export: RegionExport,
    driver: CudaMapper,
    device: int,
    received: ReceivedRegion,
    *,
    read_only: bool,
    wanted_address: int,
) -> DeviceMemory:
    granularity = driver.granularity_bytes(device)
    if any(size % granularity for size in received.chunk_sizes_bytes):
        raise RegionNotMappable(export.label, f"its chunks are no multiples of our granularity of {granularity} bytes")
    address = driver.reserve_address(received.size_bytes, wanted_address)
    mapped: list[int] = []
    try:
        if wanted_address and address != wanted_address:
            raise RegionNotMappable(export.label, f"the driver gave address {address:#x}, not {wanted_address:#x}")
        for fd, size in zip(received.fds, received.chunk_sizes_bytes, strict=True):
            handle = driver.import_fd(fd)
            try:
                driver.map(address + sum(mapped), size, handle)
                mapped.append(size)
            finally:
                driver.release(handle)
        driver.set_access(device, address, received.size_bytes, read_only=read_only or received.read_only)
    except BaseException:
        _unmap_chunks(driver, address, tuple(mapped))
        driver.free_address(address, received.size_bytes)
        raise
    return DeviceMemory(
        driver,
        device=device,
        address=address,
        size_bytes=received.size_bytes,
        label=export.label,
        chunks=tuple(mapped),
        lease=received.lease,
        read_only=read_only or received.read_only,
    )


def _unmap_chunks(driver: CudaMapper, address: int, sizes: tuple[int, ...]) -> None:
    end = address + sum(sizes)
    for size in reversed(sizes):
        end -= size
        driver.unmap(end, size)
