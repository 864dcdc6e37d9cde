"""The table on the screen, and docs/performance.md. The page is made here, from one run's numbers, never by hand."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from parts import Part
from targets import BEST, GRPC, Rounds, Verdict, checksums

NAMES = {GRPC: "blocking gRPC", BEST: "best path"}

INTRODUCTION = """# Performance

What a step costs the scheduler through kvhold, beside the incumbent: vLLM 0.32's `KVCacheManager`, called in the
scheduler's own process. Written by `make bench`{mode}; do not edit.

Machine: {machine}. Managers took turns, {rounds} rounds, the scheduler pinned to one core and the daemon to
another; load average at the end {load:.1f}. Ratios are taken within a round; the spread is the lowest and the
highest of them.

* **blocking gRPC**: one message on the open `StepStream` where the step needs one (see "Most steps send nothing"),
  the scheduler waits for the answer. Steps run back to back, also the incumbent's.
* **best path**: the local transport (the same messages, framed, on a second unix socket), and the step is asked for
  while the device computes the one before. The simulator leaves {gap} ms for that (a device takes about 25; 12
  and 15 ms for the steps of long prompts), also to the incumbent that it is compared with; requests that arrive in
  the last 2 ms before a step are not known in time. What is done in that gap is in the CPU column, so that nothing
  hides there.

"Time" is what the scheduler waits, `schedule` and `finish` together, mean over steps unless it says p99. "CPU" is
the scheduler thread's own time per step, the gap included.
"""

WHY = """## What is missed, and why

{missed}
### Most steps send nothing

The scheduler of each run has its pool to itself. The daemon's answers allot it blocks, from which the client serves
its running sequences; it also knows refusals that still stand (docs/contract.md, "Allotments"). A step sends
something when a sequence has ended and the next one needs a block, when somebody wants to be admitted and might be,
when the allotment is used up, and after 8 silent steps or 256 draws. Decisions are the same, as the checksums above
say. What is sent then carries all draws since the last message, so that these steps, one in four to eight, take
longer: they are the p99 of regimes that mostly send nothing. Telling more seldom makes the mean lower and p99 higher.

### Where the time of a step that sends something goes

An empty step over gRPC costs what the line "empty step, grpc" above says, whatever it carries, and about twice that
as a call of its own ("empty step, grpc-unary"): headers, trailers and the bookkeeping of a call are gone from a
stream that stays open. The client drives it from the thread that wants the answer, where gRPC's own blocking stream
has two more (lines "stream" and "one thread" of the echo). What is left is spent in the daemon's C core, whose
threads poll, read and hand each message over to asyncio's, which wakes, answers and hands the answer back; nearly all
of "echo, one thread" is that, none of it ours. It would take a gRPC server outside of Python to do without.

The local transport exists for that reason: the same messages without the C core's threads (line "socket"). The stream
stays beyond 20 % of it, or it would have replaced it. What is left of the socket's round trip is the wake-up of a
sleeping core, once in each direction.

The daemon's own share is larger than a tight loop shows. Between two requests its core sleeps, and what comes after a
sleep costs two to three times as much, because the caches are cold: compare the last columns of "echo" and of "empty
step" with those before them, and "daemon CPU per step, lookup 1024" with "a prompt of 1,024 cached blocks", where the
same work is done in a loop.

### Admissions

An admission cannot be answered without asking, and each block of its prompt costs the daemon a digest object, a
look-up, for a block that is not hit also an eviction (out of the index, into the list of what was evicted lately) and
a publication, and an id to send back. These are dictionary operations on entries that nobody has touched for a while,
some 0.1 µs each in a loop and two to three times that in practice: about a millisecond for a prompt of 500 new
blocks, beside the transport and the client's share. The incumbent does its work in the scheduler's process, with warm
caches.

The best path hides all of that while the device computes, but for two kinds of steps, which are its p99: requests
that arrive in the last 2 ms before a step, and were not asked for in time, and steps that preempt, which ask again
after the refusal. These wait for a whole admission, as the blocking way does.

Tried and not kept: telling the daemon of finished sequences at once, without waiting (a further message costs more
than it hides when steps follow each other without a gap), larger frames and read chunks of gRPC (no difference beyond
the noise), uvloop (the same). What would be needed is a native core for index, free list and tables behind the pool's
interface.

### Fairness

The daemon answers one request of each connection in turn, also of those that send many ahead, so that a neighbour's
flood costs a step at most the neighbour's step that is being answered, and one more. A step of the flood takes 256 new
blocks and some 2 ms in the daemon, most of it the one turn that must not be divided: decoding before it and encoding
after it are a quarter, too little to be worth turns of their own.

