"""One suite over every backend: what `memory/backend.py` promises."""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvhold_server.domain.errors import Exhausted
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import ExportKind, MemoryBackend, Region, RegionRequest
from kvhold_server.memory.cuda_ipc import CudaIpcBackend
from kvhold_server.memory.cuda_vmm import CudaVmmBackend
from kvhold_server.memory.errors import (
    ExportNotPossible,
    InvalidRegionRequest,
    RegionExists,
    ResizeUnsupported,
    UnknownRegion,
)
from kvhold_server.memory.fake import FakeBackend
from kvhold_server.memory.memfd import MemfdBackend
from kvhold_server.memory.posix_shm import PosixShmBackend
from kvhold_server.memory.segment_names import instance_digest
from tests.memory.fake_driver import FakeDriver

KIB = 1 << 10
TOO_LARGE_BYTES = 1 << 46  # no machine has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A backend under test and what it can do."""

    backend: MemoryBackend
    has_fds: bool
    takes_host_parts: bool


def _posix_shm(directory: Path) -> Made:
    return Made(backend=PosixShmBackend(directory), has_fds=True, takes_host_parts=True)


def _memfd(directory: Path) -> Made:
    return Made(backend=MemfdBackend(), has_fds=True, takes_host_parts=True)


def _fake(directory: Path) -> Made:
    backend = FakeBackend(device_bytes=1 << 26, granularity_bytes=1 << 16)
    return Made(backend=backend, has_fds=False, takes_host_parts=True)


def _cuda_vmm(directory: Path) -> Made:
    backend = CudaVmmBackend(FakeDriver(), chunk_bytes=128 * KIB)
    return Made(backend=backend, has_fds=True, takes_host_parts=False)


def _cuda_ipc(directory: Path) -> Made:
    return Made(backend=CudaIpcBackend(FakeDriver()), has_fds=False, takes_host_parts=False)


MAKERS: dict[str, Callable[[Path], Made]] = {
    "posix_shm": _posix_shm,
    "memfd": _memfd,
    "fake": _fake,
    "cuda_vmm_fake_driver": _cuda_vmm,
    "cuda_ipc_fake_driver": _cuda_ipc,
}


