"""/metrics: a snapshot taken pool by pool, rendered family by family, so that a scrape delays no step.

    Node ──observe/take.py──▶ Snapshot ──SnapshotCollector──▶ families ──exposition.py──▶ parts of text

What one pool says is of one moment, so that its block states sum to its blocks.

Nothing is counted here: numbers come from the pool, the session table and the shell's telemetry, where the truth is.
There is no registry. Label sets are bounded by the daemon's own bounds: pools, states, results, methods, codes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as WireExemplar

from kvhold_server.node.live_pool import LivePool, PoolTotals, RecoveryReport
from kvhold_server.node.node import Node
from kvhold_server.node.telemetry import Exemplar, Histogram, Telemetry
from kvhold_server.pool.values import Counts, PrefixStatistics

PREFIX = "kvhold_"
SESSION_STATES = ("live", "grace", "quarantined")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """One pool at one moment."""

    name: str
    model: str
    backend: str
    counts: Counts
    prefix: PrefixStatistics
    totals: PoolTotals
    recovery: RecoveryReport
    sessions: dict[str, int]
    num_lookahead_blocks: int
    num_allotted_blocks: int
    size_bytes: int
    block_size_bytes: int
    content_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a scrape shows."""

    boot_id: str
    version: str
    is_draining: bool
    uptime_s: float
    pools: tuple[PoolSnapshot, ...]
    telemetry: Telemetry


def sessions_by_state(node: Node) -> dict[str, dict[str, int]]:
    """Pool → state → sessions."""
    by_pool: dict[str, dict[str, int]] = {name: dict.fromkeys(SESSION_STATES, 0) for name in node.pools}
    for session in node.sessions.sessions():
        word = session.state.value if session.state.is_open else "quarantined"
        if session.pool in by_pool:
            by_pool[session.pool][word] += 1
    return by_pool


def lookahead_by_pool(node: Node) -> dict[str, int]:
    """Pool → blocks that its schedulers were given ahead of time."""
    by_pool: dict[str, int] = dict.fromkeys(node.pools, 0)
    for session in node.sessions.sessions():
        if session.pool in by_pool and session.state.is_open:
            by_pool[session.pool] += session.num_lookahead_blocks
    return by_pool


def take_pool(live: LivePool, sessions: dict[str, int], num_lookahead_blocks: int) -> PoolSnapshot:
    """Copies what changes. Call on the event loop."""
    return PoolSnapshot(
        name=live.name,
        model=live.identity.content.model,
        backend=live.identity.options.backend,
        counts=live.pool.counts(),
        prefix=live.pool.prefix_statistics(),
        totals=live.totals.copy(),
        recovery=live.recovery,
        sessions=sessions,
        num_lookahead_blocks=num_lookahead_blocks,
        num_allotted_blocks=live.pool.num_allotted_blocks,
        size_bytes=live.size_bytes,
        block_size_bytes=live.plan.ranks[0].bytes_per_block if live.plan else 0,
        content_generation=live.content_generation,
    )


class SnapshotCollector(Collector):
    """Families of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield _info("build", "Version of the daemon.", version=snapshot.version, boot_id=snapshot.boot_id)
        yield GaugeMetricFamily(PREFIX + "uptime_seconds", "Time since the daemon started.", snapshot.uptime_s)
        yield GaugeMetricFamily(PREFIX + "draining", "1 while the daemon is draining.", int(snapshot.is_draining))
        yield from _pool_families(snapshot.pools)
        yield from _rpc_families(snapshot.telemetry)


def _info(name: str, text: str, **labels: str) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}{name}_info", text, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def block_states(counts: Counts) -> dict[str, int]:
    """Disjoint states: they sum to all blocks of the pool."""
    return {
        "free": counts.free,
        "cached": counts.cached,
        "held": counts.held,
        "quarantined": counts.quarantined,
        "reserved": counts.reserved,
        "null": counts.null,
    }


def usage_ratio(counts: Counts) -> float:
    """Share of usable blocks (the null block and reserved ones are none) that nobody could be given now."""
    usable = counts.total - counts.null - counts.reserved
    return (counts.held + counts.quarantined) / usable if usable else 0.0


@dataclass(frozen=True, slots=True)
class Spec:
    """One family about pools: how to get its samples, as label values → value."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    labels: tuple[str, ...]
    samples: Callable[[PoolSnapshot], dict[tuple[str, ...], float]]


