"""A million steps through gRPC: does anything grow? `python -m tests.chaos.soak --steps 1000000`

Two clients step as fast as they can: each step frees the oldest of 32 sequences and admits a new one, every tenth of
which repeats an earlier prompt. Sessions are closed and opened again every 10 000 steps. The daemon's resident memory
and the shared memory of its pool are looked at 20 times. After the first quarter, until which the bounded memory of
evicted hashes fills, they must stay where they are. Single looks at resident memory differ by a few per cent in both
directions (garbage, pages that the kernel takes back): the median of the last third is compared with the first one's.
"""

import argparse
import hashlib
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from kvhold_client.client import Client
from kvhold_client.local_daemon import LocalDaemon
from kvhold_client.pools import PoolRequest
from kvhold_server.memory.segment_names import instance_digest
from tests.chaos.world import end_in_order, plan_request

POOL = "soak"
NUM_LIVE = 32
STEPS_PER_SESSION = 10_000
NUM_CLIENTS = 2
NUM_LOOKS = 20
MAX_GROWTH = 0.03  # of resident memory, after warm-up


def prompt(number: int) -> tuple[int, bytes]:
    """Tokens and digests of a prompt."""
    choice = random.Random(number)
    num_hashes = choice.randint(1, 12)
    digests = b"".join(hashlib.sha256(b"%d %d" % (number, i)).digest() for i in range(num_hashes))
    return 16 * num_hashes + choice.randint(1, 15), digests


def run_client(target: str, index: int, num_steps: int, done: "multiprocessing.sharedctypes.Synchronized[int]") -> None:
    """Steps without a pause, over gRPC alone; no longer than the program that started it."""
    threading.Thread(target=_end_with_parent, args=(target,), daemon=True).start()
    number, choice = index * 10**9, random.Random(index)
    with Client(target) as client:
        pool = client.get_pool(POOL)
        for begin in range(0, num_steps, STEPS_PER_SESSION):
            with pool.open_session(client_name=f"soak-{index}", local_transport=False) as session:
                alive: deque[int] = deque()
                builder = session.builder()
                for _ in range(min(STEPS_PER_SESSION, num_steps - begin)):
                    number += 1
                    session.begin_step()
                    builder.clear()
                    if len(alive) == NUM_LIVE:
                        builder.free(alive.popleft())
                    repeats = choice.random() < 0.1
                    earlier = max(index * 10**9 + 1, number - choice.randint(1, 1000))
                    tokens, digests = prompt(earlier if repeats else number)
                    builder.admit(number, num_tokens=tokens, hashes=digests)
                    session.step(builder.encode())
                    alive.append(number)
                    done.value += 1


def _end_with_parent(target: str) -> None:
    """Also removes the pool's memory: the daemon, which ends as well, keeps it for a successor that will not come."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    remove_segments(Path(target.removeprefix("unix:")).parent)
    os._exit(1)


def segments(directory: Path) -> list[Path]:
    """Shared memory of the daemon of this directory, its lock included."""
    return list(Path("/dev/shm").glob(f"kvhold.{instance_digest(directory)}.*"))


def remove_segments(directory: Path) -> None:
    """For a daemon that nobody comes after."""
    for path in segments(directory):
        path.unlink(missing_ok=True)


def resident_bytes(pid: int) -> int:
    """Of a process, shared mappings of files left out."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not say RssAnon")


def shared_bytes(directory: Path) -> int:
    """Of all segments of the daemon."""
    return sum(path.stat().st_blocks * 512 for path in segments(directory))


def main() -> int:
    """Exit code 0: flat."""
    parser = argparse.ArgumentParser(description="A million steps through gRPC: does anything grow?")
    parser.add_argument("--steps", type=int, default=1_000_000)
    arguments = parser.parse_args()
    end_in_order()
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsoak-"))
        stack.callback(remove_segments, Path(name))
        daemon = stack.enter_context(LocalDaemon(directory=Path(name)))
        with Client(daemon.target) as client:
            client.open_pool(PoolRequest(name=POOL, plan=plan_request(), backend="posix_shm"))
        context = multiprocessing.get_context("spawn")
        share = arguments.steps // NUM_CLIENTS
        done = [context.Value("q", 0) for _ in range(NUM_CLIENTS)]
        clients = [
            context.Process(target=run_client, args=(daemon.target, i, share, done[i])) for i in range(NUM_CLIENTS)
        ]
        for process in clients:
            process.start()
            stack.callback(process.terminate)  # before the daemon ends: they would look for it for its grace period
        looks = watch(daemon, Path(name), done, share * NUM_CLIENTS)
        for process in clients:
            process.join()
        with Client(daemon.target) as client:
            counts = client.get_pool(POOL).status().counts
            client.delete_pool(POOL, force=True)
        left = shared_bytes(Path(name))
    flat = looks[len(looks) // 4 :]
    growth = growth_of([rss for rss, _ in flat])
    is_flat = growth < MAX_GROWTH and len({shm for _, shm in flat}) == 1
    is_clean = counts.num_held_blocks == 0 and all(process.exitcode == 0 for process in clients)
    print(f"growth of resident memory after warm-up {growth:.1%}; blocks held at the end {counts.num_held_blocks}")
    print("PASS" if is_flat and is_clean and left < 4096 * 2 else "FAIL")
    return 0 if is_flat and is_clean else 1


def growth_of(looks: list[int]) -> float:
    """Share by which the last third lies above the first one; of medians."""
    third = max(1, len(looks) // 3)
    return statistics.median(looks[-third:]) / statistics.median(looks[:third]) - 1


def watch(daemon: LocalDaemon, directory: Path, done: list, total: int) -> list[tuple[int, int]]:  # type: ignore[type-arg]
    """(resident, shared) bytes at equal distances."""
    looks: list[tuple[int, int]] = []
    started = time.monotonic()
    while len(looks) < NUM_LOOKS:
        steps = sum(value.value for value in done)
        if steps >= total * (len(looks) + 1) // NUM_LOOKS:
            looks.append((resident_bytes(daemon.pid), shared_bytes(directory)))
            rate = steps / (time.monotonic() - started)
            rss, shm = (value / 2**20 for value in looks[-1])
            print(f"{steps:9d} steps  {rate:6.0f}/s  resident {rss:7.1f} MiB  shared {shm:7.1f} MiB", flush=True)
        time.sleep(0.1)
    return looks


if __name__ == "__main__":
    os.environ.pop("KVHOLD_TARGET", None)
    sys.exit(main())
