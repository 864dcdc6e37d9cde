"""The whole measurement: kvhold beside the incumbent in one run, the table of targets, docs/performance.md.

    make bench                 a subset, six to ten minutes, by the speed of the machine
    BENCH=full make bench      everything, about an hour

Managers take turns within each round, pinned to one core, the daemon to another. Exit status 1: a target is missed by
more than the spread of the rounds, or decisions differ.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from incumbent_env import find
from parts import Part, measure_parts
from report import print_table, write_page
from stage import REPO, Cores, Daemon, choose_cores, daemon, simulate, trace
from targets import BEST, GRPC, INCUMBENT, INCUMBENT_GAP, WORKLOADS, Rounds, Verdict, Workload, checksums, judge

PAGE = REPO / "docs" / "performance.md"


def run_workload(
    live: Daemon, cores: Cores, workload: Workload, incumbent: Path | None, *, rounds: int, is_full: bool
) -> Rounds:
    """Everybody in turns, `rounds` times: steps back to back first, then with gaps."""
    arguments = [*(workload.full if is_full else workload.quick), "--trace", str(trace())]
    gap = ["--gap-ms", str(workload.full_gap_ms if is_full else workload.quick_gap_ms)]
    runs: list[tuple[str, str, str, list[str]]] = [
        (GRPC, GRPC, sys.executable, arguments),
        (BEST, BEST, sys.executable, [*arguments, *gap]),
    ]
    if incumbent is not None:
        runs.insert(0, (INCUMBENT, INCUMBENT, str(incumbent), arguments))
        runs.insert(2, (INCUMBENT_GAP, INCUMBENT, str(incumbent), [*arguments, *gap]))
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name, *_ in runs}
    for number in range(1, rounds + 1):
        for name, manager, interpreter, given in runs:
            cases = simulate(live, cores, manager, given, interpreter)
            found[name].append(cases)
            totals = ", ".join(f"{report['us_per_step']['all']['mean']:.0f}" for report in cases.values())
            print(f"  {workload.name}, round {number}: {name:18} {totals} µs per step", flush=True)
    return found


def report_decisions(results: Mapping[str, Rounds]) -> bool:
    """True if everybody decided the same everywhere."""
    agreed = True
    for name, rounds in results.items():
        for case, sums in checksums(rounds).items():
            if len(sums) > 1:
                agreed = False
                print(f"DECISIONS DIFFER in {name}, {case}: {sorted(sums)}")
    return agreed


def is_failure(verdicts: list[Verdict], parts: list[Part], agreed: bool) -> bool:
    """What the exit status says."""
    missed = [v for v in verdicts if v.is_missed]
    for verdict in missed:
        print(f"MISSED: {verdict.target.label} by {verdict.way}: {verdict.ratio:.2f}× > {verdict.limit:g}×")
    for part in parts:
        if part.is_missed:
            print(f"MISSED: {part.label}: {part.text}")
    return bool(missed) or any(part.is_missed for part in parts) or not agreed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", default=os.environ.get("BENCH") == "full")
    parser.add_argument("--rounds", type=int, help="default: 2, full: 3")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="of the yardstick; nothing is written then")
    parser.add_argument("--json", type=Path, help="write the raw results here")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (3 if arguments.full else 2)
    cores = choose_cores()
    incumbent, why_not = find()
    if incumbent is None:
        print(f"SKIPPED the incumbent: {why_not}. Without it there are no ratios, only our own times.")
    workloads = [w for w in WORKLOADS if not arguments.only or w.name in arguments.only]
    results: dict[str, Rounds] = {}
    with daemon(cores) as live:
        for workload in workloads:
            results[workload.name] = run_workload(
                live, cores, workload, incumbent, rounds=rounds, is_full=arguments.full
            )
    parts = [] if arguments.only else measure_parts(cores, is_full=arguments.full)
    verdicts = list(judge(results))
    print_table(verdicts, parts)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    if not arguments.only and incumbent:
        write_page(PAGE, verdicts, parts, results, rounds=rounds, is_full=arguments.full)
        print(f"written: {PAGE.relative_to(REPO)}")
    return int(is_failure(verdicts, parts, report_decisions(results)))


if __name__ == "__main__":
    sys.exit(main())
