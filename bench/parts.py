"""Beside the yardstick: the daemon's CPU, large pools, an empty step, hashing, planner, scrapes, scale."""

import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

import scale
from stage import HERE, Cores, Daemon, daemon, simulate
from targets import BEST, GRPC

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, PoolConfig
from kvhold_server.pool.pool import Pool

MILLION = 1_000_000
MAX_OPEN_S = 0.5
MAX_HEAP_BYTES = 100
DAEMON_CPU_US = {GRPC: 400.0, BEST: 200.0}
SHARE_OF_NOISE = 0.15  # of a part that is measured once


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One line; `limit` 0: nothing is wanted of it."""

    label: str
    text: str
    value: float = 0.0
    limit: float = 0.0

    @property
    def is_missed(self) -> bool:
        """Above the limit by more than the noise."""
        return self.limit > 0 and self.value > self.limit * (1 + SHARE_OF_NOISE)


def measure_parts(cores: Cores, *, is_full: bool) -> list[Part]:
    """All of them, in order."""
    parts = []
    for part in _parts(cores, is_full=is_full):
        print(f"  {part.label}: {part.text}", flush=True)
        parts.append(part)
    return parts


def _parts(cores: Cores, *, is_full: bool) -> Iterator[Part]:
    for way, limit in DAEMON_CPU_US.items():
        value = daemon_cpu_us(cores, way, "decode", 256, 1500 if is_full else 400)
        text = f"{value:.0f} µs (at most {limit:.0f})"
        yield Part(label=f"daemon CPU per step at 256 running, {way}", text=text, value=value, limit=limit)
    for mode in ("lookup", "admit-free"):
        value = daemon_cpu_us(cores, GRPC, mode, 1024, 300)
        yield Part(label=f"daemon CPU per step, {mode} 1024, {GRPC}", text=f"{value:.0f} µs")
    yield from empty_steps(cores)
    yield tool("echo over three transports", "transports.py", "--calls", "2000" if is_full else "500")
    yield from large_pool()
    yield tool("pool: opening, heap, hashing, freeing", "pool.py")
    yield tool("hashing", "hashing.py", "--tokens", "131072" if is_full else "32768")
    yield tool("planner", "planner.py")
    yield tool("scrape", "scrape.py", *(() if is_full else ("--rounds", "12")))
    yield tool("where a step's time goes in the daemon", "step_handling.py", "--items", "16")
    yield tool("a prompt of 8,192 cached blocks in the daemon", "long_prompt.py")
    yield tool("a prompt of 1,024 cached blocks in the daemon", "long_prompt.py", "--blocks", "1024")
    yield tool("messages at their limits", "limits.py")
    yield tool("scale and fairness", "scale.py", "--steps", "300" if is_full else "100")


def daemon_cpu_us(cores: Cores, way: str, mode: str, size: int, num_steps: int) -> float:
    """From two runs that differ only in the number of steps: what filling the pool costs cancels out."""
    used = []
    with daemon(cores) as live:
        for steps in (50, 50 + num_steps):
            before = live.cpu_s()
            arguments = [mode, "--sizes", str(size), "--gap-ms", "1", "--micro-steps", str(steps)]
            simulate(live, cores, way, arguments)
            used.append(live.cpu_s() - before)
    return (used[1] - used[0]) / num_steps * 1e6


def empty_steps(cores: Cores) -> Iterator[Part]:
    """The floor of each transport: a step that asks for nothing."""
    with daemon(cores) as live:
        for transport in ("local", "grpc", "grpc-unary"):
            found = scale.one(live, cores, transport=transport, running=0, steps=1000, pool=f"empty-{transport}")
            warm, cold = (empty_step_cpu_us(live, cores, transport, pause_ms) for pause_ms in (0.0, 3.0))
            text = (
                f"p50 {found['p50_us']:.0f} µs, p99 {found['p99_us']:.0f} µs, CPU: scheduler {found['cpu_us']:.0f} µs"
            )
            text += f", daemon {warm:.0f} µs, and {cold:.0f} µs if 3 ms lie between steps"
            yield Part(label=f"empty step, {transport}", text=text)


def empty_step_cpu_us(live: Daemon, cores: Cores, transport: str, pause_ms: float) -> float:
    """Of the daemon. From two runs, as in `daemon_cpu_us`."""
    used: list[float] = []
    for steps in (50, 450):
        before = live.cpu_s()
        pool = f"empty-{transport}-{pause_ms}-{steps}"
        scale.one(live, cores, transport=transport, running=0, steps=steps, pool=pool, think_ms=pause_ms)
        used.append(live.cpu_s() - before)
    return (used[1] - used[0]) / 400 * 1e6


def large_pool() -> Iterator[Part]:
    """A million blocks: time and heap of opening."""
    config = PoolConfig(
        groups=(GroupConfig(kind=GroupKind.FULL, block_size_tokens=16),),
        num_blocks=MILLION,
        hash_unit_tokens=16,
        scheduler_block_tokens=16,
        max_model_len=1 << 20,
    )
    begun = time.perf_counter()
    pool = Pool(config)
    seconds = time.perf_counter() - begun
    del pool
    tracemalloc.start()
    pool = Pool(config)
    heap = tracemalloc.get_traced_memory()[0] / MILLION
    tracemalloc.stop()
    assert pool.counts().total == MILLION
    text = f"{seconds:.3f} s (at most {MAX_OPEN_S:g})"
    yield Part(label="1M-block pool: open", text=text, value=seconds, limit=MAX_OPEN_S)
    text = f"{heap:.0f} bytes (at most {MAX_HEAP_BYTES})"
    yield Part(label="1M-block pool: heap per block", text=text, value=heap, limit=MAX_HEAP_BYTES)


def tool(label: str, script: str, *arguments: str) -> Part:
    """Runs a script of this directory; its exit status says whether it missed a target of its own."""
    if not (HERE / script).exists():
        return Part(label=label, text=f"bench/{script} is not there")
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, env=dict(os.environ))
    text = done.stdout.strip() or done.stderr.strip()[-400:]
    return Part(label=label, text=text, value=float(done.returncode != 0) * 2, limit=1.0)
