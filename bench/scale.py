"""How costs grow: schedulers on a daemon, blocks of a pool, running sequences, pools; and what a flood does.

    python bench/scale.py [--steps 300] [--only-fairness]

Every scheduler is a process with decoding sequences, 1 of 16 of which needs a block in each step. Time is what its step
takes, from begin to the answer in its tables.
"""

import argparse
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from stage import Cores, Daemon, choose_cores, daemon

from kvhold_client import Client, PoolRequest
from kvhold_client.shape import GroupShape

BLOCK = 16
HASH_BYTES = 32
ADMIT_TOGETHER = 64
MAX_FAIRNESS = 3.0
FAIRNESS_ROUNDS = 3
MIN_FAIRNESS_STEPS = 400  # of fewer steps, p99 is the one that meets the start of the neighbour's process


# --------------------------------------------------------------------------------------------------- one scheduler
def schedule(options: argparse.Namespace) -> dict[str, float]:
    """Decodes for a while and returns what a step took. Body of a worker process."""
    if options.gives_way:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    client = Client(options.target)
    pool = client.open_pool(simulated(options.pool, options.blocks))
    session = pool.open_session(
        client_name=f"scale-{os.getpid()}",
        local_transport=options.transport == "local",
        step_stream=options.transport == "grpc",
    )
    table = session.table
    digests = map(_digest, itertools.count(options.running))  # nobody else's: nothing is hit
    running = [table.new_sequence(i + 1, b"".join(itertools.islice(digests, 4))) for i in range(options.running)]
    for start in range(0, len(running), ADMIT_TOGETHER):
        session.begin_step()
        for i, sequence in enumerate(running[start : start + ADMIT_TOGETHER], start):
            table.admit(sequence, num_tokens=64 + i % BLOCK)
        table.flush()
    tokens = [64 + i % BLOCK for i in range(len(running))]
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    times, cpu, begun = [], time.thread_time(), time.perf_counter()
    while len(times) < options.steps and not stopped:
        start_s = time.perf_counter()
        session.begin_step()
        if not running:
            session.step(session.builder().encode())
        for i, sequence in enumerate(running):
            tokens[i] += 1
            if tokens[i] > sequence.quiet_tokens:
                sequence.add_hashes(next(digests))
                done = tokens[i] - 1
                table.extend(sequence, slots_needed=tokens[i], processed_tokens=done, publish_tokens=done)
        table.flush()
        times.append(time.perf_counter() - start_s)
        if options.think_ms:
            time.sleep(options.think_ms / 1e3)
    elapsed, cpu = time.perf_counter() - begun, time.thread_time() - cpu
    for sequence in running:
        table.finish(sequence)
    session.idle()
    session.close()
    client.close()
    cuts = statistics.quantiles(times, n=100)
    return {
        "p50_us": cuts[49] * 1e6,
        "p99_us": cuts[98] * 1e6,
        "mean_us": statistics.fmean(times) * 1e6,
        "cpu_us": cpu / len(times) * 1e6,
        "steps_per_s": len(times) / elapsed,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def simulated(name: str, num_blocks: int) -> PoolRequest:
    """A pool of plain blocks, without memory."""
    groups = (GroupShape(kind="full", block_size_tokens=BLOCK),)
    return PoolRequest(
        name=name, simulated_groups=groups, simulated_num_blocks=num_blocks, max_model_len_tokens=1 << 20
    )


def _digest(number: int) -> bytes:
    return os.getpid().to_bytes(8, "big") + number.to_bytes(HASH_BYTES - 8, "big")


def start(live: Daemon, core: int, **options: Any) -> "subprocess.Popen[str]":
    """A scheduler process on this core."""
    command = ["taskset", "-c", str(core), sys.executable, __file__, "--worker", "--target", live.target]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def outcome(worker: "subprocess.Popen[str]") -> dict[str, float]:
    """Waits for it."""
    text, _ = worker.communicate(timeout=600)
    if worker.returncode:
        raise RuntimeError(f"a scheduler process failed with {worker.returncode}")
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


def one(live: Daemon, cores: Cores, **options: Any) -> dict[str, float]:
    """A single scheduler's measurement."""
    return outcome(start(live, cores.scheduler, **options))


# -------------------------------------------------------------------------------------------------------- the sweeps
def row(label: str, found: dict[str, float], live: Daemon) -> str:
    """One line of the report."""
    return (
        f"{label:34} p50 {found['p50_us']:7.0f}   p99 {found['p99_us']:7.0f} µs  "
        f"{found['steps_per_s']:7.0f} steps/s   "
        f"memory: scheduler {found['rss_mb']:.0f} MB, daemon {live.rss_bytes() / 2**20:.0f} MB"
    )


def schedulers(live: Daemon, cores: Cores, steps: int) -> Iterator[str]:
    """1 to 8 of them share a pool and, but for the daemon's, a core."""
    for num in (1, 2, 4, 8):
        workers = [
            start(live, cores.scheduler, pool="shared", running=256, steps=steps, blocks=200_000, think_ms=5)
            for _ in range(num)
        ]
        found = [outcome(worker) for worker in workers]
        together = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
        together["steps_per_s"] = sum(each["steps_per_s"] for each in found)
        together["p99_us"] = max(each["p99_us"] for each in found)
        yield row(f"{num} schedulers, one pool", together, live)


def sizes(live: Daemon, cores: Cores, steps: int) -> Iterator[str]:
    """Blocks, running sequences, pools."""
    for blocks in (10_000, 100_000, 1_000_000):
        found = one(live, cores, pool=f"blocks-{blocks}", running=256, steps=steps, blocks=blocks)
        yield row(f"{blocks:,} blocks, 256 running", found, live)
    for running in (16, 256, 1024, 4096):
        found = one(live, cores, pool=f"running-{running}", running=running, steps=steps, blocks=400_000)
        yield row(f"{running} running", found, live)
    with Client(live.target) as client:
        for num in (1, 4, 16):
            for i in range(num):
                client.open_pool(simulated(f"pool-{i}", 100_000))
            found = one(live, cores, pool=f"many-{num}", running=256, steps=steps, blocks=100_000)
            yield row(f"{num} more pools, 256 running", found, live)


def fairness(live: Daemon, cores: Cores, steps: int) -> tuple[str, float]:
    """p99 of a scheduler beside one that floods, over its p99 beside one that works like itself; median of rounds.

    The daemon is judged, not who gets the schedulers' core: the neighbour, in both cases, gives way whenever the
    scheduler can run, and goes on while that waits or thinks.
    """

    def beside(**other: Any) -> tuple[float, float]:
        neighbour = start(live, cores.scheduler, pool="other", blocks=400_000, steps=10**9, gives_way=1, **other)
        time.sleep(1.0)
        found = one(live, cores, pool="victim", running=256, steps=steps, blocks=100_000, think_ms=2)
        neighbour.terminate()
        return found["p99_us"], outcome(neighbour)["steps_per_s"]

    rounds = []
    for _ in range(FAIRNESS_ROUNDS):
        quiet, _ = beside(running=256, think_ms=2)
        flooded, pace = beside(running=4096)
        rounds.append((flooded / quiet, quiet, flooded, pace))
    rounds.sort()
    ratio, quiet, flooded, pace = rounds[len(rounds) // 2]
    text = (
        f"p99 {quiet:.0f} µs beside its like, {flooded:.0f} µs beside a flood of 4096 sequences without pause "
        f"({pace:.0f} steps/s; neighbours give way on the core that they share), {ratio:.1f}×, "
        f"spread {rounds[0][0]:.1f}–{rounds[-1][0]:.1f}"
    )
    return text, ratio


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only-fairness", action="store_true")
    hidden = argparse.SUPPRESS
    parser.add_argument("--worker", action="store_true", help=hidden)
    parser.add_argument("--target", help=hidden)
    parser.add_argument("--transport", default="local", help=hidden)
    parser.add_argument("--pool", default="scale", help=hidden)
    parser.add_argument("--blocks", type=int, default=100_000, help=hidden)
    parser.add_argument("--running", type=int, default=256, help=hidden)
    parser.add_argument("--think-ms", type=float, default=0.0, help=hidden)
    parser.add_argument("--gives-way", type=int, default=0, help=hidden)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.worker:
        print(json.dumps(schedule(options)))
        return 0
    cores = choose_cores()
    with daemon(cores) as live:
        sweeps = () if options.only_fairness else (schedulers, sizes)
        for line in chain.from_iterable(sweep(live, cores, options.steps) for sweep in sweeps):
            print(line, flush=True)
        text, ratio = fairness(live, cores, max(MIN_FAIRNESS_STEPS, options.steps))
        print(f"fairness: {text} (at most {MAX_FAIRNESS:g}×)")
    return int(ratio > MAX_FAIRNESS)


if __name__ == "__main__":
    sys.exit(main())
