"""Views made by hand, with numbers that are all different, so that a mixed-up one is seen."""

from typing import Any

from kvhold_server.metrics import PoolSnapshot, Snapshot
from kvhold_server.node.live_pool import PoolTotals, RecoveryReport
from kvhold_server.node.telemetry import Telemetry
from kvhold_server.observe.view import GroupView, NodeView, PlacementView, PoolView, SessionView
from kvhold_server.pool.values import Counts, PrefixStatistics

COUNTS = Counts(
    free=11, cached=23, held=41, quarantined=5, reserved=2, null=1, total=83, provisional=7, fenced=3, sequences=13,
    sessions=2,
)  # fmt: skip
STATISTICS = PrefixStatistics(
    requests=9,
    query_tokens=1000,
    hit_own_tokens=100,
    hit_shared_tokens=200,
    miss_never_seen_tokens=300,
    miss_evicted_tokens=150,
    miss_evicted_by_age_tokens=[10, 20, 50, 70],
    miss_rule_tokens=130,
    miss_other_tokens=120,
)


def pool_view(name: str = "chat", **fields: Any) -> PoolView:
    snapshot = PoolSnapshot(
        num_lookahead_blocks=3,
        num_allotted_blocks=64,
        name=name,
        model="example/model",
        backend="posix_shm",
        counts=COUNTS,
        prefix=fields.pop("prefix", STATISTICS),
        totals=PoolTotals(num_steps=77),
        recovery=fields.pop("recovery", RecoveryReport(outcome="fresh", reason="NEW_POOL")),
        sessions={"live": 1, "grace": 0, "quarantined": 1},
        size_bytes=83 << 20,
        block_size_bytes=1 << 20,
        content_generation=4,
    )
    values: dict[str, Any] = {
        "plan_fingerprint": "c15f893e55a1ffff",
        "block_size_tokens": 16,
        "num_ranks": 1,
        "age_s": 60.0,
        "num_mappings": 3,
        "groups": (
            GroupView(kind="full_attention", block_size_tokens=16, num_layers=2, first_layer="a", last_layer="b"),
        ),
        "placements": (
            PlacementView(layer_name="a", group=0, start_bytes=0, size_bytes=10, axis_bytes=20, is_in_block=True),
            PlacementView(layer_name="b", group=0, start_bytes=10, size_bytes=10, axis_bytes=20, is_in_block=True),
        ),
        "evicted_miss_tokens_by_age": tuple(STATISTICS.miss_evicted_by_age_tokens),
    }
    return PoolView(snapshot=snapshot, **(values | fields))


def session_view(i: int = 0, **fields: Any) -> SessionView:
    values: dict[str, Any] = {
        "short_id": f"{i:08d}",
        "pool": "chat",
        "client_name": f"engine-{i}",
        "tenant": f"team-{i}",
        "state": "live",
        "epoch": 1,
        "age_s": 5.0,
        "num_held_blocks": i,
    }
    return SessionView(**(values | fields))


def node_view(*pools: PoolView, sessions: tuple[SessionView, ...] = (), **fields: Any) -> NodeView:
    snapshot = Snapshot(
        boot_id="b00t1d00",
        version="1.2.3",
        is_draining=False,
        uptime_s=90.0,
        pools=tuple(pool.snapshot for pool in pools),
        telemetry=fields.pop("telemetry", Telemetry()),
    )
    return NodeView(snapshot=snapshot, pools=pools, sessions=sessions, **fields)