@pytest.fixture(params=MAKERS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    made = MAKERS[request.param](tmp_path)
    yield made
    made.backend.close()


def ask(size_bytes: int = 100 * KIB, *, pool: str = "m", rank: int = 0, host: bool = False) -> RegionRequest:
    return RegionRequest(pool=PoolName(pool), rank=rank, size_bytes=size_bytes, host=host)


def held_bytes(backend: MemoryBackend) -> int:
    usage = backend.usage()
    assert sum(d.held_bytes for d in usage.devices) == sum(h.size_bytes for h in usage.holdings)
    return sum(d.held_bytes for d in usage.devices)


def files_of(directory: Path) -> set[str]:
    """What this instance has in /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if f".{instance_digest(directory)}." in name}


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_region_is_rounded_up_to_the_granularity(made: Made) -> None:
    granularity = made.backend.granularity_bytes(0)
    region = made.backend.reserve(ask(granularity + 1))
    assert region.size_bytes == 2 * granularity
    assert region.requested_bytes == granularity + 1
    assert region.device_uuid
    assert made.backend.export(region).size_bytes == region.size_bytes


def test_usage_adds_up_and_names_the_holders(made: Made) -> None:
    first = made.backend.reserve(ask(rank=0))
    second = made.backend.reserve(ask(rank=1))
    assert held_bytes(made.backend) == first.size_bytes + second.size_bytes
    assert {(h.pool, h.rank) for h in made.backend.usage().holdings} == {("m", 0), ("m", 1)}
    made.backend.release(first)
    assert held_bytes(made.backend) == second.size_bytes


def test_one_region_per_pool_rank_and_part(made: Made) -> None:
    made.backend.reserve(ask())
    with pytest.raises(RegionExists):
        made.backend.reserve(ask())
    made.backend.reserve(ask(rank=1))
    made.backend.reserve(ask(pool="n"))
    if made.takes_host_parts:
        made.backend.reserve(ask(host=True))
    else:
        with pytest.raises(InvalidRegionRequest):
            made.backend.reserve(ask(host=True))


def test_a_released_region_is_unknown_and_its_name_free(made: Made) -> None:
    region = made.backend.reserve(ask())
    made.backend.release(region)
    for use in (made.backend.export, made.backend.release):
        with pytest.raises(UnknownRegion):
            use(region)
    with pytest.raises(UnknownRegion if made.has_fds else ExportNotPossible):
        made.backend.open_fds(region)
    assert held_bytes(made.backend) == 0
    made.backend.reserve(ask())


@pytest.mark.parametrize(
    "bad",
    [ask(0), ask(-1), ask(1 << 50), ask(rank=-1), ask(rank=1 << 20), ask(pool="")],
    ids=["zero", "negative", "beyond the address space", "rank below", "rank above", "nameless"],
)
def test_bad_requests_name_the_field_and_change_nothing(made: Made, bad: RegionRequest) -> None:
    with pytest.raises(InvalidRegionRequest) as caught:
        made.backend.reserve(bad)
    assert caught.value.field in ("size_bytes", "rank", "pool")
    assert held_bytes(made.backend) == 0


def test_too_much_is_a_typed_answer_and_leaves_nothing(made: Made) -> None:
    fds = num_open_fds()
    kept = made.backend.reserve(ask(rank=1))
    with pytest.raises((Exhausted, InvalidRegionRequest)) as caught:
        made.backend.reserve(ask(TOO_LARGE_BYTES))
    assert str(TOO_LARGE_BYTES) in str(caught.value)
    assert held_bytes(made.backend) == kept.size_bytes
    made.backend.release(kept)
    assert num_open_fds() == fds
    made.backend.reserve(ask())  # nothing in the way


def test_a_thousand_exports_leak_no_descriptor(made: Made) -> None:
    region = made.backend.reserve(ask())
    fds = num_open_fds()
    first = made.backend.export(region)
    for _ in range(1000):
        assert made.backend.export(region) == first
        if made.has_fds:
            opened = made.backend.open_fds(region)
            assert len(opened) == len(first.chunk_sizes_bytes)
            for fd in opened:
                os.close(fd)
    assert num_open_fds() == fds


def test_reserve_and_release_leak_nothing(made: Made, tmp_path: Path) -> None:
    made.backend.release(made.backend.reserve(ask()))
    fds = num_open_fds()
    files = files_of(tmp_path)
    for _ in range(100):
        made.backend.release(made.backend.reserve(ask()))
    assert num_open_fds() == fds
    assert files_of(tmp_path) == files


def test_chunks_add_up_to_the_region(made: Made) -> None:
    exported = made.backend.export(made.backend.reserve(ask(300 * KIB)))
    if exported.kind in (ExportKind.FD, ExportKind.SHM_NAME):
        assert sum(exported.chunk_sizes_bytes) == exported.size_bytes
    else:
        assert exported.chunk_sizes_bytes == ()


def test_what_one_process_writes_through_descriptors_another_reads(made: Made) -> None:
    if not made.has_fds:
        pytest.skip(f"{made.backend.name} hands out no descriptors")
    region = made.backend.reserve(ask(300 * KIB))
    writing = made.backend.open_fds(region)
    content = random.Random(1).randbytes(region.size_bytes)
    child = os.fork()
    if child == 0:  # the writer: ends without unwinding pytest
        start = 0
        for fd in writing:
            start += os.pwrite(fd, content[start : start + os.fstat(fd).st_size], 0)
        os._exit(0 if start == len(content) else 1)
    assert os.waitpid(child, 0)[1] == 0
    reading = made.backend.open_fds(region, read_only=True)
    assert b"".join(os.pread(fd, os.fstat(fd).st_size, 0) for fd in reading) == content
    for fd in (*writing, *reading):
        os.close(fd)


def test_descriptors_outlive_the_region(made: Made) -> None:
    if not made.has_fds:
        pytest.skip(f"{made.backend.name} hands out no descriptors")
    region = made.backend.reserve(ask())
    fds = made.backend.open_fds(region)
    os.pwrite(fds[0], b"kept", 0)
    made.backend.release(region)
    assert os.pread(fds[0], 4, 0) == b"kept"
    for fd in fds:
        os.close(fd)


def test_resize_is_refused_by_those_who_cannot(made: Made) -> None:
    region = made.backend.reserve(ask())
    if isinstance(made.backend, CudaVmmBackend):
        assert made.backend.resize(region, 500 * KIB).size_bytes >= 500 * KIB
        return
    with pytest.raises(ResizeUnsupported):
        made.backend.resize(region, 500 * KIB)


def test_health_is_good_and_cheap(made: Made) -> None:
    made.backend.reserve(ask())
    assert made.backend.health().ok


def test_random_use_agrees_with_a_dictionary(made: Made) -> None:
    rng = random.Random(7)
    model: dict[tuple[str, int], Region] = {}
    for _ in range(150):
        pool, rank = rng.choice("abc"), rng.randrange(3)
        request = ask(rng.randrange(1, 300) * KIB, pool=pool, rank=rank)
        if rng.random() < 0.6:
            try:
                region = made.backend.reserve(request)
                assert (pool, rank) not in model
                model[pool, rank] = region
            except RegionExists:
                assert (pool, rank) in model
        elif (pool, rank) in model:
            made.backend.release(model.pop((pool, rank)))
        holdings = made.backend.usage().holdings
        assert {(h.pool, h.rank): h.size_bytes for h in holdings} == {k: r.size_bytes for k, r in model.items()}
        held_bytes(made.backend)


def _own_and_wait(name: str, directory: Path, ready: object) -> None:
    made = MAKERS[name](directory)
    made.backend.reserve(ask())
    ready.set()  # type: ignore[attr-defined]
    signal.pause()


@pytest.mark.parametrize("name", ["posix_shm", "memfd"])
def test_killing_the_owner_leaves_at_most_one_instance_behind(name: str, tmp_path: Path) -> None:
    """DMN-08: five starts, each killed with SIGKILL."""
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        ready = context.Event()
        owner = context.Process(target=_own_and_wait, args=(name, tmp_path, ready))
        owner.start()
        assert ready.wait(20)
        assert owner.pid is not None
        os.kill(owner.pid, signal.SIGKILL)
        owner.join(20)
        assert len([name for name in files_of(tmp_path) if not name.endswith(".lock")]) <= 1
    made = MAKERS[name](tmp_path)
    made.backend.reclaim_stale()
    made.backend.reserve(ask())
    made.backend.close()
    assert not files_of(tmp_path)
