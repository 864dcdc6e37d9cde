"""Owner and workers as separate processes over real memory: on a GPU with the marker `gpu`, and on the CPU always.

pytest -m gpu tests/gpu -s      prints what docs/gpu.md records
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhold_client.layout import LAYOUTS
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.memory.cuda_driver import UNKNOWN_BYTES, BindingsDriver
from kvhold_server.memory.cuda_ipc import CudaIpcBackend
from kvhold_server.memory.cuda_vmm import CudaVmmBackend
from kvhold_server.memory.errors import BackendUnavailable, OutOfDeviceMemory

pytest.importorskip("torch")
HERE = Path(__file__).resolve().parent
HAS_GPU = Path("/dev/nvidiactl").exists()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device on this machine")
BACKENDS = [
    "memfd",
    pytest.param("cuda_vmm", marks=[pytest.mark.gpu, needs_gpu]),
    pytest.param("cuda_ipc", marks=[pytest.mark.gpu, needs_gpu]),
]
MIB = 1 << 20


class Process:
    """A helper script that speaks JSON lines."""

    def __init__(self, script: str, *arguments: str) -> None:
        repo = HERE.parents[1]
        path = os.pathsep.join(str(repo / part) for part in ("", "proto", "server", "client"))
        self.popen = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def read(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"it ended with status {self.popen.wait()}"
        return json.loads(line)

    def say(self, line: str) -> Any:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()
        return self.read()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                stream.close()


class Machine:
    """Starts owners and workers, and ends them all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Process] = []

    def owner(self, backend: str, size_bytes: int = 4 * MIB, num_tokens: int = 16) -> tuple[Process, dict[str, Any]]:
        path = self._directory / f"{len(self._started)}.sock"
        owner = Process("owner.py", backend, str(path), str(size_bytes), str(num_tokens))
        self._started.append(owner)
        return owner, owner.read()

    def worker(self, how: dict[str, Any], layout: str = "LBNHC") -> tuple[Process, dict[str, Any]]:
        token = how["tokens"].pop() if how["tokens"] else ""
        worker = Process("worker.py")
        self._started.append(worker)
        return worker, worker.say(json.dumps({"export": {**how, "token": token}, "layout": layout}))

    def close(self) -> None:
        for process in self._started:
            process.kill()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


@pytest.mark.slow
@pytest.mark.timeout(300)  # three processes that import torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_share_an_owners_memory_and_outlive_it(machine: Machine, backend: str) -> None:
    owner, how = machine.owner(backend)
    writer, mapped = machine.worker(how, "BLHNC")
    assert mapped["device"].startswith("cpu" if backend == "memfd" else "cuda")
    assert writer.say("write")
    reader, _ = machine.worker(how, "BLHNC")
    assert reader.say("matches")
    writer.kill()
    assert reader.say("matches"), "an importer's death takes nothing from the others"
    if backend != "cuda_ipc":  # legacy handles die with the exporter
        owner.kill()
        assert reader.say("matches"), "the memory lives as long as somebody maps it"
    assert reader.say("copies")
    assert reader.say("unmap")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_crosses_processes_on_the_device(machine: Machine, layout: str) -> None:
    _, how = machine.owner("cuda_vmm")
    writer, _ = machine.worker(how, layout)
    assert writer.say("write")
    reader, _ = machine.worker(how, layout)
    assert reader.say("matches")


@pytest.fixture
def vmm() -> Iterator[CudaVmmBackend]:
    try:
        backend = CudaVmmBackend(BindingsDriver("cuda_vmm"), chunk_bytes=64 * MIB)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    yield backend
    backend.close()


def ask(size_bytes: int, rank: int = 0) -> RegionRequest:
    return RegionRequest(pool=PoolName("m"), rank=rank, size_bytes=size_bytes)


@pytest.mark.gpu
def test_a_thousand_reservations_and_exports_leak_no_device_memory(vmm: CudaVmmBackend) -> None:
    device = vmm.usage().devices[0]
    if device.free_bytes == UNKNOWN_BYTES:
        pytest.skip("no NVML: nobody can say how much is free")
    for _ in range(1000):
        region = vmm.reserve(ask(2 * MIB))
        for fd in vmm.open_fds(region):
            os.close(fd)
        vmm.release(region)
    assert vmm.usage().devices[0].free_bytes >= device.free_bytes - 64 * MIB


@pytest.mark.gpu
def test_a_full_device_says_so_and_keeps_what_it_had(vmm: CudaVmmBackend) -> None:
    device = vmm.usage().devices[0]
    with pytest.raises(OutOfDeviceMemory) as caught:
        vmm.reserve(ask(device.total_bytes + 64 * MIB))
    assert caught.value.total_bytes == device.total_bytes
    vmm.reserve(ask(64 * MIB))


@pytest.mark.gpu
def test_a_region_grows_and_shrinks_by_chunks(vmm: CudaVmmBackend) -> None:
    region = vmm.reserve(ask(128 * MIB))
    grown = vmm.resize(region, 256 * MIB)
    assert vmm.export(grown).chunk_sizes_bytes == (64 * MIB,) * 4
    assert vmm.resize(grown, 100 * MIB).size_bytes == 128 * MIB


@pytest.mark.gpu
def test_descriptors_alone_keep_device_memory(vmm: CudaVmmBackend) -> None:
    """What the holder relies on: nobody has imported the memory, and its owner has released it."""
    free_bytes = vmm.usage().devices[0].free_bytes
    if free_bytes == UNKNOWN_BYTES:
        pytest.skip("no NVML: nobody can say how much is free")
    region = vmm.reserve(ask(1 << 30))
    fds = vmm.open_fds(region)
    vmm.release(region)
    assert vmm.usage().devices[0].free_bytes <= free_bytes - (1 << 29)
    for fd in fds:
        os.close(fd)
    assert vmm.usage().devices[0].free_bytes >= free_bytes - (1 << 28)


@pytest.mark.gpu
def test_ipc_exports_are_whole_and_typed() -> None:
    try:
        backend = CudaIpcBackend(BindingsDriver("cuda_ipc"))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    exported = backend.export(backend.reserve(ask(4 * MIB)))
    assert len(exported.handle) == 64 and exported.offset_bytes >= 0
    backend.close()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size_gib", [1, 8, 32])
def test_times_of_reserving_exporting_and_mapping(machine: Machine, size_gib: int) -> None:
    driver = BindingsDriver("cuda_vmm")
    if driver.total_bytes(0) < (size_gib + 4) << 30:
        pytest.skip("the device is smaller")
    started_s = time.perf_counter()
    _, how = machine.owner("cuda_vmm", size_gib << 30)
    _, mapped = machine.worker(how)
    reserve_ms, map_ms = how["reserve_s"] * 1e3, mapped["map_s"] * 1e3
    print(f"\n{how['device_uuid']} {size_gib} GiB in {how['num_chunks']} chunks:", end=" ")
    print(f"reserve {reserve_ms:.1f} ms, fetch and map {map_ms:.1f} ms, all {time.perf_counter() - started_s:.1f} s")
    assert mapped["device"].startswith("cuda")
