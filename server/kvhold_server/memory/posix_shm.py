"""Host memory as named POSIX shared memory: the default where there is no GPU, and warm across a restart of the daemon.

A region is one file of mode 0600 in /dev/shm, every page of it allocated up front. Its name is a function of instance
directory, pool and rank, so that the next daemon of this instance finds it; a lock file beside the segments tells dead
daemons from live ones.

    start          /dev/shm: (nothing)
    reserve        kvhold.5f0c….0.d.llama            ours, open fd held
    SIGKILL        kvhold.5f0c….0.d.llama            bytes intact, flock gone
    start          list_existing → adopt             same inode, same bytes
                or reclaim_stale                     unlinked; clients that still map it keep the bytes until they go
"""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvhold_server.memory.backend import (
    HOST_DEVICE_UUID,
    BackendHealth,
    DeviceUsage,
    ExportedRegion,
    ExportKind,
    MemoryBackend,
    MemoryUsage,
    ReclaimReport,
    Region,
    RegionRequest,
    check_request,
    round_up,
)
from kvhold_server.memory.errors import (
    BackendUnavailable,
    HugePagesUnavailable,
    RegionMismatch,
    SystemCallFailed,
    UnknownRegion,
)
from kvhold_server.memory.host_limits import HostLimits, check_file_system
from kvhold_server.memory.host_pages import HostPageOptions, HugePages, Pin, allocate, huge_page_bytes, repin
from kvhold_server.memory.instance_lock import InstanceLock
from kvhold_server.memory.region_table import RegionTable
from kvhold_server.memory.segment_names import (
    PREFIX,
    SegmentName,
    instance_digest,
    lock_name,
    parse_segment_name,
    segment_name,
)

SHM_DIRECTORY = Path("/dev/shm")
OTHER_INSTANCE_STALE_AFTER_S = 3600.0


@dataclass(slots=True, kw_only=True)
class _Segment:
    name: str
    fd: int
    pin: Pin


@dataclass(frozen=True, slots=True, kw_only=True)
class PosixShmOptions:
    """Where segments lie and how their pages are made."""

    directory: Path = SHM_DIRECTORY
    pages: HostPageOptions = field(default_factory=HostPageOptions)
    limits: HostLimits = field(default_factory=HostLimits)
    stale_after_s: float = OTHER_INSTANCE_STALE_AFTER_S  # of another instance's last heartbeat
    now_s: Callable[[], float] = time.time


