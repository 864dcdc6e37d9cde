"""Families beside those of metrics.py: tenants, devices, quarantine, recovery reasons, mappings. Rules as there.

Tenants are named by clients, so their number is bounded here: the largest of each pool, and the rest summed as "other".
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvhold_server.metrics import PREFIX, cumulated
from kvhold_server.node.telemetry import Histogram
from kvhold_server.observe.view import NodeView, PoolView

MAX_TENANT_SERIES = 10  # per pool
OTHER_TENANTS = "other"
AGE_WORDS = ("quarter_pool", "one_pool", "four_pools", "older")  # evicted within so many blocks' worth of evictions

# (method, code) pairs that alerts watch: they exist at zero, because increase() cannot see a series being born at one.
WATCHED_CODES = (("PoolService/OpenPool", "RESOURCE_EXHAUSTED"), ("BlockService/Step", "INTERNAL"))


def tenant_blocks(view: NodeView) -> dict[tuple[str, str], int]:
    """(pool, tenant) → blocks held, bounded."""
    held: dict[str, Counter[str]] = {pool.name: Counter() for pool in view.pools}
    for session in view.sessions:
        if session.pool in held:
            held[session.pool][session.tenant] += session.num_held_blocks
    found: dict[tuple[str, str], int] = {}
    for pool, tenants in held.items():
        ordered = tenants.most_common()
        found |= {(pool, tenant): blocks for tenant, blocks in ordered[:MAX_TENANT_SERIES]}
        if len(ordered) > MAX_TENANT_SERIES:
            rest = sum(blocks for _, blocks in ordered[MAX_TENANT_SERIES:])
            found[(pool, OTHER_TENANTS)] = found.get((pool, OTHER_TENANTS), 0) + rest
    return found


def oldest_quarantine_s(view: NodeView, pool: str) -> float:
    """How long the oldest dead session's blocks have waited."""
    dead = [s.dead_for_s for s in view.sessions if s.pool == pool and s.state == "quarantined"]
    return max(dead, default=0.0)


class ViewCollector(Collector):
    """Families of one view."""

    def __init__(self, view: NodeView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view = self._view
        yield gauge("backend_healthy", "1 if the memory backend can be expected to work.", ("backend",),
                    (((b.name,), int(b.ok)) for b in view.backends))  # fmt: skip
        yield gauge("device_memory_bytes", "Device memory: held by this daemon, free, or used by others.",
                    ("backend", "device", "state"), _device_memory(view))  # fmt: skip
        yield gauge("pool_plan_info", "Always 1; what the pool was planned as.",
                    ("pool", "plan", "block_size_tokens", "ranks"),
                    (((p.name, p.plan_fingerprint[:12], str(p.block_size_tokens), str(p.num_ranks)), 1)
                     for p in view.pools))  # fmt: skip
        yield gauge("pool_mappings", "Processes known to have the pool's memory mapped.", ("pool",),
                    (((p.name,), p.num_mappings) for p in view.pools))  # fmt: skip
        yield gauge("pool_recovery_info", "Always 1; what the pool began with, and why not with more.",
                    ("pool", "outcome", "reason"),
                    (((p.name, p.recovery.outcome, p.recovery.reason), 1) for p in view.snapshot.pools))  # fmt: skip
        yield gauge("pool_recovery_duration_seconds", "Time that opening the pool took.", ("pool",),
                    (((p.name,), p.recovery.duration_s) for p in view.snapshot.pools))  # fmt: skip
        yield gauge("quarantine_oldest_seconds", "How long the oldest dead session's blocks have waited.", ("pool",),
                    (((p.name,), oldest_quarantine_s(view, p.name)) for p in view.pools))  # fmt: skip
        yield gauge("tenant_held_blocks",
                    f'Blocks that a tenant\'s sessions hold: the {MAX_TENANT_SERIES} largest; the rest are "other".',
                    ("pool", "tenant"), tenant_blocks(view).items())  # fmt: skip
        yield gauge("event_watchers", "Open event streams.", ("pool",),
                    (((p.name,), p.num_event_watchers) for p in view.pools))  # fmt: skip
        yield counter("events", "Cache events since the pool's first reader came.", ("pool",),
                      (((p.name,), p.num_events) for p in view.pools))  # fmt: skip
        yield counter("event_watcher_losses", "Times that a slow reader lost events and got a new snapshot.", ("pool",),
                      (((p.name,), p.num_event_losses) for p in view.pools))  # fmt: skip
        yield counter("prefix_miss_evicted_age_tokens",
                      "Misses by eviction, by how many pools' worth of evictions ago: a pool larger by that has them.",
                      ("pool", "within"),
                      (((p.name, word), tokens) for p in view.pools
                       for word, tokens in zip(AGE_WORDS, p.evicted_miss_tokens_by_age, strict=True)))  # fmt: skip
        yield from histograms(view)


HISTOGRAMS: tuple[tuple[str, str, Callable[[PoolView], Histogram]], ...] = (
    ("step_items", "Items of a step: freed, extended and admitted sequences.", lambda p: p.snapshot.totals.step_items),
    ("block_idle_before_evict_seconds", "Age at eviction: from last use to being handed out again; every 64th block.",
     lambda p: p.residency.idle_before_evict),
    ("block_reuse_gap_seconds", "Between two hits of the same block.", lambda p: p.residency.reuse_gap),
)  # fmt: skip


def histograms(view: NodeView) -> Iterator[Metric]:
    """Distributions, one series a pool."""
    for name, text, histogram_of in HISTOGRAMS:
        family = HistogramMetricFamily(PREFIX + name, text, labels=("pool",))
        for pool in view.pools:
            histogram = histogram_of(pool)
            family.add_metric((pool.name,), cumulated(histogram), histogram.sum)
        yield family


def _device_memory(view: NodeView) -> Iterator[tuple[tuple[str, ...], float]]:
    for device in view.devices:
        labels = (device.backend, device.device)
        yield (*labels, "held"), device.held_bytes
        if device.free_bytes >= 0:
            yield (*labels, "free"), device.free_bytes
            yield (*labels, "other"), max(0, device.total_bytes - device.free_bytes - device.held_bytes)


def gauge(name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
