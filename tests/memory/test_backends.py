"""Which backends a daemon gets, and host-resident parts beside a device."""

from pathlib import Path

import pytest

from kvhold_server.backends import host_page_options, make_backends
from kvhold_server.config import ServerConfig
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import ExportKind, RegionRequest
from kvhold_server.memory.cuda_vmm import CudaVmmBackend
from kvhold_server.memory.device_with_host import DeviceWithHost
from kvhold_server.memory.errors import BackendUnavailable, HugePagesUnavailable, NumaBindFailed, UnknownRegion
from kvhold_server.memory.host_pages import HugePages
from kvhold_server.memory.memfd import MemfdBackend
from tests.memory.fake_driver import FakeDriver

HAS_DRIVER = Path("/dev/nvidiactl").exists()


def ask(*, host: bool) -> RegionRequest:
    return RegionRequest(pool=PoolName("m"), rank=0, device_index=1, size_bytes=100_000, host=host)


def test_host_parts_lie_in_host_memory_and_the_rest_on_the_device() -> None:
    host = MemfdBackend()
    driver = FakeDriver()
    backend = DeviceWithHost(CudaVmmBackend(driver), host)
    assert backend.name == "cuda_vmm"
    device_part, host_part = backend.reserve(ask(host=False)), backend.reserve(ask(host=True))
    assert (device_part.device_uuid, host_part.device_uuid) == ("GPU-fake-1", "host")
    assert backend.export(host_part).kind is ExportKind.FD
    assert driver.held_bytes(1) == device_part.size_bytes
    assert [holding.size_bytes for holding in host.usage().holdings] == [host_part.size_bytes]
    assert len(backend.usage().devices) == driver.num_devices  # ranks are spread over these
    backend.release(host_part)
    with pytest.raises(UnknownRegion):
        backend.open_fds(host_part)
    assert backend.health().ok
    backend.close()
    assert driver.handles == {}
    host.close()


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has a CUDA driver")
def test_a_machine_without_a_gpu_has_the_host_backends_and_says_why_not_the_others(tmp_path: Path) -> None:
    backends = make_backends(ServerConfig(state_dir=str(tmp_path), backend="memfd"))
    assert list(backends) == ["memfd", "posix_shm", "fake"]
    for backend in backends.values():
        backend.close()
    with pytest.raises(BackendUnavailable):
        make_backends(ServerConfig(state_dir=str(tmp_path), backend="cuda_vmm"))
    make_backends(ServerConfig(state_dir=str(tmp_path)))["posix_shm"].close()  # nothing was left locked


def test_a_numa_node_that_is_not_there_keeps_the_daemon_from_starting(tmp_path: Path) -> None:
    with pytest.raises(NumaBindFailed, match="node 63: this machine has no such node"):
        make_backends(ServerConfig(state_dir=str(tmp_path), host_numa_node=63))


def test_page_options_come_from_the_configuration(tmp_path: Path) -> None:
    assert host_page_options(ServerConfig()).huge_pages is HugePages.OFF
    assert host_page_options(ServerConfig()).numa_node is None
    pages = host_page_options(ServerConfig(host_huge_pages="transparent", host_numa_node=0, host_lock=True))
    assert (pages.huge_pages, pages.numa_node, pages.lock) == (HugePages.TRANSPARENT, 0, True)
    with pytest.raises(HugePagesUnavailable):
        make_backends(ServerConfig(state_dir=str(tmp_path), host_huge_pages="explicit"))
    for backend in make_backends(
        ServerConfig(state_dir=str(tmp_path), host_huge_pages="explicit", backend="memfd")
    ).values():
        backend.close()
