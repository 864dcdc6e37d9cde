"""A deterministic LLM-scheduler simulator that times KV-cache managers.

It replays a request trace, or a small synthetic workload, against managers that sit behind one interface (`interface.py`,
which also states the scheduling policy) and reports what each costs the scheduler per step. No model runs: a step takes
`--step-ms` of simulated time, and only the manager's calls are on the clock. A checksum over every decision (granted tokens,
hit tokens, preemptions) shows that two managers did the same work; block ids may differ, and `--audit` checks those.

Each manager runs in its own process, if need be under its own interpreter: `--managers incumbent@/path/to/python`.
"""

import argparse
import gc
import hashlib
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from audit import Audit
from interface import CacheManager, Config, Hasher, Request, StepInput, StepOutput

TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
UNIT_TOKENS = 512  # prompt tokens named by one hash id of the trace
MICRO_SIZES = {"decode": (256, 1024), "lookup": (1, 64, 1024, 8192), "admit-free": (1, 64, 1024, 8192)}
REGIMES = ("all", "decode", "chunk", "blocked", "admit", "preempt", "drain")


# ------------------------------------------------------------------ workloads
class Row(NamedTuple):
    """One request of a trace."""

    arrival_ms: float
    input_length: int
    output_length: int
    hash_ids: Sequence[int]


def load_trace(path: Path, num_requests: int, speedup: float) -> list[Row]:
    """The first requests of a Mooncake-format trace, arriving `speedup` times faster."""
    with path.open() as lines:
        raw = [json.loads(line) for line, _ in zip(lines, range(num_requests), strict=False)]
    return [Row(r["timestamp"] / speedup, r["input_length"], r["output_length"], r["hash_ids"]) for r in raw]


