"""What a scrape costs a step: p99 of Step with and without Prometheus at 2 Hz, 8 pools, in one run.

    python bench/scrape.py [--rounds 12] [--seconds 2]

A scheduler drives one of the pools; windows with and without scrapes alternate, so that the machine's moods meet both.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.deploy.live import daemon
from tests.deploy.load import Client

NUM_POOLS = 8
SCRAPE_PERIOD_S = 0.5


async def fetch(url: str) -> str:
    """A scrape by a process of its own, so that it does not disturb the measuring one."""
    process = await asyncio.create_subprocess_exec("curl", "-fsS", url, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()


async def scrape(url: str, until_s: float) -> list[float]:
    """Durations of scrapes until a moment."""
    found, loop = [], asyncio.get_running_loop()
    while (begun := loop.time()) < until_s:
        await fetch(url)
        found.append(loop.time() - begun)
        await asyncio.sleep(max(0.0, min(SCRAPE_PERIOD_S - found[-1], until_s - loop.time())))
    return found


async def window(client: Client, seconds: float, url: str) -> tuple[list[float], list[float]]:
    """Durations of steps, and of the scrapes beside them (none without a URL)."""
    until_s = asyncio.get_running_loop().time() + seconds
    scraper = asyncio.create_task(scrape(url, until_s)) if url else None
    steps = []
    while asyncio.get_running_loop().time() < until_s:
        begun = time.perf_counter()
        await client.step()
        steps.append(time.perf_counter() - begun)
        await asyncio.sleep(0.002)
    return steps, await scraper if scraper else []


async def measure(target: str, url: str, rounds: int, seconds: float) -> None:
    clients = [Client(target, f"pool-{i}", f"engine-{i}", seed=i) for i in range(NUM_POOLS)]
    for client in clients:
        await client.open()
        await client.step()
    await window(clients[0], 1.0, "")  # warm
    quiet: list[float] = []
    scraped: list[float] = []
    scrapes: list[float] = []
    for _ in range(rounds):
        quiet += (await window(clients[0], seconds, ""))[0]
        steps, durations = await window(clients[0], seconds, url)
        scraped, scrapes = scraped + steps, scrapes + durations
    for client in clients:
        await client.vanish()
    lines = len((await fetch(url)).splitlines())
    for name, values in (("without scrapes", quiet), ("scraped at 2 Hz", scraped)):
        p50, p99 = (statistics.quantiles(values, n=100)[i] * 1e3 for i in (49, 98))
        print(f"step {name}   p50 {p50:.2f} ms   p99 {p99:.2f} ms   ({len(values)} steps)")
    ratio = statistics.quantiles(scraped, n=100)[98] / statistics.quantiles(quiet, n=100)[98]
    print(f"p99 with scrapes / without: {ratio:.3f}")
    p50 = statistics.median(scrapes) * 1e3
    print(f"scrape p50 {p50:.1f} ms of {lines} lines, {NUM_POOLS} pools ({len(scrapes)} scrapes)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, daemon(Path(place)) as live:
        asyncio.run(measure(live.target, f"{live.http}/metrics", arguments.rounds, arguments.seconds))


if __name__ == "__main__":
    main()
