"""Device memory through the driver's virtual-memory API: physical chunks that the daemon owns and never maps.

    region of rank 0    ┌────────────┬────────────┬──────┐
                        │  chunk 0   │  chunk 1   │  2   │   cuMemCreate each; the last one may be smaller
                        └────────────┴────────────┴──────┘
    export              fd           fd           fd         cuMemExportToShareableHandle, over SCM_RIGHTS
    worker              ├── one reserved address range ──┤   cuMemImportFromShareableHandle, cuMemMap

A chunk is the unit of growing and shrinking: what stays keeps its chunks, so nothing moves. Whoever has imported a
chunk keeps its memory alive, so a worker survives the daemon; and a holder process that keeps descriptors can outlive
an RPC process. The workers' containers need the socket's directory and the same GPU, found by its uuid, and no host
namespace.

The driver does not enforce read-only exports: a worker that maps read-only does so of its own will.
"""

import os
from collections.abc import Iterator
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
from kvhold_server.memory.errors import BackendUnavailable, DriverCallFailed, InvalidRegionRequest
from kvhold_server.memory.region_table import Held, RegionTable

DEFAULT_CHUNK_BYTES = 1 << 30
MAX_CHUNKS = 4096  # descriptors that one export opens


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One physical allocation."""

    handle: int
    size_bytes: int


class CudaVmmBackend(MemoryBackend):
    """All devices that the driver shows us."""

    name = "cuda_vmm"

    def __init__(self, driver: CudaDriver, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        """Raises BackendUnavailable where a device cannot export descriptors."""
        assert chunk_bytes > 0
        self._driver = driver
        self._chunk_bytes = chunk_bytes
        self._table: RegionTable[tuple[Chunk, ...]] = RegionTable()
        self._devices = CudaDevices(driver)
        for device, uuid in enumerate(self._devices.uuids):
            if not driver.supports_fds(device):
                raise BackendUnavailable(self.name, f"{uuid} cannot export memory as file descriptors; use cuda_ipc")

    def granularity_bytes(self, device_index: int) -> int:
        self._devices.check(device_index)
        return self._driver.granularity_bytes(device_index)

    def reserve(self, request: RegionRequest) -> Region:
        check_request(request)
        check_on_device(request)
        size_bytes = round_up(request.size_bytes, self.granularity_bytes(request.device_index))
        with self._table.claim(request.region_id):
            chunks = self._create(request.device_index, size_bytes)
            region = Region(
                id=request.region_id,
                pool=request.pool,
                rank=request.rank,
                device_index=request.device_index,
                host=request.host,
                requested_bytes=request.size_bytes,
                size_bytes=size_bytes,
                device_uuid=self._devices.uuids[request.device_index],
            )
            return self._table.publish(region, chunks)

    def export(self, region: Region) -> ExportedRegion:
        held = self._table.get(region.id)
        return ExportedRegion(
            region_id=held.region.id,
            kind=ExportKind.FD,
            size_bytes=held.region.size_bytes,
            device_uuid=held.region.device_uuid,
            chunk_sizes_bytes=tuple(chunk.size_bytes for chunk in held.memory),
        )

    def open_fds(self, region: Region, *, read_only: bool = False) -> tuple[int, ...]:
        held = self._table.get(region.id)
        fds: list[int] = []
        try:
            with exporting(held.region.id, "fd"):
                for chunk in held.memory:
                    fds.append(self._driver.export_fd(chunk.handle))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return tuple(fds)

    def resize(self, region: Region, size_bytes: int) -> Region:
        """By whole chunks at the tail, one resize of a region at a time. Drain the blocks of a tail before it goes."""
        held = self._table.get(region.id)
        if size_bytes < 1:
            raise InvalidRegionRequest("size_bytes", size_bytes, "must be at least 1")
        if size_bytes > held.region.size_bytes:
            return self._grow(held, size_bytes)
        return self._shrink(held, size_bytes)

    def release(self, region: Region) -> None:
        self._release_chunks(self._table.take(region.id).memory)

    def health(self) -> BackendHealth:
        return self._devices.health()

    def usage(self) -> MemoryUsage:
        return self._devices.usage(self._table)

    def close(self, *, keep: bool = False) -> None:
        """The memory goes with the last of us and of those who imported it."""
        for held in self._table.all():
            self.release(held.region)

    def _create(self, device: int, size_bytes: int) -> tuple[Chunk, ...]:
        """All chunks or none: what was made is released in reverse order before an error leaves."""
        chunk_bytes = round_up(self._chunk_bytes, self._driver.granularity_bytes(device))
        if -(-size_bytes // chunk_bytes) > MAX_CHUNKS:
            raise InvalidRegionRequest("size_bytes", size_bytes, f"must be at most {MAX_CHUNKS * chunk_bytes}")
        chunks: list[Chunk] = []
        with creating(self._driver, device, self._devices.uuids[device], size_bytes, self._table.holdings()):
            try:
                for size in _chunk_sizes(size_bytes, chunk_bytes):
                    chunks.append(Chunk(handle=self._driver.create(device, size), size_bytes=size))
            except BaseException:  # undone first, so that the error's free bytes are those of the next try
                self._release_chunks(tuple(chunks))
                raise
        return tuple(chunks)

    def _grow(self, held: Held[tuple[Chunk, ...]], size_bytes: int) -> Region:
        device = held.region.device_index
        target_bytes = round_up(size_bytes, self._driver.granularity_bytes(device))
        added = self._create(device, target_bytes - held.region.size_bytes)
        return self._table.replace(_resized(held.region, target_bytes), (*held.memory, *added))

    def _shrink(self, held: Held[tuple[Chunk, ...]], size_bytes: int) -> Region:
        kept: list[Chunk] = []
        kept_bytes = 0
        for chunk in held.memory:
            if kept_bytes >= size_bytes:
                break
            kept.append(chunk)
            kept_bytes += chunk.size_bytes
        region = self._table.replace(_resized(held.region, kept_bytes), tuple(kept))
        self._release_chunks(held.memory[len(kept) :])
        return region

    def _release_chunks(self, chunks: tuple[Chunk, ...]) -> None:
        """Tries them all, and raises the first failure."""
        failure: DriverCallFailed | None = None
        for chunk in reversed(chunks):
            try:
                self._driver.release(chunk.handle)
            except DriverCallFailed as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _chunk_sizes(size_bytes: int, chunk_bytes: int) -> Iterator[int]:
    for start in range(0, size_bytes, chunk_bytes):
        yield min(chunk_bytes, size_bytes - start)


def _resized(region: Region, size_bytes: int) -> Region:
    return Region(
        id=region.id,
        pool=region.pool,
        rank=region.rank,
        device_index=region.device_index,
        host=region.host,
        requested_bytes=size_bytes,
        size_bytes=size_bytes,
        device_uuid=region.device_uuid,
    )