def _one(value: Callable[[PoolSnapshot], float]) -> Callable[[PoolSnapshot], dict[tuple[str, ...], float]]:
    return lambda pool: {(): value(pool)}


def _many(values: Callable[[PoolSnapshot], dict[str, int]]) -> Callable[[PoolSnapshot], dict[tuple[str, ...], float]]:
    return lambda pool: {(word,): float(value) for word, value in values(pool).items()}


def _hits(pool: PoolSnapshot) -> dict[str, int]:
    return {"self": pool.prefix.hit_own_tokens, "shared": pool.prefix.hit_shared_tokens}


def _misses(pool: PoolSnapshot) -> dict[str, int]:
    stats = pool.prefix
    return {
        "never_seen": stats.miss_never_seen_tokens,
        "evicted": stats.miss_evicted_tokens,
        "rule": stats.miss_rule_tokens,
        "other": stats.miss_other_tokens,
    }


def _dropped(pool: PoolSnapshot) -> dict[str, int]:
    found = pool.recovery
    return {
        "torn": found.num_dropped_torn_blocks,
        "provisional": found.num_dropped_provisional_blocks,
        "generation": found.num_dropped_generation_blocks,
        "checksum": found.num_dropped_checksum_blocks,
    }


GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
POOL_FAMILIES: tuple[Spec, ...] = (
    Spec(GAUGE, "pool_blocks", "Blocks by state; the states are disjoint and sum to the pool.", ("state",),
         _many(lambda p: block_states(p.counts))),
    Spec(GAUGE, "pool_provisional_blocks", "Published, not yet visible to other sessions.", (),
         _one(lambda p: p.counts.provisional)),
    Spec(GAUGE, "pool_fenced_blocks", "Free, waiting for a step of their last holder to complete.", (),
         _one(lambda p: p.counts.fenced)),
    Spec(GAUGE, "pool_lookahead_blocks", "Part of held: given by steps asked for before the device had begun them.", (),
         _one(lambda p: p.num_lookahead_blocks)),
    Spec(GAUGE, "pool_allotted_blocks", "Free, cached, or set aside: its only session may have drawn them already.", (),
         _one(lambda p: p.num_allotted_blocks)),
    Spec(GAUGE, "pool_usage_ratio", "Share of usable blocks (all but the null block) held or quarantined.", (),
         _one(lambda p: usage_ratio(p.counts))),
    Spec(GAUGE, "pool_sequences", "Sequences that hold blocks.", (), _one(lambda p: p.counts.sequences)),
    Spec(GAUGE, "pool_size_bytes", "Memory of the pool on all ranks.", (), _one(lambda p: p.size_bytes)),
    Spec(GAUGE, "pool_block_size_bytes", "Bytes of one block over all layers of rank 0.", (),
         _one(lambda p: p.block_size_bytes)),
    Spec(GAUGE, "pool_content_generation", "Grows with each content update.", (), _one(lambda p: p.content_generation)),
    Spec(GAUGE, "sessions", "Sessions by state.", ("state",), _many(lambda p: p.sessions)),
    Spec(COUNTER, "sessions_ended", "Sessions that ended, by cause.", ("cause",),
         _many(lambda p: p.totals.sessions_ended)),
    Spec(COUNTER, "allocations", "Extend and admit items by result.", ("result",),
         _many(lambda p: p.totals.allocations)),
    Spec(COUNTER, "published_blocks", "Blocks that got a hash.", (), _one(lambda p: p.totals.num_published_blocks)),
    Spec(COUNTER, "evicted_blocks", "Blocks that lost their hash.", (), _one(lambda p: p.totals.num_evicted_blocks)),
    Spec(COUNTER, "steps", "Steps applied.", (), _one(lambda p: p.totals.num_steps)),
    Spec(COUNTER, "replayed_steps", "Steps answered again from memory.", (),
         _one(lambda p: p.totals.num_replayed_steps)),
    Spec(COUNTER, "memory_exports", "Answers of ExportMemory.", (), _one(lambda p: p.totals.num_exports)),
    Spec(COUNTER, "prefix_requests", "Admissions that asked the cache.", (), _one(lambda p: p.prefix.requests)),
    Spec(COUNTER, "prefix_query_tokens", "Tokens asked for at admissions.", (), _one(lambda p: p.prefix.query_tokens)),
    Spec(COUNTER, "prefix_hit_tokens", "Tokens found, by who had published them.", ("source",), _many(_hits)),
    Spec(COUNTER, "prefix_miss_tokens", "Tokens not found, by reason; hits and misses sum to the query.", ("reason",),
         _many(_misses)),
    Spec(COUNTER, "prefix_resumed_query_tokens", "Tokens asked for by preempted sequences, counted apart.", (),
         _one(lambda p: p.prefix.resumed_query_tokens)),
    Spec(COUNTER, "prefix_resumed_hit_tokens", "Tokens found for preempted sequences, counted apart.", (),
         _one(lambda p: p.prefix.resumed_hit_tokens)),
    Spec(GAUGE, "recovered_blocks", "Blocks that the pool kept when it was opened.", (),
         _one(lambda p: p.recovery.num_kept_blocks)),
    Spec(GAUGE, "recovery_dropped_blocks", "Records that the pool dropped when it was opened, by reason.", ("reason",),
         _many(_dropped)),
)  # fmt: skip


