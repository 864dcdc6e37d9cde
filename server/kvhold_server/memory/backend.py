"""What a memory backend answers, whatever kind of memory it hands out.

A *region* is the memory of one rank of one pool (or of its host-resident part). The life of a region:

    reserve ──▶ HELD ──▶ export / open_fds, any number of times ──▶ release
                 ▲
    list_existing ──▶ adopt        (named memory that outlived the daemon that made it)

Calls are synchronous and may be slow (a driver call, gigabytes being zeroed): run `reserve`, `resize` and `release`
in a thread, see `reservation.py`. They may overlap: a backend guards its table, and never across a slow call. A call
that fails leaves nothing behind: whatever it had made is undone in reverse order before the error leaves.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.errors import ExportNotPossible, InvalidRegionRequest, ResizeUnsupported, UnknownRegion

RegionId = NewType("RegionId", str)

MAX_REGION_BYTES = 1 << 47  # a user-space address is 47 bits: more could not be mapped by anyone
MAX_RANKS = 4096
HOST_DEVICE_UUID = "host"


class ExportKind(Enum):
    """How another process gets at a region's bytes. The value is the word on the wire."""

    SHM_NAME = "shm_name"  # open the named segment, or take its descriptor from the fd channel
    FD = "fd"  # descriptors, only through the fd channel
    IPC_HANDLE = "ipc_handle"  # 64 bytes for the CUDA driver
    OPAQUE = "opaque"  # cannot be mapped: the fake


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRequest:
    """Memory for one rank of one pool."""

    pool: PoolName
    rank: int
    device_index: int = 0  # ordinal as this daemon sees devices; ignored by host backends
    size_bytes: int
    host: bool = False  # the pool's host-resident part, beside its device part

    @property
    def region_id(self) -> RegionId:
        """Deterministic, so that a restarted daemon asks for the same one."""
        return RegionId(f"{self.pool}/{self.rank}{'/host' if self.host else ''}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Memory that the backend holds."""

    id: RegionId
    pool: PoolName
    rank: int
    device_index: int
    host: bool
    requested_bytes: int  # what the plan needs
    size_bytes: int  # rounded up to the granularity
    device_uuid: str  # which physical device, whatever CUDA_VISIBLE_DEVICES says; HOST_DEVICE_UUID for host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRegion:
    """How to map a region; holds no descriptor (see `open_fds`) and may be sent over a wire.

    The region's byte 0 lies `offset_bytes` after the start of what the handle names: an IPC handle opens at the start
    of the driver's allocation, wherever in it the region lies.
    """

    region_id: RegionId
    kind: ExportKind
    size_bytes: int
    device_uuid: str
    offset_bytes: int = 0
    shm_name: str = ""  # SHM_NAME: for shm_open, without the leading slash
    handle: bytes = b""  # IPC_HANDLE
    chunk_sizes_bytes: tuple[int, ...] = ()  # FD, SHM_NAME: one per descriptor, in address order; sums to size_bytes

    @property
    def has_fds(self) -> bool:
        return bool(self.chunk_sizes_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One line of who holds what."""

    region_id: RegionId
    pool: PoolName
    rank: int
    device_uuid: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """One device's memory. `free_bytes` counts what all processes use, -1 where nobody can say."""

    device_uuid: str
    total_bytes: int
    free_bytes: int
    held_bytes: int  # by this backend


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """All devices that the backend can see, and every region it holds."""

    devices: tuple[DeviceUsage, ...]
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendHealth:
    """Whether the next reserve or export can be expected to work. Pressure is not ill health."""

    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimReport:
    """What was left behind by daemons that are gone, and is deleted now."""

    names: tuple[str, ...] = ()
    reclaimed_bytes: int = 0
    left_alone: tuple[str, ...] = ()  # segments of a daemon that lives, or died too recently


class MemoryBackend(ABC):
    """Hands out regions. Every method may raise `DriverCallFailed` or `SystemCallFailed` beside what it names."""

    name: str  # as in configuration, contract and metrics
    keeps_regions: bool = False  # `list_existing` may find what an earlier daemon made

    @abstractmethod
    def granularity_bytes(self, device_index: int) -> int:
        """Regions of this device are multiples of this. Raises UnknownDevice."""

    @abstractmethod
    def reserve(self, request: RegionRequest) -> Region:
        """Holds memory that is really there: touching it later cannot fail. Host memory is zeroed. Slow.

        Raises InvalidRegionRequest, RegionExists, UnknownDevice, OutOfDeviceMemory and its host-memory sisters.
        """

    @abstractmethod
    def export(self, region: Region) -> ExportedRegion:
        """How to map the region. Raises UnknownRegion, ExportNotPossible. Changes nothing."""

    def open_fds(self, region: Region, *, read_only: bool = False) -> tuple[int, ...]:
        """New descriptors, one per chunk, that the caller must close. Raises UnknownRegion, ExportNotPossible."""
        raise ExportNotPossible(region.id, "fd", f"the {self.name} backend has no descriptors")

    @abstractmethod
    def release(self, region: Region) -> None:
        """Lets go of the region; processes that still map it keep the bytes. Raises UnknownRegion. Slow."""

    def resize(self, region: Region, size_bytes: int) -> Region:
        """Grows or shrinks at the tail; what stays is not moved. Raises ResizeUnsupported, OutOfDeviceMemory. Slow."""
        raise ResizeUnsupported(self.name)

    def list_existing(self) -> tuple[Region, ...]:
        """Regions of this instance that an earlier daemon left and that can be adopted. Changes nothing."""
        return ()

    def adopt(self, region: Region) -> Region:
        """Holds a region from `list_existing`, bytes untouched. Raises UnknownRegion, RegionExists, RegionMismatch."""
        raise UnknownRegion(region.id)

    def reclaim_stale(self) -> ReclaimReport:
        """Deletes what dead daemons left and nobody adopted; never anything of a live one."""
        return ReclaimReport()

    @abstractmethod
    def health(self) -> BackendHealth:
        """Cheap; called every few seconds."""

    @abstractmethod
    def usage(self) -> MemoryUsage:
        """Free and held bytes per device, and holders."""

    @abstractmethod
    def close(self, *, keep: bool = False) -> None:
        """Ends the backend. `keep` leaves named memory behind for the next daemon; anonymous memory goes with us."""


def round_up(size_bytes: int, granularity_bytes: int) -> int:
    """Smallest multiple of the granularity that holds `size_bytes`."""
    return -(-size_bytes // granularity_bytes) * granularity_bytes


def check_request(request: RegionRequest) -> None:
    """Raises InvalidRegionRequest for what no backend can do."""
    bounds: tuple[tuple[str, int, int, int], ...] = (
        ("size_bytes", request.size_bytes, 1, MAX_REGION_BYTES),
        ("rank", request.rank, 0, MAX_RANKS - 1),
        ("device_index", request.device_index, 0, MAX_RANKS - 1),
    )
    for field, value, low, high in bounds:
        if not low <= value <= high:
            raise InvalidRegionRequest(field, value, f"must be {low}..{high}")
    if not request.pool:
        raise InvalidRegionRequest("pool", request.pool, "must not be empty")


def check_on_device(request: RegionRequest) -> None:
    """For device backends: raises InvalidRegionRequest for a host-resident part."""
    if request.host:
        raise InvalidRegionRequest("host", request.host, "must be false: reserve host-resident parts on a host backend")


def describe_holders(holdings: tuple[Holding, ...]) -> str:
    """For error texts: largest first, bounded."""
    largest = sorted(holdings, key=lambda holding: -holding.size_bytes)
    named = [f"pool {h.pool} rank {h.rank}: {h.size_bytes} bytes" for h in largest[:8]]
    if len(largest) > 8:
        named.append(f"and {len(largest) - 8} more")
    return "; ".join(named) or "nothing"
