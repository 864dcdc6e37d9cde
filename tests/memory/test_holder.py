"""Memory that outlives its daemon because a holder keeps the descriptors."""

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhold_server.domain.ids import PoolName
from kvhold_server.memory import holder as holder_module
from kvhold_server.memory.backend import MemoryBackend, Region, RegionRequest
from kvhold_server.memory.cuda_vmm import CudaVmmBackend
from kvhold_server.memory.device_with_host import DeviceWithHost
from kvhold_server.memory.errors import (
    HolderUnreachable,
    RegionExists,
    RegionMismatch,
    ResizeUnsupported,
    UnknownRegion,
)
from kvhold_server.memory.fd_frames import Frame
from kvhold_server.memory.holder import Holder, listen, main, serve
from kvhold_server.memory.kept import HolderClient, KeptBackend
from kvhold_server.memory.memfd import MemfdBackend
from tests.memory.fake_driver import GRANULARITY_BYTES, FakeDriver

SIZE = 5 * GRANULARITY_BYTES
BACKENDS = ["memfd", "cuda_vmm"]


def ask(rank: int = 0, *, pool: str = "m", host: bool = False) -> RegionRequest:
    return RegionRequest(pool=PoolName(pool), rank=rank, size_bytes=SIZE, host=host)


class HolderThread:
    """A holder in this process: its store can be looked into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Holder()
        self._listener = listen(path)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            serve(self._listener, self.store)
        except OSError:
            return

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink()
        self.store.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[HolderThread]:
    holder = HolderThread(tmp_path / "holder.sock")
    yield holder
    holder.store.close()


def new_backend(name: str, path: Path) -> KeptBackend:
    inner: MemoryBackend = MemfdBackend() if name == "memfd" else CudaVmmBackend(FakeDriver(), chunk_bytes=1 << 17)
    return KeptBackend(inner, HolderClient(path))


def read(backend: MemoryBackend, region: Region) -> bytes:
    fds = backend.open_fds(region)
    content = b"".join(os.pread(fd, os.fstat(fd).st_size, 0) for fd in fds)
    for fd in fds:
        os.close(fd)
    return content


def write(backend: MemoryBackend, region: Region, content: bytes) -> None:
    start = 0
    for fd in backend.open_fds(region):
        start += os.pwrite(fd, content[start : start + os.fstat(fd).st_size], 0)
        os.close(fd)


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def settles_at(num_fds: int) -> bool:
    """The holder's thread may still be closing its last connection."""
    deadline = time.monotonic() + 10
    while num_open_fds() > num_fds and time.monotonic() < deadline:
        time.sleep(0.005)
    return num_open_fds() <= num_fds


@pytest.mark.parametrize("name", BACKENDS)
def test_the_next_daemon_adopts_the_bytes(holder: HolderThread, name: str) -> None:
    old = new_backend(name, holder.path)
    region = old.reserve(ask())
    content = random.Random(5).randbytes(region.size_bytes)
    write(old, region, content)
    exported = old.export(region)
    old.close(keep=True)
    new = new_backend(name, holder.path)
    assert new.list_existing() == (region,)
    assert new.adopt(region) == region
    assert read(new, region) == content
    assert new.export(region).chunk_sizes_bytes == exported.chunk_sizes_bytes
    assert new.list_existing() == ()
    assert new.reclaim_stale().names == ()
    assert [holding.region_id for holding in new.usage().holdings] == [region.id]
    for use in (new.adopt, lambda _: new.reserve(ask())):
        with pytest.raises(RegionExists):
            use(region)
    with pytest.raises(ResizeUnsupported):
        new.resize(region, 2 * SIZE)
    new.release(region)
    assert holder.store.entries == {}
    with pytest.raises(UnknownRegion):
        new.export(region)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_nobody_adopts_is_dropped(holder: HolderThread, name: str) -> None:
    old = new_backend(name, holder.path)
    kept, dropped = old.reserve(ask(0)), old.reserve(ask(1))
    old.close(keep=True)
    new = new_backend(name, holder.path)
    new.adopt(kept)
    report = new.reclaim_stale()
    assert (report.names, report.reclaimed_bytes) == ((dropped.id,), dropped.size_bytes)
    assert list(holder.store.entries) == [f"{name}:{kept.id}"]
    new.close()
    assert holder.store.entries == {}


def test_backends_share_a_holder_without_meeting(holder: HolderThread) -> None:
    memfd = new_backend("memfd", holder.path)
    device = DeviceWithHost(new_backend("cuda_vmm", holder.path), memfd)
    assert device.keeps_regions
    on_device, on_host = device.reserve(ask()), device.reserve(ask(host=True))
    assert {region.id for region in device.list_existing()} == set()
    device.close(keep=True)
    memfd.close(keep=True)
    memfd = new_backend("memfd", holder.path)
    device = DeviceWithHost(new_backend("cuda_vmm", holder.path), memfd)
    assert set(device.list_existing()) == {on_device, on_host}
    for region in (on_device, on_host):
        device.adopt(region)
    assert device.reclaim_stale().names == memfd.reclaim_stale().names == ()
    device.close()
    memfd.close()
    assert holder.store.entries == {}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_holder_that_is_away_hurts_nobody_and_is_given_everything_later(holder: HolderThread, name: str) -> None:
    backend = new_backend(name, holder.path)
    first = backend.reserve(ask(0))
    holder.stop()
    second = backend.reserve(ask(1))
    assert read(backend, second) == bytes(second.size_bytes)
    assert "begin fresh" in backend.health().detail
    assert backend.health().ok
    another = HolderThread(holder.path.with_name("holder2.sock"))
    another_path = another.path.rename(holder.path)
    assert another_path.exists()
    assert "begin fresh" not in backend.health().detail
    assert set(another.store.entries) == {f"{name}:{first.id}", f"{name}:{second.id}"}
    backend.close()
    another.store.close()


