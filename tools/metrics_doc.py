"""Makes docs/metrics.md from the families that the daemon exports. Usage: python tools/metrics_doc.py [--check]"""

import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from kvhold_server.metrics import Snapshot, SnapshotCollector
from kvhold_server.node.telemetry import Telemetry
from kvhold_server.observe.extra_metrics import MAX_TENANT_SERIES, ViewCollector
from kvhold_server.observe.view import NodeView

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

INTRO = """\
# Metrics

Made by `tools/metrics_doc.py` from the code that exports them: `make dashboards` renews it, a test compares.

`/metrics` on the metrics listener speaks the Prometheus text format, and OpenMetrics to scrapers that ask for it. A
scrape takes a snapshot on the event loop (microseconds) and renders it a few lines at a time; steps go between. Eight
pools make fewer than a thousand lines.

## How to read them

* **Block states are disjoint.** `sum by (pool) (kvhold_pool_blocks)` is the whole pool, the null block included.
  Provisional and fenced blocks are counted in their state *and* in a metric of their own. Usage leaves out the null and
  reserved blocks: nobody could ever get them.
* **Tokens are attributed once.** For each pool `hit + miss = query`, exactly, in tokens. A re-admission after
  preemption is no benefit of the cache, so it is counted apart (`..._resumed_...`).
* **Counters, never rates.** A hit rate is `rate(kvhold_prefix_hit_tokens_total[5m])` over
  `rate(kvhold_prefix_query_tokens_total[5m])`: the window is yours. The recording rules in
  `deploy/prometheus/rules.yaml` have the usual ones.
* **Bytes** by state are recorded as `kvhold:pool_memory:bytes`: a state's share of the blocks times
  `kvhold_pool_size_bytes`.
* **Labels are bounded**: pools by `limits.max_pools`, tenants by us (the {tenants} largest of each pool, the rest as
  `other`), all others by fixed sets. There is no label for a request, sequence, block, hash, process or message text.
* **Rare counters exist at zero**, because `increase()` cannot see a series that is born at one.
* **Exemplars**: with `tracing` on, duration buckets name the trace of their latest call, in OpenMetrics.
* Counters begin at zero with the daemon; `kvhold_build_info{{boot_id}}` says which start.

## Families
"""


def families() -> Iterator[Metric]:
    """Everything that is exported, without samples."""
    empty = Snapshot(boot_id="", version="", is_draining=False, uptime_s=0.0, pools=(), telemetry=Telemetry())
    yield from SnapshotCollector(empty).collect()
    yield from ViewCollector(NodeView(snapshot=empty, pools=(), sessions=())).collect()


def row(family: Metric) -> str:
    """One line of the table."""
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
    return f"| `{name}` | {family.type} | {labels or '–'} | {family.documentation} |"


def text() -> str:
    """The whole page."""
    rows = "\n".join(sorted(row(family) for family in families()))
    intro = INTRO.format(tenants=MAX_TENANT_SERIES)
    return f"{intro}\n| name | type | labels | meaning |\n|---|---|---|---|\n{rows}\n"


def main(argv: list[str]) -> int:
    """Writes, or compares."""
    if "--check" in argv:
        return 0 if TARGET.exists() and TARGET.read_text() == text() else 1
    TARGET.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
