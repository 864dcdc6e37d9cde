"""What a scrape costs a step: p99 of Step with and without Prometheus at 2 Hz, 8 pools, in one run.

    python bench/scrape.py [--rounds 20] [--seconds 1]

    scheduler  ── steps on one of 8 pools, all the time ──────────────────────────▶ daemon
    scraper    ── /metrics ── /healthz ── /metrics ── … (windows alternate) ──────▶

The scraper is a process of its own, and asks as often in the windows that count as "without": it takes a processor for
a moment, too, and on a small machine that must not be taken for the doing of the daemon. The spread is that of ratios
between windows drawn at random with repetition; the exit status is 1 if even its lower end is above the bound.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.deploy.live import daemon
from tests.deploy.load import Client

NUM_POOLS = 8
SCRAPE_PERIOD_S = 0.5
BETWEEN_STEPS_S = 0.0005
MAX_RATIO = 1.05
NUM_RESAMPLES = 200

Windows = dict[str, list[list[float]]]  # by what was fetched: durations of steps


def answer_forever() -> None:
    """What the scraper does: a URL a line on its input, duration and number of lines on its output."""
    for url in sys.stdin:
        begun = time.monotonic()
        with urllib.request.urlopen(url.strip(), timeout=10) as reply:
            lines = reply.read().count(b"\n")
        print(json.dumps([time.monotonic() - begun, lines]), flush=True)


@dataclass
class Scrapes:
    """What they took."""

    seconds: list[float] = field(default_factory=list)
    lines: int = 0


async def scrape(scraper: asyncio.subprocess.Process, url: str, until_s: float, into: Scrapes) -> None:
    """Twice a second until a moment."""
    assert scraper.stdin is not None and scraper.stdout is not None
    loop = asyncio.get_running_loop()
    due = loop.time() + SCRAPE_PERIOD_S / 2
    while due < until_s:
        await asyncio.sleep(max(0.0, due - loop.time()))
        scraper.stdin.write(f"{url}\n".encode())
        seconds, into.lines = json.loads(await scraper.stdout.readline())
        into.seconds.append(seconds)
        due += SCRAPE_PERIOD_S


async def window(client: Client, seconds: float, scraping: asyncio.Task[None]) -> list[float]:
    """Durations of steps beside scrapes."""
    until_s = asyncio.get_running_loop().time() + seconds
    steps = []
    while asyncio.get_running_loop().time() < until_s:
        begun = time.perf_counter()
        await client.step()
        steps.append(time.perf_counter() - begun)
        await asyncio.sleep(BETWEEN_STEPS_S)
    await scraping
    return steps


def percentile(windows: list[list[float]], percent: int) -> float:
    """Of all steps of these windows."""
    return statistics.quantiles(chain.from_iterable(windows), n=100)[percent - 1]


def spread(steps: Windows) -> tuple[float, float]:
    """5th and 95th percentile of the ratio."""
    choice = random.Random(1)
    quiet, scraped = steps["/healthz"], steps["/metrics"]
    ratios = [
        percentile(choice.choices(scraped, k=len(scraped)), 99) / percentile(choice.choices(quiet, k=len(quiet)), 99)
        for _ in range(NUM_RESAMPLES)
    ]
    points = statistics.quantiles(ratios, n=20)
    return points[0], points[-1]


async def measure(target: str, base: str, rounds: int, seconds: float) -> bool:
    """Prints; returns whether the bound was missed."""
    clients = [Client(target, f"pool-{i}", f"engine-{i}", seed=i) for i in range(NUM_POOLS)]
    for client in clients:
        await client.open()
        await client.step()
    pipe = asyncio.subprocess.PIPE
    scraper = await asyncio.create_subprocess_exec(sys.executable, __file__, "--scraper", stdin=pipe, stdout=pipe)
    steps: Windows = {"/healthz": [], "/metrics": []}
    scrapes = {path: Scrapes() for path in steps}
    for number in range(rounds + 1):
        for path in sorted(steps, reverse=number % 2 == 1):
            until_s = asyncio.get_running_loop().time() + seconds
            task = asyncio.create_task(scrape(scraper, base + path, until_s, scrapes[path]))
            found = await window(clients[0], seconds, task)
            if number:  # the first round warms up
                steps[path].append(found)
    for client in clients:
        await client.vanish()
    scraper.kill()
    await scraper.wait()
    return report(steps, scrapes["/metrics"])


def report(steps: Windows, scrapes: Scrapes) -> bool:
    for name, path in (("without scrapes", "/healthz"), ("scraped at 2 Hz", "/metrics")):
        p50, p99 = (percentile(steps[path], percent) * 1e3 for percent in (50, 99))
        print(f"step {name}   p50 {p50:.2f} ms   p99 {p99:.2f} ms   ({sum(map(len, steps[path]))} steps)")
    ratio = percentile(steps["/metrics"], 99) / percentile(steps["/healthz"], 99)
    low, high = spread(steps)
    print(f"p99 with scrapes / without: {ratio:.3f}, spread {low:.2f}–{high:.2f} (at most {MAX_RATIO})")
    took = statistics.median(scrapes.seconds) * 1e3
    print(f"scrape p50 {took:.1f} ms of {scrapes.lines} lines, {NUM_POOLS} pools ({len(scrapes.seconds)} scrapes)")
    return min(low, ratio) > MAX_RATIO


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--scraper", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.scraper:
        answer_forever()
        return 0
    with tempfile.TemporaryDirectory() as place, daemon(Path(place)) as live:
        is_missed = asyncio.run(measure(live.target, live.http, arguments.rounds, arguments.seconds))
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