def micro_rows(mode: str, size: int, block_size: int, steps: int) -> list[Row]:
    """Workloads whose steps are all alike; steps take 1 ms.

    decode: `size` sequences of 2048 tokens, staggered so that each step some of them enter a new block.
    lookup, admit-free: each step one request of `size` blocks comes and goes, always the same (all of it is hit, and one
    token is computed) or always a new one.
    """
    if mode == "decode":
        return [Row(0, 2048 + i % block_size, steps + 2, range(i * 9, i * 9 + 9)) for i in range(size)]
    length = size * block_size + (mode == "lookup")
    num_units = -(-length // UNIT_TOKENS)
    firsts = (i * num_units * (mode == "admit-free") for i in range(steps + 2))
    return [Row(i, length, 1, range(first, first + num_units)) for i, first in enumerate(firsts)]


def make_hasher(row: Row, index: int, block_size: int) -> Hasher:
    """Hash ids stand for all tokens up to the end of their unit, so (id, place inside the unit) names a block's prefix."""
    per_unit = UNIT_TOKENS // block_size

    def name(block: int) -> str:
        if (block + 1) * block_size > row.input_length:
            return f"request {index} block {block}/{block_size}"  # has generated tokens: nobody else's
        return f"unit {row.hash_ids[block // per_unit]} block {block % per_unit}/{block_size}"

    def hasher(request: Request) -> list[bytes]:
        missing = range(len(request.block_hashes), request.num_tokens // block_size)
        return [hashlib.sha256(name(block).encode()).digest() for block in missing]

    return hasher


# ----------------------------------------------------------------- simulation
@dataclass(slots=True)
class Run:
    """Decisions and times of one replay; the lists have one entry per step."""

    checksum: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    regimes: list[str] = field(default_factory=list)
    schedule_ns: list[int] = field(default_factory=list)
    finish_ns: list[int] = field(default_factory=list)
    cpu_ns: list[int] = field(default_factory=list)  # of the scheduler's thread, what is done in the gap included


def regime_of(step: StepInput, out: StepOutput, config: Config) -> str:
    """The kind of a step that has been decided and not yet applied."""
    if out.num_preempted:
        return "preempt"
    if out.admitted:
        return "admit"
    used = sum(out.granted)
    if step.waiting and len(step.running) < config.max_num_seqs and used < config.max_num_batched_tokens:
        return "blocked"  # the head of the queue was looked up and refused
    return "decode" if used == len(step.running) else "chunk"  # chunk: a long prompt goes on


def apply(step: StepInput, out: StepOutput, audit: Audit | None) -> list[Request]:
    """Moves requests between the queues and advances them. Returns those that were granted tokens."""
    running, waiting = step.running, step.waiting
    for _ in range(out.num_preempted):
        victim = running.pop()
        if audit:
            audit.release(victim)
        victim.num_computed_tokens = 0
        waiting.appendleft(victim)
    idle = len(running) - len(out.granted)
    running += [waiting.popleft() for _ in out.admitted]
    grants = [(0, n) for n in out.granted] + [(0, 0)] * idle + out.admitted
    new_blocks = dict(out.new_blocks)
    scheduled = []
    for i, (request, (hit_tokens, granted)) in enumerate(zip(running, grants, strict=True)):
        if granted:
            if audit:
                audit.grant(request, hit_tokens, granted, new_blocks.get(i))
            request.num_computed_tokens += hit_tokens + granted
            scheduled.append(request)
    return scheduled


class Arrivals:
    """Hands out the requests of a workload in time. Those that could never fit into the pool are left out, and counted."""

    def __init__(self, manager: CacheManager, config: Config, rows: list[Row]) -> None:
        self.manager, self.config = manager, config
        self.rows = deque(enumerate(rows))
        self.num_too_long = 0
        self.num_tokens_left: dict[str, int] = {}  # to generate, by request

    def until(self, now_ms: float) -> list[Request]:
        arrived = []
        while self.rows and self.rows[0][1].arrival_ms <= now_ms:
            index, row = self.rows.popleft()
            num_blocks = -(-(row.input_length + row.output_length) // self.config.block_size)
            if num_blocks * len(self.config.windows) >= self.config.num_blocks:
                self.num_too_long += 1
                continue
            hasher = make_hasher(row, index, self.config.block_size)
            arrived.append(self.manager.make_request(f"request-{index}", row.input_length, hasher))
            self.num_tokens_left[arrived[-1].request_id] = row.output_length
        return arrived

    def generate(self, request: Request) -> bool:
        """Adds a token; true if it is the last one."""
        request.append_output_token_ids(0)
        self.num_tokens_left[request.request_id] -= 1
        return not self.num_tokens_left[request.request_id]


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two steps in which the device computes and a manager may prepare the next step."""

    seconds: float = 0.0
    late_ms: float = 0.0  # requests that arrive this shortly before a step are not known when it is prepared


def simulate(
    manager: CacheManager, config: Config, rows: list[Row], step_ms: float, gap: Gap, audit: Audit | None
) -> Run:
    """Replays `rows` to the end."""
    run, checksum, clock, cpu_clock = Run(), hashlib.sha256(), time.perf_counter_ns, time.thread_time_ns
    prepare = getattr(manager, "prepare", None)
    arrivals, now_ms = Arrivals(manager, config, rows), 0.0
    step = StepInput([], deque())
    while arrivals.rows or step.waiting or step.running:
        if not step.waiting and not step.running:
            now_ms = max(now_ms, arrivals.rows[0][1].arrival_ms)
        step.waiting.extend(arrivals.until(now_ms))
        if not step.waiting and not step.running:
            continue

        start, cpu = clock(), cpu_clock()
        out = manager.schedule(step)
        run.schedule_ns.append(clock() - start)
        cpu_ns = cpu_clock() - cpu

        flat = [len(out.granted), *out.granted, out.num_preempted, *(n for pair in out.admitted for n in pair)]
        checksum.update(array("q", flat).tobytes())
        busy = arrivals.rows or step.waiting
        run.regimes.append(regime_of(step, out, config) if busy or out.num_preempted else "drain")
        scheduled = apply(step, out, audit)
        assert scheduled, "a step without progress"
        run.counts["steps"] += 1
        run.counts["sequence steps"] += len(scheduled)
        run.counts["computed tokens"] += sum(out.granted) + sum(granted for _, granted in out.admitted)
        run.counts["hit tokens"] += sum(hit_tokens for hit_tokens, _ in out.admitted)
        run.counts["admissions"] += len(out.admitted)
        run.counts["preemptions"] += out.num_preempted
        run.counts["reported blocks"] += sum(len(ids) for _, groups in out.new_blocks for ids in groups)

        caught_up = [request for request in scheduled if request.num_computed_tokens == request.num_tokens]
        finished = [request for request in caught_up if arrivals.generate(request)]
        start, cpu = clock(), cpu_clock()
        if finished:
            manager.finish(finished)
        run.finish_ns.append(clock() - start)
        cpu_ns += cpu_clock() - cpu
        for request in finished:
            step.running.remove(request)
            if audit:
                audit.release(request)
        now_ms += step_ms
        if gap.seconds:  # the device computes; a manager that can, prepares the next step
            step.waiting.extend(arrivals.until(now_ms - gap.late_ms))
            until = time.perf_counter() + gap.seconds
            cpu = cpu_clock()
            if prepare is not None:
                prepare(step)
            cpu_ns += cpu_clock() - cpu
            time.sleep(max(0.0, until - time.perf_counter()))
        run.cpu_ns.append(cpu_ns)
    run.counts["requests too long"] = arrivals.num_too_long
    run.checksum = checksum.hexdigest()[:16]
    return run


# ------------------------------------------------------------------- reporting
def summary(samples_ns: list[int]) -> dict[str, float]:
    """Microseconds per step; percentiles by nearest rank."""
    ordered = sorted(samples_ns)
    ranks = {f"p{p}": ordered[-(-len(ordered) * p // 100) - 1] / 1e3 for p in (50, 90, 99)}
    return {"steps": len(ordered), **ranks, "mean": sum(ordered) / len(ordered) / 1e3, "total_s": sum(ordered) / 1e9}


def report(run: Run, regimes: Sequence[str]) -> dict[str, Any]:
    both = [a + b for a, b in zip(run.schedule_ns, run.finish_ns, strict=True)]
    picked = {
        name: [ns for ns, regime in zip(both, run.regimes, strict=False) if name in ("all", regime)] for name in regimes
    }
    cpu = {
        name: [ns for ns, regime in zip(run.cpu_ns, run.regimes, strict=False) if name in ("all", regime)]
        for name in regimes
    }
    return {
        "checksum": run.checksum,
        "counts": dict(run.counts),
        "schedule_s": sum(run.schedule_ns) / 1e9,
        "finish_s": sum(run.finish_ns) / 1e9,
        "us_per_step": {
            name: summary(samples) | {"cpu_mean": sum(cpu[name]) / len(samples) / 1e3}
            for name, samples in picked.items()
            if samples
        },
    }


def median_of(values: list[Any]) -> Any:
    """Reports of several rounds as one: each number becomes the median, and what is not a number must be equal."""
    if isinstance(values[0], dict):
        return {key: median_of([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], int | float) and not isinstance(values[0], bool):
        return statistics.median(values)
    assert all(value == values[0] for value in values), "decisions changed between rounds"
    return values[0]


def print_table(case: str, results: dict[str, dict[str, Any]]) -> None:
    first = next(iter(results.values()))
    print(f"\n{case}: " + ", ".join(f"{name} {count:,.0f}" for name, count in first["counts"].items()))
    for name, result in results.items():
        parts = f"schedule {result['schedule_s']:.3f} s, finish {result['finish_s']:.3f} s"
        parts += ", rounds " + " ".join(f"{seconds:.2f}" for seconds in result["rounds_s"])
        print(f"  {name:14} checksum {result['checksum']}  {parts}")
    columns = ("p50", "p90", "p99", "mean", "cpu_mean", "total_s")
    print(f"  {'us per step (steps)':22}{'manager':14}" + "".join(f"{c:>10}" for c in columns) + f"{'rel. mean':>11}")
    for regime, base in first["us_per_step"].items():
        for name, result in results.items():
            if regime not in result["us_per_step"]:
                continue
            times = result["us_per_step"][regime]
            cells = "".join(f"{times[c]:>10.{3 if c == 'total_s' else 1}f}" for c in columns)
            label = f"{regime} ({base['steps']:,.0f})" if result is first else ""
            print(f"  {label:22}{name:14}{cells}{times['relative_mean']:>11.2f}")


# ---------------------------------------------------------------- command line
def parse(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="What does a KV-cache manager cost the scheduler per step?")
    p.add_argument("mode", nargs="?", default="trace", choices=["trace", *MICRO_SIZES])
    p.add_argument("--managers", nargs="+", default=["incumbent", "dict_manager"], metavar="MODULE[@INTERPRETER]")
    p.add_argument("--rounds", type=int, default=3, help="replays per manager, taking turns; medians are reported")
    p.add_argument("--trace", type=Path, default=TRACE)
    p.add_argument("--requests", type=int, default=2000)
    p.add_argument("--speedup", type=float, default=6.0, help="requests arrive this many times faster")
    p.add_argument("--step-ms", type=float, default=25.0)
    p.add_argument("--block-size", type=int, default=16, help="tokens; a divisor of 512")
    p.add_argument("--num-blocks", type=int, default=150_000)
    p.add_argument("--groups", default="full", help="for example full,sw:1024,sw:512")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--max-num-batched-tokens", type=int, default=8192)
    p.add_argument("--admission", choices=["whole", "chunk"], default="whole")
    p.add_argument("--micro-steps", type=int, default=500)
    p.add_argument("--gap-ms", type=float, default=0.0, help="between steps, in which the device computes")
    p.add_argument("--late-ms", type=float, default=2.0, help="with a gap: how late arrivals miss the preparation")
    p.add_argument("--sizes", type=int, nargs="+", help="of uniform steps; default: all of the mode")
    p.add_argument("--audit", action="store_true", help="check the block ids too (slow)")
    p.add_argument("--json", type=Path, help="write the results here")
    p.add_argument("--worker", metavar="MODULE", help=argparse.SUPPRESS)
    return p.parse_args(argv)


def work(args: argparse.Namespace) -> dict[str, Any]:
    """Runs one manager through all cases of a mode, in this process."""
    module, cases = importlib.import_module(args.worker), {}
    windows = tuple(None if name == "full" else int(name.removeprefix("sw:")) for name in args.groups.split(","))
    whole = args.admission == "whole"
    for size in args.sizes or MICRO_SIZES.get(args.mode, (0,)):
        if args.mode == "trace":
            case, step_ms, rows = "trace", args.step_ms, load_trace(args.trace, args.requests, args.speedup)
            config = Config(
                args.block_size, args.num_blocks, windows, args.max_num_seqs, args.max_num_batched_tokens, whole
            )
        else:  # a pool for two requests and a bit, or all that decode; everything is admitted in one step
            case, step_ms = f"{args.mode} {size}", 1.0
            rows = micro_rows(args.mode, size, args.block_size, args.micro_steps)
            num_tokens = size * (2048 + args.micro_steps if args.mode == "decode" else 2 * args.block_size)
            num_blocks = (num_tokens // args.block_size + 4 * size) * len(windows) + 64
            config = Config(args.block_size, num_blocks, windows, 1024, 1 << 30, whole)
        manager = module.create(config)
        # As vLLM's engine does once it is up: what exists by now is never scanned by the collector again.
        gc.collect()
        gc.freeze()
        gap = Gap(args.gap_ms / 1e3, args.late_ms if args.mode == "trace" else 0.0)
        run = simulate(manager, config, rows, step_ms, gap, Audit(config) if args.audit else None)
        manager.close()
        if args.mode != "trace":  # the first step fills the pool, and the last one empties it
            for steps in (run.regimes, run.schedule_ns, run.finish_ns, run.cpu_ns):
                del steps[-1], steps[0]
        cases[case] = {"config": asdict(config), **report(run, REGIMES if args.mode == "trace" else ("all",))}
    return cases


def main() -> int:
    args = parse(sys.argv[1:])
    if args.worker:
        print(json.dumps(work(args)))
        return 0
    machine = f"Python {platform.python_version()}, {os.cpu_count()} CPUs, allowed {sorted(os.sched_getaffinity(0))}"
    print(f"{' '.join(sys.argv)}\n{machine}, load average {os.getloadavg()[0]:.2f}", flush=True)
    rounds: dict[str, list[dict[str, Any]]] = {spec.partition("@")[0]: [] for spec in args.managers}
    for _ in range(args.rounds):
        for name, _, interpreter in (spec.partition("@") for spec in args.managers):
            command = [interpreter or sys.executable, __file__, *sys.argv[1:], "--worker", name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr}")
            rounds[name].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {name: median_of(reports) for name, reports in rounds.items()}
    first = next(iter(rounds.values()))
    for name, case, result in [(name, *item) for name, cases in medians.items() for item in cases.items()]:
        result["rounds_s"] = [r[case]["schedule_s"] + r[case]["finish_s"] for r in rounds[name]]
        for regime, times in result["us_per_step"].items():  # compared within a round: the machine's speed may drift
            pairs = [
                (r[case]["us_per_step"], base[case]["us_per_step"])
                for r, base in zip(rounds[name], first, strict=False)
            ]
            ratios = [own[regime]["mean"] / base[regime]["mean"] for own, base in pairs if regime in base]
            times["relative_mean"] = statistics.median(ratios or [float("nan")])
    agreed = True
    for case in next(iter(medians.values())):
        results = {name: cases[case] for name, cases in medians.items()}
        print_table(case, results)
        agreed &= len({result["checksum"] for result in results.values()}) == 1
    print("\nAll managers decided the same." if agreed else "\nDECISIONS DIFFER: the times cannot be compared.")
    if args.json:
        args.json.write_text(json.dumps({"arguments": sys.argv[1:], "machine": machine, "managers": medians}, indent=1))
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