In "scale and fairness" both schedulers share one core, because the machine has two and the daemon has the other. The
neighbour's process, in both cases, gives way on it at once (SCHED_IDLE): it floods while the scheduler waits or thinks,
and the ratio is what the daemon does to the scheduler, not what the two take from each other's core, but for cold
caches. The ratio is the median of three rounds, because p99 of some hundred steps is that of few.

### What long prompts cost

A prompt of 8,192 blocks brings 256 KiB of digests and takes 8,192 ids back. Each block costs one digest object, one
look-up in the index, one reference and one table entry in the daemon, each in a C loop where Python has one, and one
integer in the client. What is kept by block is read and written by slices where a table's ids follow each other, which
leaves the look-up as the largest part. An index over runs of blocks (a radix tree, or lineage) could make look-up,
pin and letting go independent of the length: the indented lines of "a prompt of 8,192 cached blocks in the daemon"
are all that it could save. It was not built: eviction is exact and per block (whoever frees a prompt puts each of its
blocks back into the free list, deepest first, and any of them may be drawn next, or hit by another prompt), so that a
run would have to be split at each of these, the answer still names every block, and the client's share stays. The
next step would be a native core behind the same interface.
"""


def print_table(verdicts: list[Verdict], parts: list[Part]) -> None:
    """The targets with our numbers beside the incumbent's."""
    titles = f"{'measure':34}{'way':16}{'incumbent':>12}{'kvhold':>12}{'ratio':>8}{'spread':>14}{'target':>9}"
    print(f"\n{titles}{'CPU/step':>11}")
    for v in verdicts:
        print(
            f"{v.target.label:34}{NAMES[v.way]:16}{_time(v, v.incumbent):>12}{_time(v, v.ours):>12}{v.ratio:>7.2f}×"
            f"{v.low:>8.2f}–{v.high:<5.2f}{v.limit:>8.2f}×{v.cpu_us:>8.0f} µs  {_word(v)}"
        )
    for part in parts:
        print(f"{part.label}: {part.text}{'  MISSED' if part.is_missed else ''}")


def write_page(
    path: Path,
    verdicts: list[Verdict],
    parts: list[Part],
    results: Mapping[str, Rounds],
    *,
    rounds: int,
    is_full: bool,
) -> None:
    """The whole page."""
    machine = f"{_processor()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    text = INTRODUCTION.format(
        mode=" with `BENCH=full`" if is_full else " (a subset; `BENCH=full` runs everything)",
        machine=machine,
        rounds=rounds,
        load=os.getloadavg()[0],
        gap="5" if is_full else "3",
    )
    text += "\n## Targets\n\n" + _markdown(verdicts) + "\n## Beside the yardstick\n\n"
    for part in parts:
        text += f"```\n{part.label}\n{part.text}\n```\n" if "\n" in part.text else f"* {part.label}: {part.text}\n"
    text += "\n## Decisions\n\n| workload | case | checksum |\n|---|---|---|\n"
    for name, of_workload in results.items():
        for case, sums in checksums(of_workload).items():
            same = f"`{next(iter(sums))}`, all managers" if len(sums) == 1 else f"**differ**: {sorted(sums)}"
            text += f"| {name} | {case} | {same} |\n"
    text += "\n" + WHY.format(missed=_missed(verdicts, parts))
    path.write_text(text)


def _markdown(verdicts: list[Verdict]) -> str:
    text = "| measure | steps | way | incumbent | kvhold | ratio | spread | target | CPU per step | |\n"
    text += "|---|--:|---|--:|--:|--:|---|--:|--:|---|\n"
    for v in verdicts:
        text += (
            f"| {v.target.label} | {v.num_steps:,} | {NAMES[v.way]} | {_time(v, v.incumbent)} | {_time(v, v.ours)} "
            f"| {v.ratio:.2f}× | {v.low:.2f}–{v.high:.2f} | ≤ {v.limit:g}× | {v.cpu_us:.0f} µs | {_word(v)} |\n"
        )
    return text


def _missed(verdicts: list[Verdict], parts: list[Part]) -> str:
    rows = [
        f"* {v.target.label}, {NAMES[v.way]}: {v.ratio:.2f}× instead of {v.limit:g}×" for v in verdicts if not v.is_met
    ]
    rows += [f"* {part.label}: {part.text.splitlines()[-1]}" for part in parts if part.is_missed]
    return "\n".join(rows or ["Nothing."]) + "\n"


def _word(v: Verdict) -> str:
    return "met" if v.is_met else "missed" if v.is_missed else "within the spread"


def _time(v: Verdict, value: float) -> str:
    return f"{value:.2f} s" if v.target.statistic == "total_s" else f"{value:.0f} µs"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