def _pool_families(pools: tuple[PoolSnapshot, ...]) -> Iterator[Metric]:
    info = GaugeMetricFamily(PREFIX + "pool_info", "What a pool is for.", labels=["pool", "model", "backend"])
    for pool in pools:
        info.add_metric([pool.name, pool.model, pool.backend], 1)
    yield info
    for spec in POOL_FAMILIES:
        family = spec.kind(PREFIX + spec.name, spec.text, labels=["pool", *spec.labels])
        for pool in pools:
            for labels, value in spec.samples(pool).items():
                family.add_metric([pool.name, *labels], value)
        yield family


def _rpc_families(telemetry: Telemetry) -> Iterator[Metric]:
    methods = telemetry.methods.items()
    calls = CounterMetricFamily(PREFIX + "rpcs", "Calls by method and status code.", labels=["method", "code"])
    in_flight = GaugeMetricFamily(PREFIX + "rpcs_in_flight", "Calls being served.", labels=["method"])
    for method, stats in methods:
        for code, count in stats.codes.items():
            calls.add_metric([method, code], count)
        in_flight.add_metric([method], stats.in_flight)
    yield calls
    yield in_flight
    durations = HistogramMetricFamily(PREFIX + "rpc_duration_seconds", "Time to serve a call.", labels=["method"])
    for method, stats in methods:
        if any(stats.durations.buckets):  # a histogram is a dozen lines: only of methods that are used
            durations.add_metric([method], cumulated(stats.durations, stats.exemplars), stats.durations.sum)
    yield durations
    lag = HistogramMetricFamily(PREFIX + "event_loop_lag_seconds", "How late the event loop came to a timer.")
    lag.add_metric([], cumulated(telemetry.loop_lag), telemetry.loop_lag.sum)
    yield lag
    unexpected = CounterMetricFamily(PREFIX + "unexpected_errors", "Bugs met while serving; see the log.")
    unexpected.add_metric([], telemetry.num_unexpected_errors)
    yield unexpected


Bucket: TypeAlias = "tuple[str, float] | tuple[str, float, WireExemplar]"


def cumulated(histogram: Histogram, exemplars: Mapping[int, Exemplar] | None = None) -> list[Bucket]:
    """Buckets as the exposition format wants them: cumulated, with their upper ends as text, exemplars where known."""
    running, found = 0, list[Bucket]()
    for i, (bound, count) in enumerate(zip((*map(str, histogram.bounds), "+Inf"), histogram.buckets, strict=True)):
        running += count
        known = (exemplars or {}).get(i)
        if known is None or not count:
            found.append((bound, float(running)))
        else:
            wire = WireExemplar({"trace_id": known.trace_id}, known.value, known.at_s)
            found.append((bound, float(running), wire))
    return found
