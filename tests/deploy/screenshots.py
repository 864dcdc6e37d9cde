"""`make screenshots`: the node page in light and dark, and an expression in Prometheus's page, under load."""

import asyncio
import shutil
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

from tests.deploy.live import REPO, chromium, daemon, prometheus
from tests.deploy.load import run_load

TARGET = REPO / "screenshots"
LOAD_S = 24.0


def main() -> int:
    browser, server = shutil.which("chromium"), shutil.which("prometheus")
    if browser is None or server is None:
        print("chromium and prometheus are needed: apt install chromium prometheus", file=sys.stderr)
        return 1
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, daemon(Path(place), "--grace-period-s", "2") as live:
        directory = Path(place)
        load = threading.Thread(target=lambda: asyncio.run(run_load(live.target, seconds=LOAD_S)), daemon=True)
        with prometheus(directory, server, live.http) as url:
            load.start()
            time.sleep(LOAD_S * 0.6)  # the kill has happened
            chromium(browser, f"{live.http}/?pool=chat&q=17", directory, screenshot=TARGET / "node-light.png")
            chromium(browser, f"{live.http}/", directory, dark=True, screenshot=TARGET / "node-dark.png")
            query = urllib.parse.urlencode(
                {
                    "g0.expr": "sum by (pool, state) (kvhold_pool_blocks)",
                    "g0.tab": "0",
                    "g0.range_input": "1m",
                    "g0.stacked": "1",
                }
            )
            chromium(browser, f"{url}/graph?{query}", directory, screenshot=TARGET / "prometheus.png", strict=False)
            load.join()
    for path in sorted(TARGET.glob("*.png")):
        print(f"{path.relative_to(REPO)}  {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
