"""Label sets stay bounded, rare counters exist, parts sum."""

import random

from kvhold_server.exposition import expose, join
from kvhold_server.metrics import SnapshotCollector
from kvhold_server.node.telemetry import Telemetry
from kvhold_server.observe.extra_metrics import MAX_TENANT_SERIES, OTHER_TENANTS, ViewCollector, tenant_blocks
from kvhold_server.observe.view import DeviceView, NodeView, ResidencyHistograms
from kvhold_server.pool.residency import ResidencySample
from tests.observe.views import node_view, pool_view, session_view


def exposed(view: NodeView, accept: str = "") -> str:
    collectors = (SnapshotCollector(view.snapshot), ViewCollector(view))
    return join(expose(collectors, accept)).decode()


def series(view: NodeView) -> set[str]:
    text = exposed(view)
    return {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}


def test_met_05_ten_thousand_clients_add_no_series() -> None:
    """MET-05: names of clients, sessions and tenants cannot grow the exposition without bound."""
    few = node_view(pool_view(), sessions=tuple(session_view(i) for i in range(MAX_TENANT_SERIES + 1)))
    many = node_view(pool_view(), sessions=tuple(session_view(i) for i in range(10_000)))
    assert len(series(many)) == len(series(few))
    assert not any("engine-" in name or "00000" in name for name in series(many))


def test_tenants_sum_to_what_is_held_whatever_is_folded() -> None:
    rng = random.Random(7)
    sessions = tuple(session_view(i, num_held_blocks=rng.randrange(100)) for i in range(50))
    found = tenant_blocks(node_view(pool_view(), sessions=sessions))
    assert sum(found.values()) == sum(session.num_held_blocks for session in sessions)
    assert len(found) == MAX_TENANT_SERIES + 1
    named = [blocks for (_, tenant), blocks in found.items() if tenant != OTHER_TENANTS]
    smallest = min(named)
    assert sum(session.num_held_blocks > smallest for session in sessions) <= MAX_TENANT_SERIES


def test_a_tenant_called_other_is_not_lost() -> None:
    sessions = tuple(
        session_view(i, num_held_blocks=100 - i, tenant=OTHER_TENANTS if i == 0 else f"t{i}") for i in range(20)
    )
    found = tenant_blocks(node_view(pool_view(), sessions=sessions))
    assert sum(found.values()) == sum(100 - i for i in range(20))


def test_sessions_of_a_pool_that_is_gone_are_not_counted() -> None:
    assert tenant_blocks(node_view(pool_view(), sessions=(session_view(1, pool="deleted"),))) == {}


def test_met_06_only_counters_and_gauges_of_now_are_exported() -> None:
    """MET-06: no rate, no window: what a log says over a minute is the reader's own division."""
    names = {name.split("{")[0] for name in series(node_view(pool_view(), sessions=(session_view(),)))}
    assert not {name for name in names if "rate" in name or "per_second" in name or "window" in name}


def test_misses_by_age_sum_to_misses_by_eviction() -> None:
    view = node_view(pool_view())
    text = exposed(view)
    lines = [line for line in text.splitlines() if line.startswith("kvhold_prefix_miss_evicted_age_tokens_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in lines) == view.snapshot.pools[0].prefix.miss_evicted_tokens


def test_devices_show_what_others_use() -> None:
    device = DeviceView(backend="cuda_vmm", device="GPU-1", total_bytes=100, free_bytes=30, held_bytes=50)
    unknown = DeviceView(backend="cuda_ipc", device="GPU-1", total_bytes=100, free_bytes=-1, held_bytes=50)
    view = node_view(pool_view(), devices=(device, unknown))
    text = exposed(view)
    shown = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "device=" in line}
    labels = 'kvhold_device_memory_bytes{backend="cuda_vmm",device="GPU-1",state='
    assert [shown[f'{labels}"{state}"}}'] for state in ("held", "free", "other")] == [50, 30, 20]
    assert sum("cuda_ipc" in name for name in shown) == 1, "free and other are left out where nobody can say"


def test_the_oldest_dead_session_counts() -> None:
    dead = [session_view(i, state="quarantined", dead_for_s=10.0 * i) for i in range(3)]
    view = node_view(pool_view(), pool_view("code"), sessions=(*dead, session_view(9)))
    text = exposed(view)
    assert 'kvhold_quarantine_oldest_seconds{pool="chat"} 20.0' in text
    assert 'kvhold_quarantine_oldest_seconds{pool="code"} 0.0' in text


def test_ages_at_eviction_fall_into_buckets() -> None:
    histograms = ResidencyHistograms()
    histograms.absorb([ResidencySample(lifetime_s=50, idle_s=5.0, reuse_gaps_s=(0.5, 20.0))])
    frozen = histograms.copy()
    histograms.absorb([ResidencySample(lifetime_s=50, idle_s=5.0, reuse_gaps_s=())])
    assert frozen.idle_before_evict.sum == 5.0 and histograms.idle_before_evict.sum == 10.0
    view = node_view(pool_view(residency=frozen), telemetry=Telemetry())
    text = exposed(view)
    assert 'kvhold_block_idle_before_evict_seconds_bucket{le="1.0",pool="chat"} 0.0' in text
    assert 'kvhold_block_idle_before_evict_seconds_bucket{le="10.0",pool="chat"} 1.0' in text
    assert 'kvhold_block_reuse_gap_seconds_count{pool="chat"} 2.0' in text


def test_openmetrics_carries_the_trace_of_a_slow_call() -> None:
    telemetry = Telemetry()
    stats = telemetry.method("BlockService/Step")
    stats.finished("OK", 0.003)
    stats.exemplify(0.003, "5f" * 16, 1_700_000_000.0)
    view = node_view(pool_view(), telemetry=telemetry)
    text = exposed(view, "application/openmetrics-text; version=1.0.0")
    marked = [line for line in text.splitlines() if "trace_id" in line]
    assert len(marked) == 1 and 'le="0.005"' in marked[0] and "5f" * 16 in marked[0]
    assert text.count("# EOF") == 1 and text.endswith("# EOF\n")
    assert "trace_id" not in exposed(view), "the text format has no place for it"
