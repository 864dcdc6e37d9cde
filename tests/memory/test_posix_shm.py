"""Named shared memory: modes, names, warm restarts, and what becomes of a dead daemon's segments."""

import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import ExportKind, RegionRequest
from kvhold_server.memory.errors import (
    BackendUnavailable,
    HostMemoryTooSmall,
    HugePagesUnavailable,
    InstanceInUse,
    InvalidRegionRequest,
    RegionMismatch,
    ShmTooSmall,
    UnknownRegion,
)
from kvhold_server.memory.host_limits import HostLimits
from kvhold_server.memory.host_pages import HostPageOptions, HugePages
from kvhold_server.memory.posix_shm import PosixShmBackend, PosixShmOptions
from kvhold_server.memory.segment_names import instance_digest, lock_name, parse_segment_name, segment_name

SIZE = 64 << 10


def ask(pool: str = "m", *, rank: int = 0, size_bytes: int = SIZE, host: bool = False) -> RegionRequest:
    return RegionRequest(pool=PoolName(pool), rank=rank, size_bytes=size_bytes, host=host)


@pytest.fixture
def shm_dir(tmp_path: Path) -> Path:
    """A stand-in for /dev/shm, so that tests neither see nor touch other daemons' segments."""
    directory = tmp_path / "shm"
    directory.mkdir()
    return directory


def options(shm_dir: Path, **changes: object) -> PosixShmOptions:
    return PosixShmOptions(directory=shm_dir, **changes)  # type: ignore[arg-type]


@pytest.fixture
def backend(tmp_path: Path, shm_dir: Path) -> Iterator[PosixShmBackend]:
    backend = PosixShmBackend(tmp_path / "a", options(shm_dir))
    yield backend
    backend.close()


def segments(shm_dir: Path) -> list[str]:
    return sorted(name for name in os.listdir(shm_dir) if not name.endswith(".lock"))


def test_segments_are_private_and_every_page_is_there(backend: PosixShmBackend, shm_dir: Path) -> None:
    backend.reserve(ask())
    (name,) = segments(shm_dir)
    status = os.stat(shm_dir / name)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= status.st_size == SIZE


@pytest.mark.parametrize("pool", ["llama", "a.b-c_D", "ä/ö %41", "x" * 200])
@pytest.mark.parametrize("host", [False, True])
def test_names_can_be_read_back(pool: str, host: bool) -> None:
    request = ask(pool, rank=3, host=host)
    parsed = parse_segment_name(segment_name("0123456789", request))
    assert parsed is not None
    assert (parsed.instance, parsed.pool, parsed.rank, parsed.host) == ("0123456789", pool, 3, host)
    assert parsed.region_id == request.region_id


@pytest.mark.parametrize("name", ["kvhold.0.lock", "kvhold.0.x.d.m", "kvhold.0.1.z.m", "sem.x", "", "kvhold"])
def test_other_files_are_not_taken_for_segments(name: str) -> None:
    assert parse_segment_name(name) is None


def test_a_pool_name_that_no_file_can_have_is_refused(backend: PosixShmBackend) -> None:
    with pytest.raises(InvalidRegionRequest):
        backend.reserve(ask("x" * 300))


def test_two_daemons_cannot_share_an_instance(backend: PosixShmBackend, tmp_path: Path, shm_dir: Path) -> None:
    with pytest.raises(InstanceInUse) as caught:
        PosixShmBackend(tmp_path / "a", options(shm_dir))
    assert caught.value.pid == os.getpid()
    PosixShmBackend(tmp_path / "b", options(shm_dir)).close()