def test_a_region_that_does_not_fit_its_record_is_not_adopted(holder: HolderThread) -> None:
    old = new_backend("memfd", holder.path)
    region = old.reserve(ask())
    old.close(keep=True)
    new = new_backend("memfd", holder.path)
    bigger = Region(**{field: getattr(region, field) for field in region.__slots__} | {"size_bytes": 2 * SIZE})
    fds = num_open_fds()
    with pytest.raises(RegionMismatch):
        new.adopt(bigger)
    with pytest.raises(UnknownRegion):
        new.adopt(Region(**{field: getattr(region, field) for field in region.__slots__} | {"id": "m/7"}))
    assert settles_at(fds)
    new.reserve(ask())  # begins afresh under the same id
    assert new.list_existing() == ()
    new.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_five_hundred_generations_leak_nothing(holder: HolderThread, name: str) -> None:
    backend = new_backend(name, holder.path)
    backend.release(backend.reserve(ask()))
    fds = num_open_fds()
    for _ in range(500):
        backend.release(backend.reserve(ask()))
    assert holder.store.entries == {}
    assert settles_at(fds)


def test_the_store_is_bounded_and_closes_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_module, "MAX_ENTRIES", 1)
    store = Holder()
    fds = num_open_fds()

    def put(key: str) -> str:
        request = Frame(fields={"verb": "put", "key": key, "about": {}}, fds=(os.dup(0),))
        return str(store.answer(request)[0]["status"])

    assert put("a") == "ok"
    assert put("a") == "ok"  # again: the former descriptor is closed
    assert put("b") == "error"
    assert num_open_fds() == fds + 1
    for fields in ({"verb": "nonsense"}, {"verb": "put", "key": "b"}, {"verb": "put", "key": 1, "about": {}}, {}):
        assert store.answer(Frame(fields=fields, fds=(os.dup(0),)))[0]["status"] == "error"
    assert store.answer(Frame(fields={"verb": "get", "key": "b"}))[0]["status"] == "error"
    assert num_open_fds() == fds + 1
    store.close()
    assert num_open_fds() == fds


@pytest.mark.parametrize(
    "junk",
    [b"", b"\0\0", struct.pack(">I", 0), struct.pack(">I", 2**31), struct.pack(">I", 2) + b"[]", b"GET / HTTP/1.1\r\n"],
)
def test_junk_does_not_stop_the_holder(holder: HolderThread, junk: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(holder.path))
        connection.sendall(junk)
    assert HolderClient(holder.path).ask("list").fields["entries"] == {}


def test_a_second_holder_on_the_same_path_is_refused(holder: HolderThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(holder.path)]) == 1
    assert str(holder.path) in capsys.readouterr().err
    assert main([]) == 2
    assert HolderClient(holder.path).ask("list").fields["entries"] == {}


def test_no_holder_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(HolderUnreachable) as caught:
        HolderClient(tmp_path / "none.sock").ask("list")
    assert str(tmp_path) in str(caught.value)


DAEMON = """
import os, signal, sys
from pathlib import Path
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory import holder as holder_module
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.memory.kept import HolderClient, KeptBackend
from kvhold_server.memory.memfd import MemfdBackend
backend = KeptBackend(MemfdBackend(), HolderClient(Path(sys.argv[1])))
region = backend.reserve(RegionRequest(pool=PoolName("m"), rank=0, size_bytes=4096))
(fd,) = backend.open_fds(region)
os.pwrite(fd, b"warm", 0)
print("ready", flush=True)
signal.pause()
"""


def test_memory_survives_the_daemons_sigkill(tmp_path: Path, repo_dir: Path) -> None:
    path = tmp_path / "h.sock"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(repo_dir / part) for part in ("proto", "server"))}
    command = [sys.executable, "-m", "kvhold_server.memory.holder", str(path)]
    holder = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, str(path)], env=environment, stdout=subprocess.PIPE)
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == b"ready\n"
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    daemon.stdout.close()
    successor = KeptBackend(MemfdBackend(), HolderClient(path))
    (region,) = successor.list_existing()
    successor.adopt(region)
    assert read(successor, region)[:4] == b"warm"
    successor.close()
    holder.terminate()
    assert holder.wait(10) == 0
    assert not path.exists()


def test_the_descriptor_limit_is_raised_to_what_is_allowed(repo_dir: Path) -> None:
    code = (
        "import resource; from kvhold_server.memory.descriptor_limit import raise_descriptor_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "assert raise_descriptor_limit() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, cwd=repo_dir / "server")
