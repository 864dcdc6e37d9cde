"""Maps host regions: named shared memory, or a descriptor from the fd channel."""

import mmap
import os
from dataclasses import dataclass

from kvhold_client.fd_client import MappingLease, fetch_region
from kvhold_client.mapping_errors import MappingInUse, RegionNotMappable, RegionSizeMismatch
from kvhold_client.numpy_views import NumpyViews
from kvhold_client.torch_views import TorchViews, torch_is_installed

SHM_DIRECTORY = "/dev/shm"  # where shm_open looks, too


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionExport:
    """How to map one region: the fields of the wire's RegionExport."""

    size_bytes: int
    shm_name: str = ""
    fd_socket_path: str = ""
    fd_token: bytes = b""
    ipc_handle: bytes = b""
    ipc_offset_bytes: int = 0
    device_uuid: str = ""  # empty: host memory
    chunk_sizes_bytes: tuple[int, ...] = ()
    host_resident: bool = False

    @property
    def is_device(self) -> bool:
        return self.device_uuid not in ("", "host")

    @property
    def label(self) -> str:
        """For error texts."""
        return self.shm_name or self.fd_socket_path or f"IPC handle on {self.device_uuid}"


class HostMemory:
    """A mapped host region. Its bytes stay valid until `close`, whatever becomes of the daemon."""

    def __init__(self, mapping: mmap.mmap, label: str, lease: MappingLease | None) -> None:
        self._mapping = mapping
        self._label = label
        self._lease = lease

    @property
    def size_bytes(self) -> int:
        return len(self._mapping)

    def make_views(self, library: str) -> NumpyViews | TorchViews:
        """What makes views of these bytes: they keep the mapping from being closed. Raises LibraryMissing."""
        if library == "torch" or (library == "auto" and torch_is_installed()):
            return TorchViews(memoryview(self._mapping), "cpu")
        return NumpyViews(memoryview(self._mapping))

    def close(self) -> None:
        """Unmaps, then tells the daemon. Raises MappingInUse, changing nothing, while a view is alive."""
        try:
            self._mapping.close()
        except BufferError:
            raise MappingInUse(self._label) from None
        if self._lease is not None:
            self._lease.unmapped()
            self._lease = None


def map_host_region(export: RegionExport, *, read_only: bool) -> HostMemory:
    """Maps a region. Attaching writes nothing (R11).

    The channel is preferred where it is offered: its connection proves to the daemon that this process lives. Raises
    RegionNotMappable, RegionSizeMismatch, and the channel's errors.
    """
    if export.fd_token:
        return _map_from_channel(export, read_only=read_only)
    if export.shm_name:
        return _map_named(export, read_only=read_only)
    raise RegionNotMappable("region", "the export has neither a name nor a token")


def _map_named(export: RegionExport, *, read_only: bool) -> HostMemory:
    if "/" in export.shm_name:
        raise RegionNotMappable(export.shm_name, "not a name for shm_open")
    path = f"{SHM_DIRECTORY}/{export.shm_name}"
    try:
        fd = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise RegionNotMappable(path, f"{error.strerror} (we are uid {os.geteuid()}); use the fd channel") from error
    try:
        return HostMemory(_map_fd(fd, export.size_bytes, path, read_only=read_only), path, None)
    finally:
        os.close(fd)


def _map_from_channel(export: RegionExport, *, read_only: bool) -> HostMemory:
    received = fetch_region(export.fd_socket_path, export.fd_token)
    try:
        if len(received.fds) != 1:
            raise RegionNotMappable(export.label, f"host memory in {len(received.fds)} chunks")
        label = f"region from {export.fd_socket_path}"
        only_read = read_only or received.read_only
        mapping = _map_fd(received.fds[0], export.size_bytes, label, read_only=only_read)
    except BaseException:
        received.lease.unmapped()
        raise
    finally:
        for fd in received.fds:
            os.close(fd)
    return HostMemory(mapping, label, received.lease)


def _map_fd(fd: int, size_bytes: int, label: str, *, read_only: bool) -> mmap.mmap:
    actual_bytes = os.fstat(fd).st_size
    if actual_bytes < size_bytes:  # mapping past the end would be SIGBUS later
        raise RegionSizeMismatch(label, actual_bytes, size_bytes)
    protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
    try:
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=protection)
    except OSError as error:
        raise RegionNotMappable(label, f"mmap: {error.strerror}") from error
