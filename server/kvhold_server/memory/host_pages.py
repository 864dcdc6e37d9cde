"""Makes the pages behind a shared descriptor real, in the right place and for good.

    size ──▶ bind to a NUMA node ──▶ allocate every page ──▶ lock

The order matters: a page is placed when it is allocated, so the policy must be set first; and only when every page
has been allocated can a later touch not end in SIGBUS. The policy of shared memory belongs to the memory and not to
the mapping that set it, so it holds for all processes.
"""

import ctypes
import errno
import mmap
import os
import platform
import resource
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvhold_server.memory.errors import (
    HugePagesUnavailable,
    MemlockTooLow,
    NumaBindFailed,
    ShmTooSmall,
    SystemCallFailed,
)

PAGE_BYTES = mmap.PAGESIZE
_MPOL_BIND = 2
_MBIND_SYSCALL = {"x86_64": 237, "aarch64": 235}
_MAX_NUMA_NODES = 1024
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_PAGE_DIRECTORY = Path("/sys/kernel/mm/hugepages")
_NODE_DIRECTORY = Path("/sys/devices/system/node")


class HugePages(Enum):
    """Which huge pages back a region."""

    OFF = "off"
    TRANSPARENT = "transparent"  # where the kernel can; needs shmem_enabled=advise, within_size or always
    EXPLICIT = "explicit"  # from the reserved pool (vm.nr_hugepages); memfd only


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPageOptions:
    """What the operator wants of host memory."""

    huge_pages: HugePages = HugePages.OFF
    numa_node: int | None = None
    lock: bool = False  # never swapped; needs RLIMIT_MEMLOCK


class Pin:
    """Our own mapping of a region, kept only where locking needs one."""

    def __init__(self, mapping: mmap.mmap | None) -> None:
        self._mapping = mapping

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None


def allocate(fd: int, path: str, size_bytes: int, options: HostPageOptions) -> Pin:
    """Sizes the file and makes every page real. Raises the typed host-memory errors; the file stays the caller's."""
    if options.lock:
        check_memlock(size_bytes)
    try:
        os.ftruncate(fd, size_bytes)
        mapping = _prepare(fd, size_bytes, options)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            if options.lock and mapping is not None:
                _lock(mapping, size_bytes)
                return Pin(mapping)
        except BaseException:
            if mapping is not None:
                mapping.close()
            raise
        if mapping is not None:
            mapping.close()
        return Pin(None)
    except OSError as error:
        raise _typed(error, fd, path, size_bytes, options) from error


def repin(fd: int, size_bytes: int, options: HostPageOptions) -> Pin:
    """Locks a region that an earlier daemon made; its bytes and placement stay as they are."""
    if not options.lock:
        return Pin(None)
    check_memlock(size_bytes)
    mapping = mmap.mmap(fd, size_bytes)
    _lock(mapping, size_bytes)
    return Pin(mapping)


def check_memlock(size_bytes: int) -> None:
    """Raises MemlockTooLow before anything is made."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < size_bytes:
        raise MemlockTooLow(limit_bytes, size_bytes)


def huge_page_bytes(huge_pages: HugePages) -> int:
    """Granularity that this kind of page imposes. Raises HugePagesUnavailable where the machine has none."""
    if huge_pages is HugePages.OFF:
        return PAGE_BYTES
    if huge_pages is HugePages.TRANSPARENT:
        check_transparent_huge_pages(_SHMEM_ENABLED)
        return _default_huge_page_bytes()
    return _default_huge_page_bytes()


def check_transparent_huge_pages(shmem_enabled: Path) -> None:
    """Raises HugePagesUnavailable when the kernel would silently ignore the advice."""
    try:
        setting = shmem_enabled.read_text()
    except OSError:
        raise HugePagesUnavailable("transparent", f"{shmem_enabled} is missing: this kernel has none") from None
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("never", "deny", ""):
        raise HugePagesUnavailable(
            "transparent",
            f"{shmem_enabled} says {chosen or setting.strip()!r}; it must say advise, within_size or always",
        )


def _default_huge_page_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Hugepagesize:"):
            return int(line.split()[1]) * 1024
    raise HugePagesUnavailable("explicit", "this kernel has no huge pages")


def _prepare(fd: int, size_bytes: int, options: HostPageOptions) -> mmap.mmap | None:
    """Maps the file if a policy, an advice or a lock needs an address; touches no page."""
    wants_advice = options.huge_pages is HugePages.TRANSPARENT
    if options.numa_node is None and not options.lock and not wants_advice:
        return None
    mapping = mmap.mmap(fd, size_bytes)
    try:
        if options.numa_node is not None:
            _bind(mapping, size_bytes, options.numa_node)
        if wants_advice:
            mapping.madvise(mmap.MADV_HUGEPAGE)
    except BaseException:
        mapping.close()
        raise
    return mapping


def _address(mapping: mmap.mmap) -> int:
    anchor = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(anchor)
    del anchor  # it pins the mapping open
    return address


def check_numa_node(numa_node: int) -> None:
    """Whether memory can be bound to it at all. Raises NumaBindFailed."""
    if platform.machine() not in _MBIND_SYSCALL:
        raise NumaBindFailed(numa_node, f"not known how on {platform.machine()}")
    if not 0 <= numa_node < _MAX_NUMA_NODES or not (_NODE_DIRECTORY / f"node{numa_node}").is_dir():
        raise NumaBindFailed(numa_node, "this machine has no such node")


def _bind(mapping: mmap.mmap, size_bytes: int, numa_node: int) -> None:
    check_numa_node(numa_node)
    number = _MBIND_SYSCALL[platform.machine()]
    words = _MAX_NUMA_NODES // 64
    mask = (ctypes.c_uint64 * words)()
    mask[numa_node // 64] = 1 << (numa_node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(_address(mapping)),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(_MPOL_BIND),
        ctypes.byref(mask),
        ctypes.c_ulong(_MAX_NUMA_NODES + 1),
        ctypes.c_uint(0),
    )
    if failed:
        code = ctypes.get_errno()
        raise NumaBindFailed(numa_node, f"{errno.errorcode.get(code, code)}: {os.strerror(code)}")


def _lock(mapping: mmap.mmap, size_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(_address(mapping)), ctypes.c_size_t(size_bytes)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _typed(error: OSError, fd: int, path: str, size_bytes: int, options: HostPageOptions) -> Exception:
    code = error.errno or 0
    if options.huge_pages is HugePages.EXPLICIT and code in (errno.ENOMEM, errno.ENOSPC):
        page_bytes = _default_huge_page_bytes()
        free = (_HUGE_PAGE_DIRECTORY / f"hugepages-{page_bytes // 1024}kB" / "free_hugepages").read_text().strip()
        needed = -(-size_bytes // page_bytes)
        return HugePagesUnavailable(
            "explicit", f"{free} pages of {page_bytes} bytes are free, {needed} are needed; raise vm.nr_hugepages"
        )
    if code == errno.ENOSPC:
        stat = os.fstatvfs(fd)
        free_bytes = stat.f_bavail * stat.f_frsize
        return ShmTooSmall(path.rpartition("/")[0], stat.f_blocks * stat.f_frsize, free_bytes, size_bytes)
    if options.lock and code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        return MemlockTooLow(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], size_bytes)
    name = errno.errorcode.get(code, str(code))
    return SystemCallFailed("posix_fallocate", path, code, name, os.strerror(code))
