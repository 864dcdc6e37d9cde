"""Chaos: real schedulers with real bytes, a real daemon, and somebody who kills them.

    schedulers ──▶ proxy ──▶ daemon          every half second or so one fault out of faults.KINDS
        │                      │
        └── stamped blocks ────┘             checked: bytes of every hit and every table, every invariant, every record

At the end everybody finishes, and nothing may be left: all blocks free or cached, no session, no segment.

    python -m tests.chaos.harness --seconds 600 --seed 7
"""

import argparse
import collections
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvhold_client.errors import KvholdError
from tests.chaos.faults import KINDS, FaultKind
from tests.chaos.world import POOL, World, end_in_order, have_own_mounts

FINISH_TIMEOUT_S = 40.0
SETTLE_TIMEOUT_S = 15.0


class Chaos:
    """One run."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.faults: collections.Counter[str] = collections.Counter()
        self._choice = random.Random(seed)

    def run(self, seconds: float) -> None:
        """Injects faults for so long, then lets everybody finish."""
        world = self.world
        world.start_daemon()
        for slot in range(world.num_schedulers):
            world.start_scheduler(slot)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pause_until = time.monotonic() + self._choice.uniform(0.2, 1.0)
            while time.monotonic() < pause_until:
                self._look_after_everybody()
                time.sleep(0.05)
            kind = self._pick()
            if kind.inject(world, self._choice):
                self.faults[kind.name] += 1
        if world.armed:  # whoever is left must not be killed while it finishes
            world.kill_daemon(signal.SIGKILL)
            world.start_daemon()
        world.look_after_schedulers()
        world.finish_schedulers(FINISH_TIMEOUT_S)

    def _look_after_everybody(self) -> None:
        world = self.world
        assert world.daemon is not None
        if world.daemon.poll() is not None:
            world.start_daemon()
        world.look_after_schedulers()

    def _pick(self) -> FaultKind:
        return self._choice.choices(KINDS, [kind.weight for kind in KINDS])[0]

    def check_end(self) -> list[str]:
        """What is left that should not be."""
        world = self.world
        self._wait_for_sessions()
        counts = world.status().counts
        leaks = []
        if counts.num_held_blocks or counts.num_quarantined_blocks or counts.num_provisional_blocks:
            leaks.append(f"blocks are not given back: {counts}")
        if counts.num_free_blocks + counts.num_cached_blocks != counts.num_blocks - 1:
            leaks.append(f"free + cached is not total − null: {counts}")
        with world.client() as client:
            leaks += [f"session left: {session}" for session in client.list_sessions()]
            client.delete_pool(POOL)
        leaks += [f"segment left: {name}" for name in world.leftovers() if world.owns_memory]
        return leaks

    def _wait_for_sessions(self) -> None:
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < deadline:
            with self.world.client() as client:
                if not client.list_sessions():
                    return
            time.sleep(0.2)


def report(chaos: Chaos, leaks: Sequence[str], seconds: float) -> bool:
    """Prints what happened; True if nothing went wrong."""
    world, tally, counters = chaos.world, chaos.world.tally, chaos.world.counters
    findings = world.findings.read_text() if world.findings.exists() else ""
    num_wrong = counters.total("mismatches")
    recoveries = tally.recoveries_s[1:] or [0.0]
    asked, hit = counters.total("inherited_query_tokens"), counters.total("inherited_hit_tokens")
    print(f"chaos: {seconds:.0f} s, {sum(chaos.faults.values())} faults")
    for name, num in chaos.faults.most_common():
        print(f"  {num:6d}  {name}")
    print(
        f"  {tally.num_restarts:6d}  schedulers replaced, {tally.num_fenced} of them after they had lost their session"
    )
    print(f"steps {counters.total('steps')}, requests finished {counters.total('finished')}")
    print(f"blocks verified {counters.total('blocks_verified')}, bytes verified {counters.total('bytes_verified')}")
    print(f"prompt tokens of begun requests asked again by successors: {asked}, of them hit: {hit}")
    print(f"daemon starts {len(tally.recoveries_s)}: {tally.outcomes}")
    print(f"recovery: median {statistics.median(recoveries):.2f} s, max {max(recoveries):.2f} s")
    print(f"wrong bytes: {num_wrong} blocks")
    print(f"leaks: {len(leaks)}")
    print(f"broken invariants: {findings.count('Traceback')}")
    for text in (*tally.wrong_bytes, *leaks, *tally.unexpected, findings):
        if text:
            print(f"!! {text}")
    progressed = counters.total("finished") > 0 and counters.total("blocks_verified") > 0
    if not progressed:
        print("!! nothing was done: the run proves nothing")
    ok = progressed and not (num_wrong or tally.wrong_bytes or leaks or tally.unexpected or findings)
    print("PASS" if ok else "FAIL")
    return ok


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: nothing went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long faults are injected (default 90)")
    parser.add_argument("--schedulers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", action="store_true", help="keep the directory with all logs")
    arguments = parser.parse_args(argv)
    end_in_order()
    have_own_mounts()
    directory = Path(tempfile.mkdtemp(prefix="kvchaos-"))
    print(f"seed {arguments.seed}, logs in {directory}", flush=True)
    world = World(directory, arguments.schedulers)
    chaos = Chaos(world, arguments.seed)
    started = time.monotonic()
    try:
        chaos.run(arguments.seconds)
        try:
            leaks = chaos.check_end()
        except KvholdError as error:
            leaks = [f"the end could not be checked: {error}"]
        ok = report(chaos, leaks, time.monotonic() - started)
    finally:
        world.close()
    if ok and not arguments.keep:
        shutil.rmtree(directory, ignore_errors=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