class PosixShmBackend(MemoryBackend):
    """Named shared memory of one instance."""

    name = "posix_shm"
    keeps_regions = True

    def __init__(self, instance_directory: Path, options: PosixShmOptions | None = None) -> None:
        """Raises InstanceInUse, BackendUnavailable, HugePagesUnavailable."""
        self._options = options or PosixShmOptions()
        if not os.access(self._options.directory, os.W_OK | os.X_OK):
            raise BackendUnavailable(self.name, f"{self._options.directory} is not a writable directory")
        self._granularity_bytes = huge_page_bytes(self._options.pages.huge_pages)
        self._instance = instance_digest(instance_directory)
        self._table: RegionTable[_Segment] = RegionTable()
        self._lock = InstanceLock.acquire(self._options.directory / lock_name(self._instance), instance_directory)

    def granularity_bytes(self, device_index: int) -> int:
        return self._granularity_bytes

    def reserve(self, request: RegionRequest) -> Region:
        check_request(request)
        if self._options.pages.huge_pages is HugePages.EXPLICIT:
            raise HugePagesUnavailable("explicit", "named segments cannot have them; use the memfd backend")
        name = segment_name(self._instance, request)
        size_bytes = round_up(request.size_bytes, self._granularity_bytes)
        with self._table.claim(request.region_id):
            self._check_room(size_bytes)
            segment = self._create(name, size_bytes)
            return self._table.publish(host_region(request, size_bytes), segment)

    def export(self, region: Region) -> ExportedRegion:
        """Falls back to descriptors only when somebody has removed the name."""
        held = self._table.get(region.id)
        named = self._names_our_file(held.memory)
        return ExportedRegion(
            region_id=held.region.id,
            kind=ExportKind.SHM_NAME if named else ExportKind.FD,
            size_bytes=held.region.size_bytes,
            device_uuid=HOST_DEVICE_UUID,
            shm_name=held.memory.name if named and self._options.directory == SHM_DIRECTORY else "",
            chunk_sizes_bytes=(held.region.size_bytes,),
        )

    def open_fds(self, region: Region, *, read_only: bool = False) -> tuple[int, ...]:
        return (reopen(self._table.get(region.id).memory.fd, read_only=read_only),)

    def release(self, region: Region) -> None:
        segment = self._table.take(region.id).memory
        if self._names_our_file(segment):  # somebody else's file under our name stays
            (self._options.directory / segment.name).unlink(missing_ok=True)
        segment.pin.close()
        os.close(segment.fd)

    def list_existing(self) -> tuple[Region, ...]:
        known = self._table.known_ids()
        found = []
        for name in self._segments():
            if name.instance == self._instance and name.region_id not in known:
                size_bytes = self._path_of(name).stat().st_size
                request = RegionRequest(pool=name.pool, rank=name.rank, host=name.host, size_bytes=size_bytes)
                found.append(host_region(request, size_bytes))
        return tuple(found)

    def adopt(self, region: Region) -> Region:
        request = RegionRequest(pool=region.pool, rank=region.rank, host=region.host, size_bytes=region.size_bytes)
        name = segment_name(self._instance, request)
        with self._table.claim(region.id):
            segment = self._open_existing(name, region)
            return self._table.publish(region, segment)

    def reclaim_stale(self) -> ReclaimReport:
        """Ours that nobody adopted; other instances' whose daemon is dead and can either never come back, because its
        directory is gone, or has not for longer than `stale_after_s`; and locks that guard nothing any more."""
        known = self._table.known_ids()
        names: list[str] = []
        left_alone: list[str] = []
        reclaimed_bytes = 0
        by_instance: dict[str, list[SegmentName]] = {instance: [] for instance in self._locked_instances()}
        for segment in self._segments():
            by_instance.setdefault(segment.instance, []).append(segment)
        for instance, segments in by_instance.items():
            ours = instance == self._instance
            lock = None if ours else self._lock_of_dead(instance)
            for segment in segments:
                path = self._path_of(segment)
                if (ours and segment.region_id in known) or (not ours and lock is None):
                    if not ours:
                        left_alone.append(path.name)
                    continue
                reclaimed_bytes += path.stat().st_size
                path.unlink()
                names.append(path.name)
            if lock is not None:
                lock.close(remove=True)
        return ReclaimReport(names=tuple(names), reclaimed_bytes=reclaimed_bytes, left_alone=tuple(left_alone))

    def health(self) -> BackendHealth:
        """Also our heartbeat."""
        self._lock.beat()
        lost = [held.region.id for held in self._table.all() if not self._names_our_file(held.memory)]
        if lost:
            return BackendHealth(ok=True, detail=f"name removed by somebody, served by descriptor: {', '.join(lost)}")
        return BackendHealth(ok=True, detail=f"{len(self._table.all())} regions in {self._options.directory}")

    def usage(self) -> MemoryUsage:
        stat = os.statvfs(self._options.directory)
        device = DeviceUsage(
            device_uuid=HOST_DEVICE_UUID,
            total_bytes=stat.f_blocks * stat.f_frsize,
            free_bytes=min(stat.f_bavail * stat.f_frsize, self._options.limits.free_bytes()),
            held_bytes=self._table.held_bytes(HOST_DEVICE_UUID),
        )
        return MemoryUsage(devices=(device,), holdings=self._table.holdings())

    def close(self, *, keep: bool = False) -> None:
        for held in self._table.all():
            if keep:
                segment = self._table.take(held.region.id).memory
                segment.pin.close()
                os.close(segment.fd)
            else:
                self.release(held.region)
        self._lock.close(remove=not any(name.instance == self._instance for name in self._segments()))

    def _check_room(self, size_bytes: int) -> None:
        check_file_system(self._options.directory, size_bytes)
        self._options.limits.check(size_bytes, self._table.holdings())

    def _create(self, name: str, size_bytes: int) -> _Segment:
        path = self._options.directory / name
        path.unlink(missing_ok=True)  # ours by name, in no table: left by an earlier daemon that nobody wanted to adopt
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise system_call_failed("open", str(path), error) from error
        try:
            pin = allocate(fd, str(path), size_bytes, self._options.pages)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return _Segment(name=name, fd=fd, pin=pin)

    def _open_existing(self, name: str, region: Region) -> _Segment:
        path = self._options.directory / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise UnknownRegion(region.id) from None
        except OSError as error:
            raise system_call_failed("open", str(path), error) from error
        try:
            stat = os.fstat(fd)
            if stat.st_size != region.size_bytes:
                raise RegionMismatch(region.id, f"{path} has {stat.st_size} bytes, expected {region.size_bytes}")
            if stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
                raise RegionMismatch(region.id, f"{path} belongs to uid {stat.st_uid}, mode {stat.st_mode & 0o777:o}")
            if stat.st_blocks * 512 < region.size_bytes:
                raise RegionMismatch(region.id, f"{path} has holes: its daemon died while making it")
            return _Segment(name=name, fd=fd, pin=repin(fd, region.size_bytes, self._options.pages))
        except BaseException:
            os.close(fd)
            raise

    def _segments(self) -> list[SegmentName]:
        parsed = (parse_segment_name(entry) for entry in sorted(os.listdir(self._options.directory)))
        return [name for name in parsed if name is not None]

    def _path_of(self, name: SegmentName) -> Path:
        request = RegionRequest(pool=name.pool, rank=name.rank, host=name.host, size_bytes=1)
        return self._options.directory / segment_name(name.instance, request)

    def _lock_of_dead(self, instance: str) -> InstanceLock | None:
        lock = InstanceLock.try_acquire_dead(self._options.directory / lock_name(instance))
        if lock is None or lock.cannot_come_back():
            return lock
        if self._options.now_s() - lock.last_beat_s() < self._options.stale_after_s:
            lock.close()  # its successor may be about to start and adopt
            return None
        return lock

    def _locked_instances(self) -> list[str]:
        names = os.listdir(self._options.directory)
        return [name.split(".")[1] for name in names if name.startswith(f"{PREFIX}.") and name.endswith(".lock")]

    def _names_our_file(self, segment: _Segment) -> bool:
        try:
            named = os.stat(self._options.directory / segment.name, follow_symlinks=False)
        except OSError:
            return False
        held = os.fstat(segment.fd)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def reopen(fd: int, *, read_only: bool) -> int:
    """A new descriptor of the same file; a read-only one cannot be turned into a writable mapping by its receiver."""
    if not read_only:
        return os.dup(fd)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise system_call_failed("open", f"/proc/self/fd/{fd}", error) from error


def system_call_failed(call: str, path: str, error: OSError) -> SystemCallFailed:
    """The typed form of an unexpected OSError."""
    code = error.errno or 0
    return SystemCallFailed(call, path, code, errno.errorcode.get(code, str(code)), os.strerror(code))


def host_region(request: RegionRequest, size_bytes: int) -> Region:
    """A region of host memory."""
    return Region(
        id=request.region_id,
        pool=request.pool,
        rank=request.rank,
        device_index=0,
        host=request.host,
        requested_bytes=request.size_bytes,
        size_bytes=size_bytes,
        device_uuid=HOST_DEVICE_UUID,
    )
