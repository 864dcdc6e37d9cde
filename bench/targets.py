"""The targets: what a step may cost the scheduler through kvhold, as a share of the incumbent's time in process.

A workload is a run of the yardstick's simulator. Both ways of kvhold are measured in every round beside the incumbent;
a ratio is taken within its round, because the machine's speed drifts.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

GRPC, BEST = "kvhold_grpc", "kvhold_pipelined"
INCUMBENT, INCUMBENT_GAP = "incumbent", "incumbent, gap"
WAYS = (GRPC, BEST)
BESIDE = {GRPC: INCUMBENT, BEST: INCUMBENT_GAP}  # whom each way is compared with: steps back to back, or with gaps

Report: TypeAlias = Mapping[str, Any]  # one case of one simulator run
Rounds: TypeAlias = Mapping[str, list[Mapping[str, Report]]]  # manager → one mapping of cases per round


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Simulator arguments; `quick` replaces the whole list in the short run. A gap is for a way that uses it."""

    name: str
    full: tuple[str, ...]
    quick: tuple[str, ...]
    full_gap_ms: float = 5
    quick_gap_ms: float = 3


TIGHT = ("--admission", "chunk")
TWO, THREE = ("--groups", "full,sw:1024"), ("--groups", "full,sw:1024,sw:512")
WORKLOADS = (
    Workload(name="default", full=(), quick=("--requests", "160")),
    Workload(
        name="tight",
        full=(*TIGHT, "--num-blocks", "100000"),
        quick=(*TIGHT, "--num-blocks", "36000", "--requests", "110", "--speedup", "12"),
    ),
    Workload(
        name="full,sw:1024",
        full=(*TWO, "--num-blocks", "300000"),
        quick=(*TWO, "--num-blocks", "300000", "--requests", "60"),
    ),
    Workload(
        name="full,sw:1024,sw:512",
        full=(*THREE, "--num-blocks", "450000"),
        quick=(*THREE, "--num-blocks", "450000", "--requests", "60"),
    ),
    Workload(name="decode", full=("decode",), quick=("decode", "--micro-steps", "60")),
    Workload(name="lookup", full=("lookup",), quick=("lookup", "--micro-steps", "50"), full_gap_ms=12, quick_gap_ms=12),
    Workload(
        name="admit-free",
        full=("admit-free",),
        quick=("admit-free", "--micro-steps", "50"),
        full_gap_ms=15,
        quick_gap_ms=15,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One row of the table. `limits`: highest ratio by way; a way that is not named has none."""

    workload: str
    case: str  # "trace", or "decode 256" and the like
    regime: str
    statistic: str  # a column of the simulator's report
    limits: Mapping[str, float]

    @property
    def label(self) -> str:
        """What is measured, in words."""
        where = self.workload if self.case == "trace" else self.case
        what = {"total_s": "manager total", "mean": self.regime, "p99": f"{self.regime}, p99"}[self.statistic]
        return where if self.case != "trace" and self.statistic == "mean" else f"{where}: {what}"


def _row(workload: str, regime: str, grpc: float, best: float, statistic: str = "mean") -> Target:
    return Target(workload=workload, case="trace", regime=regime, statistic=statistic, limits={GRPC: grpc, BEST: best})


def _uniform(workload: str, size: int, grpc: float, best: float) -> Target:
    case = f"{workload} {size}"
    return Target(workload=workload, case=case, regime="all", statistic="mean", limits={GRPC: grpc, BEST: best})


TARGETS = (
    _row("default", "decode", 0.6, 0.15),
    _row("default", "chunk", 0.6, 0.4),
    _row("default", "admit", 0.6, 0.4),
    _row("default", "blocked", 0.6, 0.15),
    _row("tight", "preempt", 1.0, 0.5),
    _row("tight", "blocked", 0.5, 0.15),
    _row("default", "all", 0.6, 0.3, "total_s"),
    _row("tight", "all", 0.6, 0.3, "total_s"),
    _row("full,sw:1024", "all", 0.4, 0.2, "total_s"),
    _row("full,sw:1024,sw:512", "all", 0.4, 0.2, "total_s"),
    _uniform("decode", 256, 0.4, 0.10),
    _uniform("decode", 1024, 0.15, 0.07),
    _uniform("lookup", 64, 6.0, 1.5),
    _uniform("lookup", 1024, 1.0, 0.4),
    _uniform("lookup", 8192, 0.5, 0.3),
    _uniform("admit-free", 1024, 0.7, 0.4),
    _uniform("admit-free", 8192, 0.7, 0.4),
    *(_row("default", regime, 1.0, 0.5, "p99") for regime in ("decode", "chunk", "blocked", "admit")),
    *(_row("tight", regime, 1.0, 0.5, "p99") for regime in ("decode", "chunk", "blocked", "admit", "preempt")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one way did in one row. Times in µs, totals in seconds."""

    target: Target
    way: str
    incumbent: float
    ours: float
    ratio: float  # median of the rounds' ratios
    low: float
    high: float
    cpu_us: float  # of the scheduler's thread per step, the gap included
    num_steps: int

    @property
    def limit(self) -> float:
        """Highest ratio wanted."""
        return self.target.limits[self.way]

    @property
    def is_met(self) -> bool:
        """The ratio is at most the limit."""
        return self.ratio <= self.limit

    @property
    def is_missed(self) -> bool:
        """Not met, and not for the spread of the rounds alone."""
        return self.ratio - self.limit > self.high - self.low


def judge(results: Mapping[str, Rounds]) -> Iterator[Verdict]:
    """All rows for which the runs have data: `results` is by workload."""
    for target in TARGETS:
        rounds = results.get(target.workload)
        if rounds is None or INCUMBENT not in rounds:
            continue
        for way in WAYS:
            base = _values(rounds[BESIDE[way]], target)
            own = _values(rounds[way], target)
            ratios = [mine["value"] / other["value"] for mine, other in zip(own, base, strict=True) if other and mine]
            if not ratios:
                continue
            yield Verdict(
                target=target,
                way=way,
                incumbent=statistics.median(each["value"] for each in base if each),
                ours=statistics.median(each["value"] for each in own if each),
                ratio=statistics.median(ratios),
                low=min(ratios),
                high=max(ratios),
                cpu_us=statistics.median(each["cpu_mean"] for each in own if each),
                num_steps=int(own[0]["steps"]),
            )


def _values(rounds: list[Mapping[str, Report]], target: Target) -> list[dict[str, float]]:
    """Per round the regime's times; empty where it did not occur."""
    found = []
    for cases in rounds:
        times = cases[target.case]["us_per_step"].get(target.regime)
        found.append({**times, "value": times[target.statistic]} if times else {})
    return found


def checksums(rounds: Rounds) -> dict[str, set[str]]:
    """Case → the managers' checksums: one if all decided the same."""
    found: dict[str, set[str]] = {}
    for reports in rounds.values():
        for cases in reports:
            for case, report in cases.items():
                found.setdefault(case, set()).add(report["checksum"])
    return found
