"""Page options of host memory: each works, or says what the machine lacks."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.memory.errors import HugePagesUnavailable, MemlockTooLow, NumaBindFailed
from kvhold_server.memory.host_pages import HostPageOptions, HugePages, check_transparent_huge_pages
from kvhold_server.memory.memfd import MemfdBackend, MemfdOptions

SIZE = 4 << 20
REQUEST = RegionRequest(pool=PoolName("m"), rank=0, size_bytes=SIZE)


def backend_with(**pages: object) -> MemfdBackend:
    return MemfdBackend(MemfdOptions(pages=HostPageOptions(**pages)))  # type: ignore[arg-type]


@pytest.fixture
def low_memlock() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    yield 65536
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_a_low_memlock_limit_is_named_with_what_is_needed(low_memlock: int) -> None:
    """K8S-06."""
    backend = backend_with(lock=True)
    with pytest.raises(MemlockTooLow) as caught:
        backend.reserve(REQUEST)
    assert (caught.value.limit_bytes, caught.value.requested_bytes) == (low_memlock, SIZE)
    assert "RLIMIT_MEMLOCK" in str(caught.value)
    assert backend.usage().holdings == ()


def locked_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmLck:")))


def test_locked_regions_count_as_locked_until_released() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < 2 * SIZE:
        pytest.skip(f"RLIMIT_MEMLOCK is {limit}")
    backend = backend_with(lock=True)
    before = locked_kib()
    region = backend.reserve(REQUEST)
    assert locked_kib() - before == SIZE >> 10
    backend.release(region)
    assert locked_kib() == before


def test_binding_to_the_first_numa_node_binds_the_memory_itself() -> None:
    if not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("this kernel has no NUMA nodes")
    backend = backend_with(numa_node=0)
    region = backend.reserve(REQUEST)
    (fd,) = backend.open_fds(region)
    code = f"import mmap; m = mmap.mmap({fd}, {SIZE}); print(open('/proc/self/numa_maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], pass_fds=[fd], capture_output=True, text=True, timeout=30)
    os.close(fd)
    backend.release(region)
    line = next(line for line in maps.stdout.splitlines() if "kvhold" in line)
    assert "bind:0" in line  # in a process that never asked for it


@pytest.mark.parametrize("numa_node", [-1, 63, 5000])
def test_a_numa_node_that_is_not_there_is_refused(numa_node: int) -> None:
    backend = backend_with(numa_node=numa_node)
    with pytest.raises(NumaBindFailed):
        backend.reserve(REQUEST)
    assert backend.usage().holdings == ()


def test_too_few_huge_pages_are_named_with_what_is_needed() -> None:
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    if not free.exists() or int(free.read_text()) >= 1 << 19:
        pytest.skip("no 2 MiB huge pages here, or too many")
    backend = backend_with(huge_pages=HugePages.EXPLICIT)
    with pytest.raises(HugePagesUnavailable) as caught:
        backend.reserve(RegionRequest(pool=PoolName("m"), rank=0, size_bytes=1 << 40))
    assert "vm.nr_hugepages" in str(caught.value)
    assert f"{1 << 19} are needed" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "usable"),
    [
        ("always within_size advise [never] deny force", False),
        ("always within_size advise never [deny] force", False),
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
    ],
)
def test_transparent_huge_pages_are_refused_where_the_kernel_would_ignore_us(
    tmp_path: Path, setting: str, usable: bool
) -> None:
    (tmp_path / "shmem_enabled").write_text(setting)
    if usable:
        check_transparent_huge_pages(tmp_path / "shmem_enabled")
        return
    with pytest.raises(HugePagesUnavailable) as caught:
        check_transparent_huge_pages(tmp_path / "shmem_enabled")
    assert "advise" in str(caught.value)


def test_a_client_cannot_truncate_a_memfd_region_under_the_others() -> None:
    backend = backend_with()
    region = backend.reserve(REQUEST)
    (fd,) = backend.open_fds(region)
    for size in (0, SIZE * 2):
        with pytest.raises(OSError):
            os.ftruncate(fd, size)
    os.close(fd)
    backend.release(region)


def test_a_read_only_descriptor_cannot_be_written_or_mapped_for_writing() -> None:
    import mmap

    backend = backend_with()
    region = backend.reserve(REQUEST)
    (fd,) = backend.open_fds(region, read_only=True)
    with pytest.raises(OSError):
        os.write(fd, b"x")
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE)
    os.close(fd)
    backend.release(region)
