"""How long a daemon is away when it is killed and restarted on a full pool. `python -m tests.chaos.recovery_time`

a pool of N blocks, every one recorded ─▶ SIGKILL ─▶ start ─▶ first answer about the pool, and how many were kept
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvhold.v1 import plan_pb2
from kvhold_client.client import Client
from kvhold_client.errors import KvholdError
from kvhold_client.leash import leashed
from kvhold_client.pools import PoolRequest
from kvhold_server.app import Daemon
from kvhold_server.config import ServerConfig
from tests.chaos.world import REPO, end_in_order

POOL = "full"
PAGE_BYTES = 512


def plan_request(num_blocks: int) -> plan_pb2.PlanRequest:
    """One layer with pages as small as they get."""
    geometry = plan_pb2.AttentionGeometry(num_kv_heads=1, head_size_elems=8, dtype=plan_pb2.DTYPE_BFLOAT16)
    spec = plan_pb2.LayerSpec(block_size_tokens=16, geometry=geometry, full_attention=plan_pb2.FullAttention())
    config = plan_pb2.PlannerConfig(
        layout=plan_pb2.LAYOUT_LBNHC,
        max_model_len_tokens=4096,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        num_blocks_override=num_blocks,
    )
    rank = plan_pb2.Rank(
        available_memory_bytes=2 * num_blocks * PAGE_BYTES,
        layers=[plan_pb2.Layer(layer_name="layers.0", layer_spec_index=0)],
    )
    return plan_pb2.PlanRequest(config=config, layer_specs=[spec], ranks=[rank])


async def fill(directory: Path, num_blocks: int) -> None:
    """Makes the pool, and records every block of it in a random order of use."""
    daemon = Daemon(ServerConfig(socket=str(directory / "k.sock"), state_dir=str(directory)))
    await daemon.start()
    with Client(f"unix:{directory}/k.sock") as client:
        request = PoolRequest(name=POOL, plan=plan_request(num_blocks), backend="posix_shm")
        await asyncio.to_thread(client.open_pool, request)
    live = daemon.node.pool(POOL)
    assert live.journal is not None and live.config.num_blocks == num_blocks
    blocks = list(range(1, num_blocks))
    random.Random(1).shuffle(blocks)
    raw = random.Random(2).randbytes(32 * len(blocks))
    hashes = [digest for (digest,) in struct.iter_unpack("32s", raw)]
    live.journal.table.record(blocks, [0] * len(blocks), hashes, [16] * len(blocks))
    await daemon.close()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far: what a start takes on a machine that has nothing else to do."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def time_start(directory: Path, environment: dict[str, str]) -> tuple[float, float, int]:
    """Starts a daemon; returns (seconds until the pool answers, processor seconds, blocks kept), then kills it."""
    command = leashed("kvhold_server", "serve", "--socket", str(directory / "k.sock"), "--state-dir", str(directory))
    started = time.monotonic()
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        with Client(f"unix:{directory}/k.sock", timeout_s=10.0) as client:
            while True:
                try:
                    counts = client.get_pool(POOL).status().counts
                    return time.monotonic() - started, cpu_seconds(process.pid), counts.num_cached_blocks
                except KvholdError:
                    if process.poll() is not None:
                        raise
                    time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def main() -> int:
    """Prints one line a restart."""
    parser = argparse.ArgumentParser(description="Time from a daemon's start to its first answer, on a full pool.")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--restarts", type=int, default=5)
    arguments = parser.parse_args()
    end_in_order()
    directory = Path(tempfile.mkdtemp(prefix="kvrecovery-"))
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(str(REPO / part) for part in ("proto", "server", "client")),
        "PYTHONPYCACHEPREFIX": str(directory / "bytecode"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        asyncio.run(fill(directory, arguments.blocks))
        for number in range(arguments.restarts + 1):
            seconds, cpu, kept = time_start(directory, environment)
            if number:  # the first one compiles
                print(f"{seconds:.2f} s ({cpu:.2f} s of processor), {kept} of {arguments.blocks - 1} blocks kept")
    finally:
        daemon = Daemon(ServerConfig(socket=str(directory / "k.sock"), state_dir=str(directory), keep_pools=False))
        for backend in daemon.backends.values():
            backend.reclaim_stale()
            backend.close()
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