def test_a_restarted_daemon_adopts_the_bytes_as_they_were(tmp_path: Path, shm_dir: Path) -> None:
    old = PosixShmBackend(tmp_path / "a", options(shm_dir))
    region = old.reserve(ask())
    (shm_dir / segments(shm_dir)[0]).write_bytes(b"warm" * (SIZE // 4))
    old.close(keep=True)
    new = PosixShmBackend(tmp_path / "a", options(shm_dir))
    (found,) = new.list_existing()
    assert (found.id, found.size_bytes) == (region.id, region.size_bytes)
    adopted = new.adopt(found)
    (fd,) = new.open_fds(adopted, read_only=True)
    assert os.pread(fd, SIZE, 0) == b"warm" * (SIZE // 4)
    os.close(fd)
    assert new.list_existing() == ()
    assert new.reclaim_stale().names == ()
    new.close()
    assert os.listdir(shm_dir) == []


def test_what_nobody_adopts_is_reclaimed(tmp_path: Path, shm_dir: Path) -> None:
    old = PosixShmBackend(tmp_path / "a", options(shm_dir))
    old.reserve(ask("kept"))
    old.reserve(ask("dropped"))
    old.close(keep=True)
    new = PosixShmBackend(tmp_path / "a", options(shm_dir))
    new.adopt(next(region for region in new.list_existing() if region.pool == "kept"))
    report = new.reclaim_stale()
    assert (len(report.names), report.reclaimed_bytes) == (1, SIZE)
    assert len(segments(shm_dir)) == 1
    new.close()


@pytest.mark.parametrize("damage", ["size", "mode", "holes", "gone"])
def test_a_damaged_segment_is_not_adopted(tmp_path: Path, shm_dir: Path, damage: str) -> None:
    old = PosixShmBackend(tmp_path / "a", options(shm_dir))
    old.reserve(ask())
    old.close(keep=True)
    new = PosixShmBackend(tmp_path / "a", options(shm_dir))
    (found,) = new.list_existing()
    path = shm_dir / segments(shm_dir)[0]
    {
        "size": lambda: os.truncate(path, SIZE // 2),
        "mode": lambda: path.chmod(0o666),
        "holes": lambda: (os.truncate(path, 0), os.truncate(path, SIZE)),
        "gone": path.unlink,
    }[damage]()
    with pytest.raises(UnknownRegion if damage == "gone" else RegionMismatch):
        new.adopt(found)
    new.reserve(ask())  # starts afresh under the same name
    new.close()


def _own(instance: Path, shm_dir: Path, ready: object) -> None:
    backend = PosixShmBackend(instance, options(shm_dir))
    backend.reserve(ask())
    ready.set()  # type: ignore[attr-defined]
    signal.pause()


def _start_owner(instance: Path, shm_dir: Path) -> multiprocessing.process.BaseProcess:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    owner = context.Process(target=_own, args=(instance, shm_dir, ready))
    owner.start()
    assert ready.wait(20)
    return owner


def test_another_instances_segments_go_only_when_it_is_long_dead(
    backend: PosixShmBackend, tmp_path: Path, shm_dir: Path
) -> None:
    """DMN-08."""
    (tmp_path / "b").mkdir()
    owner = _start_owner(tmp_path / "b", shm_dir)
    assert len(segments(shm_dir)) == 1
    assert backend.reclaim_stale().names == ()  # it lives
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join(20)
    report = backend.reclaim_stale()
    assert (report.names, len(report.left_alone)) == ((), 1)  # its successor may be about to adopt them
    later = PosixShmBackend(tmp_path / "c", options(shm_dir, now_s=lambda: time.time() + 4000))
    assert len(later.reclaim_stale().names) == 1
    later.close()
    assert segments(shm_dir) == []


def test_an_instance_whose_directory_is_gone_is_reclaimed_at_once(
    backend: PosixShmBackend, tmp_path: Path, shm_dir: Path
) -> None:
    """Demos and tests run daemons in temporary directories: nobody ever comes back for those."""
    for kept in (True, False):
        directory = tmp_path / "gone"
        directory.mkdir()
        owner = _start_owner(directory, shm_dir)
        os.kill(owner.pid or 0, signal.SIGKILL)
        owner.join(20)
        assert backend.reclaim_stale().names == ()
        if kept:
            (lock,) = set(shm_dir.glob("*.lock")) - {shm_dir / lock_name(instance_digest(tmp_path / "a"))}
            lock.write_text(lock.read_text().replace("mnt:", "another:"))  # from where we cannot see its directory
        directory.rmdir()
        assert len(backend.reclaim_stale().names) == (0 if kept else 1)
        if kept:
            for file in shm_dir.glob(f"*{instance_digest(directory)}*"):
                file.unlink()
    assert segments(shm_dir) == []
    assert len(list(shm_dir.glob("*.lock"))) == 1


def test_a_lock_that_guards_nothing_goes_with_its_directory(
    backend: PosixShmBackend, tmp_path: Path, shm_dir: Path
) -> None:
    owner = _start_owner(tmp_path / "never-made", shm_dir)
    for name in segments(shm_dir):
        (shm_dir / name).unlink()
    assert backend.reclaim_stale().names == ()
    assert len(list(shm_dir.glob("*.lock"))) == 2, "it lives"
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join(20)
    backend.reclaim_stale()
    assert len(list(shm_dir.glob("*.lock"))) == 1


def test_a_live_instance_is_never_reclaimed_however_old(tmp_path: Path, shm_dir: Path) -> None:
    owner = _start_owner(tmp_path / "b", shm_dir)
    later = PosixShmBackend(tmp_path / "c", options(shm_dir, now_s=lambda: time.time() + 1e9))
    assert later.reclaim_stale().names == ()
    assert len(segments(shm_dir)) == 1
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join(20)
    later.close()


def test_health_is_a_heartbeat(backend: PosixShmBackend, shm_dir: Path) -> None:
    (lock,) = shm_dir.glob("*.lock")
    os.utime(lock, (0, 0))
    assert backend.health().ok
    assert lock.stat().st_mtime > 1


def test_a_removed_name_does_not_hurt_the_daemon_or_new_workers(backend: PosixShmBackend, shm_dir: Path) -> None:
    """DMN-09."""
    region = backend.reserve(ask())
    (shm_dir / segments(shm_dir)[0]).unlink()
    exported = backend.export(region)
    assert exported.kind is ExportKind.FD
    (fd,) = backend.open_fds(region)
    assert os.fstat(fd).st_size == SIZE
    os.close(fd)
    assert "name removed" in backend.health().detail
    backend.reserve(ask(rank=1))
    backend.release(region)


def test_a_foreign_file_under_our_name_is_not_removed(backend: PosixShmBackend, shm_dir: Path) -> None:
    region = backend.reserve(ask())
    path = shm_dir / segments(shm_dir)[0]
    path.unlink()
    path.write_text("somebody else's")
    backend.release(region)
    assert path.read_text() == "somebody else's"


def test_a_symbolic_link_under_our_name_is_not_followed(
    backend: PosixShmBackend, shm_dir: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    name = parse_segment_name("kvhold.x.0.d.m")
    assert name is not None
    region = backend.reserve(ask())
    target = shm_dir / segments(shm_dir)[0]
    backend.release(region)
    target.symlink_to(victim)
    backend.reserve(ask())
    assert victim.read_text() == "precious"
    assert not target.is_symlink()


def test_a_file_system_that_is_too_small_says_so_before_use(tmp_path: Path) -> None:
    """K8S-05: names the directory, its size, and what to change."""
    backend = PosixShmBackend(tmp_path / "a")
    free_bytes = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
    with pytest.raises(ShmTooSmall) as caught:
        backend.reserve(ask(size_bytes=free_bytes * 2))
    assert caught.value.directory == "/dev/shm"
    assert caught.value.requested_bytes >= free_bytes * 2
    assert "sizeLimit" in str(caught.value)
    assert backend.list_existing() == ()
    backend.close()


def test_a_directory_that_is_not_there_makes_the_backend_unavailable(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable):
        PosixShmBackend(tmp_path, PosixShmOptions(directory=tmp_path / "nothing"))


def test_limits_of_machine_and_control_group_bind(tmp_path: Path, shm_dir: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    limits = HostLimits(meminfo=tmp_path / "meminfo", cgroup=cgroup)
    backend = PosixShmBackend(tmp_path / "a", options(shm_dir, limits=limits))
    with pytest.raises(HostMemoryTooSmall) as caught:
        backend.reserve(ask(size_bytes=1001 * 1024))
    assert caught.value.limit == "MemAvailable"
    (cgroup / "memory.max").write_text("500000\n")
    (cgroup / "memory.current").write_text("400000\n")
    (cgroup / "memory.stat").write_text("anon 1\ninactive_file 20000\nactive_file 1000\n")
    kept = backend.reserve(ask("other", size_bytes=4096))
    with pytest.raises(HostMemoryTooSmall) as caught:
        backend.reserve(ask(size_bytes=200000))
    assert caught.value.limit.endswith("memory.max")
    assert caught.value.free_bytes == 121000
    assert "pool other" in caught.value.holders
    (cgroup / "memory.max").write_text("max\n")
    backend.reserve(ask(size_bytes=200000))
    backend.release(kept)
    backend.close()


def test_explicit_huge_pages_are_for_memfd(tmp_path: Path, shm_dir: Path) -> None:
    wanted = HostPageOptions(huge_pages=HugePages.EXPLICIT)
    backend = PosixShmBackend(tmp_path, options(shm_dir, pages=wanted))
    with pytest.raises(HugePagesUnavailable):
        backend.reserve(ask())
    assert segments(shm_dir) == []
    backend.close()
