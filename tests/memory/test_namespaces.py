"""K8S-01: a worker in namespaces of its own shares one directory with the daemon, and maps the memory all the same."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvhold_client.mapping import RankLayout
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.memory.memfd import MemfdBackend
from kvhold_server.rpc.fd_channel import FdChannel, OpenedRegion, PeerMapping
from kvhold_server.rpc.fd_tokens import FdGrant
from tests.client.mapping_cases import one_group_layout, region_bytes

ISOLATED = ["unshare", "--user", "--map-root-user", "--pid", "--ipc", "--net", "--mount", "--uts", "--fork"]

WORKER = """
import ctypes, os, sys, time
from kvhold_client.host_memory import RegionExport
from kvhold_client.mapping import map_region
from tests.client.mapping_cases import one_group_layout, region_bytes
path, token, size = sys.argv[1:]
if ctypes.CDLL(None).mount(b"none", b"/dev/shm", b"tmpfs", 0, None):
    sys.exit("cannot hide /dev/shm")
assert os.listdir("/dev/shm") == []
assert os.getpid() < 10, "a PID namespace of its own"
layout = one_group_layout("BLNHC")
export = RegionExport(size_bytes=int(size), fd_socket_path=path, fd_token=bytes.fromhex(token))
region = map_region([export], layout, library="numpy")
assert (region.views["layers.1"][2] == 42).all()
region.views["layers.2"][3] = 43
print("read and written", flush=True)
time.sleep(60)
"""


def can_isolate() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ISOLATED, "true"], capture_output=True, timeout=30).returncode == 0


async def test_a_worker_in_isolated_namespaces_reads_and_writes_the_pool(tmp_path: Path, repo_dir: Path) -> None:
    if not can_isolate():
        pytest.skip("this kernel or sandbox refuses unprivileged namespaces")
    layout = one_group_layout("BLNHC")
    backend = MemfdBackend()
    region = backend.reserve(RegionRequest(pool=PoolName("m"), rank=0, size_bytes=region_bytes(layout)))
    (fd,) = backend.open_fds(region)
    _stamp(fd, layout, "layers.1", block=2, value=42)
    gone: list[PeerMapping] = []
    mapped: list[PeerMapping] = []
    channel = FdChannel(
        tmp_path / "fd.sock",
        open_region=lambda grant: OpenedRegion(exported=backend.export(region), fds=backend.open_fds(region)),
        on_peer_mapped=mapped.append,
        on_peer_gone=gone.append,
    )
    await channel.start()
    token = channel.issue(FdGrant(owner="", pool=PoolName("m"), rank=0))
    path = os.pathsep.join(str(repo_dir / part) for part in ("", "proto", "client"))
    worker = await asyncio.create_subprocess_exec(
        *ISOLATED, sys.executable, "-c", WORKER, str(channel.path), token.hex(), str(region.size_bytes),
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    assert worker.stdout is not None
    assert (await asyncio.wait_for(worker.stdout.readline(), 60)).strip() == b"read and written"
    assert _first_element(fd, layout, "layers.2", block=3) == 43
    assert len(mapped) == 1 and not gone
    os.killpg(worker.pid, signal.SIGKILL)
    for _ in range(400):
        if gone:
            break
        await asyncio.sleep(0.01)
    assert gone == mapped
    await worker.wait()
    await channel.close()
    os.close(fd)
    backend.close()


def _stamp(fd: int, layout: RankLayout, layer: str, *, block: int, value: int) -> None:
    placement = layout.placement_of(layer)
    page = value.to_bytes(2, "little") * (placement.used_page_bytes // 2)
    os.pwrite(fd, page, _page_offset(layout, layer, block))


def _first_element(fd: int, layout: RankLayout, layer: str, *, block: int) -> int:
    return int.from_bytes(os.pread(fd, 2, _page_offset(layout, layer, block)), "little")


def _page_offset(layout: RankLayout, layer: str, block: int) -> int:
    placement = layout.placement_of(layer)
    index = placement.layer_names.index(layer)
    return placement.offset_bytes + index * placement.layer_stride_bytes + block * placement.block_stride_bytes
