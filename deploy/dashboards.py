"""Grafana dashboards as code: python deploy/dashboards.py writes deploy/grafana/*.json.

Three boards, linked by tag: Overview (the fleet), Node (pools of one daemon), Sessions. Conventions: `$datasource`,
`$job`, `$instance`, `$pool`; `$__rate_interval`; ratios guarded with `> 0` so that no traffic shows as "no traffic" and
not as 0 %; every description names its metrics, so that a reader can go on in the explorer.
"""

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parent
TAG = "kvhold"
WIDTH = 24

SELECT = '{job=~"$job", instance=~"$instance"}'
POOL = '{job=~"$job", instance=~"$instance", pool=~"$pool"}'


def where(selector: str, *more: str) -> str:
    """A selector with further matchers: where(POOL, 'state="held"')."""
    return selector[:-1] + "".join(f", {matcher}" for matcher in more) + "}"


@dataclass(frozen=True)
class Panel:
    """One panel; `queries` are (legend, expression)."""

    title: str
    kind: str  # timeseries, stat, gauge, table
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str
    width: int = 12
    height: int = 8
    stacked: bool = False
    high: float | None = None  # upper end of the axis
    thresholds: tuple[tuple[str, float | None], ...] = ()
    no_value: str = "no traffic"


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    text: str
    rows: tuple[Row, ...]
    repeats_pool: bool = field(default=True)


USAGE_STEPS = (("green", None), ("yellow", 0.85), ("red", 0.95))


def rate(metric: str, selector: str = POOL) -> str:
    return f"rate({metric}{selector}[$__rate_interval])"


def ratio(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def per_second(by: str, metric: str, selector: str = POOL) -> str:
    return f"sum by ({by}) ({rate(metric, selector)})"


def now(by: str, metric: str, selector: str = POOL) -> str:
    return f"sum by ({by}) ({metric}{selector})"


QUERY_RATE = per_second("instance, pool", "kvhold_prefix_query_tokens_total")
HIT_RATE = per_second("instance, pool", "kvhold_prefix_hit_tokens_total")
STEPS = where(SELECT, 'method="BlockService/Step"')
FAILED = 'code!~"OK|CANCELLED"'
QUARANTINED = now("pool", "kvhold_pool_blocks", where(POOL, 'state="quarantined"'))
BYTES_BY_STATE = (
    f"sum by (pool, state) (kvhold_pool_blocks{POOL}"
    f" / on (instance, pool) group_left () sum without (state) (kvhold_pool_blocks{POOL})"
    f" * on (instance, pool) group_left () kvhold_pool_size_bytes{POOL})"
)


def quantile(q: float, metric: str, by: str, selector: str = SELECT) -> str:
    return f"histogram_quantile({q}, sum by (le, {by}) (rate({metric}_bucket{selector}[$__rate_interval])))"


OVERVIEW = Board(
    "kvhold-overview",
    "kvhold / Overview",
    "Every node at a glance: who is up, how full, how useful, how fast.",
    (
        Row(
            "Now",
            (
                Panel("Daemons up", "stat", "short", (("up", 'sum(up{job=~"$job"})'),), "up", 4, 4),
                Panel(
                    "Pools", "stat", "short", (("pools", f"count(kvhold_pool_info{SELECT})"),), "kvhold_pool_info", 4, 4
                ),
                Panel(
                    "Fullest pool",
                    "gauge",
                    "percentunit",
                    (("{{instance}} {{pool}}", f"topk(1, kvhold_pool_usage_ratio{SELECT})"),),
                    "kvhold_pool_usage_ratio: (held + quarantined) / (all but null and reserved)",
                    4,
                    4,
                    high=1,
                    thresholds=USAGE_STEPS,
                ),
                Panel(
                    "Hit rate",
                    "gauge",
                    "percentunit",
                    (
                        (
                            "hit rate",
                            ratio(
                                f"sum({rate('kvhold_prefix_hit_tokens_total', SELECT)})",
                                f"sum({rate('kvhold_prefix_query_tokens_total', SELECT)})",
                            ),
                        ),
                    ),
                    "kvhold_prefix_hit_tokens_total / kvhold_prefix_query_tokens_total",
                    4,
                    4,
                    high=1,
                ),
                Panel(
                    "Sessions",
                    "stat",
                    "short",
                    (("{{state}}", now("state", "kvhold_sessions", SELECT)),),
                    "kvhold_sessions",
                    4,
                    4,
                ),
                Panel(
                    "Memory in pools",
                    "stat",
                    "bytes",
                    (("bytes", f"sum(kvhold_pool_size_bytes{SELECT})"),),
                    "kvhold_pool_size_bytes",
                    4,
                    4,
                ),
            ),
        ),
        Row(
            "By node",
            (
                Panel(
                    "Usage",
                    "timeseries",
                    "percentunit",
                    (("{{instance}} {{pool}}", f"kvhold_pool_usage_ratio{SELECT}"),),
                    "kvhold_pool_usage_ratio",
                    high=1,
                ),
                Panel(
                    "Hit rate",
                    "timeseries",
                    "percentunit",
                    (("{{instance}} {{pool}}", ratio(HIT_RATE, QUERY_RATE)),),
                    "kvhold_prefix_hit_tokens_total / kvhold_prefix_query_tokens_total, by pool",
                    high=1,
                ),
                Panel(
                    "Tokens served from cache",
                    "timeseries",
                    "short",
                    (("{{instance}} {{source}}", per_second("instance, source", "kvhold_prefix_hit_tokens_total")),),
                    "kvhold_prefix_hit_tokens_total by source, per second",
                    stacked=True,
                ),
                Panel(
                    "Evicted blocks",
                    "timeseries",
                    "short",
                    (("{{instance}} {{pool}}", per_second("instance, pool", "kvhold_evicted_blocks_total")),),
                    "kvhold_evicted_blocks_total, per second",
                ),
                Panel(
                    "Step latency p99",
                    "timeseries",
                    "s",
                    (("{{instance}}", quantile(0.99, "kvhold_rpc_duration_seconds", "instance", STEPS)),),
                    "kvhold_rpc_duration_seconds_bucket of BlockService/Step",
                ),
                Panel(
                    "Event loop lag p99",
                    "timeseries",
                    "s",
                    (("{{instance}}", quantile(0.99, "kvhold_event_loop_lag_seconds", "instance")),),
                    "kvhold_event_loop_lag_seconds_bucket",
                ),
                Panel(
                    "Calls that failed",
                    "timeseries",
                    "short",
                    (
                        (
                            "{{instance}} {{method}} {{code}}",
                            per_second("instance, method, code", "kvhold_rpcs_total", where(SELECT, FAILED)),
                        ),
                    ),
                    "kvhold_rpcs_total but OK and CANCELLED, per second",
                    no_value="none",
                ),
                Panel(
                    "Device memory",
                    "timeseries",
                    "bytes",
                    (("{{instance}} {{device}} {{state}}", f"kvhold_device_memory_bytes{SELECT}"),),
                    "kvhold_device_memory_bytes",
                    stacked=True,
                    no_value="no device",
                ),
            ),
        ),
    ),
)

NODE = Board(
    "kvhold-node",
    "kvhold / Node",
    "The pools of one daemon: what their memory holds over time, where tokens come from, what was evicted.",
    (
        Row(
            "Memory",
            (
                Panel(
                    "Blocks by state",
                    "timeseries",
                    "short",
                    (("{{pool}} {{state}}", now("pool, state", "kvhold_pool_blocks")),),
                    "kvhold_pool_blocks: disjoint states, the sum is the pool",
                    stacked=True,
                    height=9,
                ),
                Panel(
                    "Bytes by state",
                    "timeseries",
                    "bytes",
                    (("{{pool}} {{state}}", BYTES_BY_STATE),),
                    "kvhold_pool_blocks × kvhold_pool_size_bytes / all blocks",
                    stacked=True,
                    height=9,
                ),
                Panel(
                    "Usage",
                    "timeseries",
                    "percentunit",
                    (("{{pool}}", f"kvhold_pool_usage_ratio{POOL}"),),
                    "kvhold_pool_usage_ratio",
                    high=1,
                ),
                Panel(
                    "Waiting for somebody",
                    "timeseries",
                    "short",
                    (
                        ("{{pool}} provisional", f"kvhold_pool_provisional_blocks{POOL}"),
                        ("{{pool}} fenced", f"kvhold_pool_fenced_blocks{POOL}"),
                        ("{{pool}} quarantined", QUARANTINED),
                        ("{{pool}} given ahead", f"kvhold_pool_lookahead_blocks{POOL}"),
                        ("{{pool}} allotted", f"kvhold_pool_allotted_blocks{POOL}"),
                    ),
                    "kvhold_pool_provisional_blocks, kvhold_pool_fenced_blocks, kvhold_pool_lookahead_blocks,"
                    " kvhold_pool_allotted_blocks, kvhold_pool_blocks{state=quarantined}",
                ),
            ),
        ),
        Row(
            "Prefix cache",
            (
                Panel(
                    "Tokens asked for, by where they came from",
                    "timeseries",
                    "short",
                    (
                        ("{{pool}} hit {{source}}", per_second("pool, source", "kvhold_prefix_hit_tokens_total")),
                        ("{{pool}} miss {{reason}}", per_second("pool, reason", "kvhold_prefix_miss_tokens_total")),
                    ),
                    (
                        "kvhold_prefix_hit_tokens_total and kvhold_prefix_miss_tokens_total, per second; "
                        "together they are kvhold_prefix_query_tokens_total"
                    ),
                    stacked=True,
                    height=9,
                ),
                Panel(
                    "Hit rate",
                    "timeseries",
                    "percentunit",
                    (
                        (
                            "{{pool}}",
                            ratio(
                                per_second("pool", "kvhold_prefix_hit_tokens_total"),
                                per_second("pool", "kvhold_prefix_query_tokens_total"),
                            ),
                        ),
                    ),
                    "kvhold_prefix_hit_tokens_total / kvhold_prefix_query_tokens_total",
                    high=1,
                    height=9,
                ),
                Panel(
                    "What more memory would bring back",
                    "timeseries",
                    "short",
                    (
                        (
                            "{{pool}} within {{within}}",
                            per_second("pool, within", "kvhold_prefix_miss_evicted_age_tokens_total"),
                        ),
                    ),
                    (
                        "kvhold_prefix_miss_evicted_age_tokens_total: "
                        "misses by eviction, by how many pools' worth of evictions ago"
                    ),
                    stacked=True,
                ),
                Panel(
                    "Published and evicted",
                    "timeseries",
                    "short",
                    (
                        ("{{pool}} published", per_second("pool", "kvhold_published_blocks_total")),
                        ("{{pool}} evicted", per_second("pool", "kvhold_evicted_blocks_total")),
                    ),
                    "kvhold_published_blocks_total, kvhold_evicted_blocks_total, per second",
                ),
                Panel(
                    "Preempted sequences: asked and hit",
                    "timeseries",
                    "short",
                    (
                        ("{{pool}} asked", per_second("pool", "kvhold_prefix_resumed_query_tokens_total")),
                        ("{{pool}} hit", per_second("pool", "kvhold_prefix_resumed_hit_tokens_total")),
                    ),
                    "kvhold_prefix_resumed_query_tokens_total, kvhold_prefix_resumed_hit_tokens_total: counted apart",
                ),
                Panel(
                    "Age at eviction",
                    "timeseries",
                    "s",
                    tuple(
                        (
                            f"{{{{pool}}}} p{int(q * 100)}",
                            quantile(q, "kvhold_block_idle_before_evict_seconds", "pool", POOL),
                        )
                        for q in (0.1, 0.5, 0.9)
                    ),
                    (
                        "kvhold_block_idle_before_evict_seconds_bucket: "
                        "time from the last use to being handed out again, of every 64th block"
                    ),
                ),
                Panel(
                    "Began with",
                    "table",
                    "short",
                    (("", f"kvhold_pool_recovery_info{POOL}"),),
                    "kvhold_pool_recovery_info",
                ),
            ),
        ),
        Row(
            "Steps",
            (
                Panel(
                    "Allocations by result",
                    "timeseries",
                    "short",
                    (("{{pool}} {{result}}", per_second("pool, result", "kvhold_allocations_total")),),
                    "kvhold_allocations_total, items per second",
                ),
                Panel(
                    "Step latency",
                    "timeseries",
                    "s",
                    tuple(
                        (f"p{int(q * 100)}", quantile(q, "kvhold_rpc_duration_seconds", "method", STEPS))
                        for q in (0.5, 0.9, 0.99)
                    ),
                    "kvhold_rpc_duration_seconds_bucket of BlockService/Step",
                ),
                Panel(
                    "Items a step",
                    "timeseries",
                    "short",
                    tuple(
                        (f"{{{{pool}}}} p{int(q * 100)}", quantile(q, "kvhold_step_items", "pool", POOL))
                        for q in (0.5, 0.99)
                    ),
                    "kvhold_step_items_bucket: freed, extended and admitted sequences",
                ),
                Panel(
                    "Calls",
                    "timeseries",
                    "short",
                    (("{{method}}", f"sum by (method) ({rate('kvhold_rpcs_total', SELECT)}) > 0"),),
                    "kvhold_rpcs_total, per second",
                ),
                Panel(
                    "Calls running",
                    "timeseries",
                    "short",
                    (("{{method}}", f"sum by (method) (kvhold_rpcs_in_flight{SELECT}) > 0"),),
                    "kvhold_rpcs_in_flight",
                    no_value="none",
                ),
            ),
        ),
    ),
)

SESSIONS = Board(
    "kvhold-sessions",
    "kvhold / Sessions",
    "Who is connected, who holds what, who died and how long their blocks wait.",
    (
        Row(
            "Clients",
            (
                Panel(
                    "Sessions by state",
                    "timeseries",
                    "short",
                    (("{{pool}} {{state}}", now("pool, state", "kvhold_sessions")),),
                    "kvhold_sessions",
                ),
                Panel(
                    "Sessions that ended",
                    "timeseries",
                    "short",
                    (
                        (
                            "{{pool}} {{cause}}",
                            f"sum by (pool, cause) (increase(kvhold_sessions_ended_total{POOL}[$__rate_interval]))",
                        ),
                    ),
                    "kvhold_sessions_ended_total",
                ),
                Panel(
                    "Blocks held, by tenant",
                    "timeseries",
                    "short",
                    (("{{pool}} {{tenant}}", now("pool, tenant", "kvhold_tenant_held_blocks")),),
                    "kvhold_tenant_held_blocks: the largest, and the rest as other",
                    stacked=True,
                ),
                Panel(
                    "Sequences that hold blocks",
                    "timeseries",
                    "short",
                    (("{{pool}}", now("pool", "kvhold_pool_sequences")),),
                    "kvhold_pool_sequences",
                ),
            ),
        ),
        Row(
            "The dead and the slow",
            (
                Panel(
                    "Oldest quarantine",
                    "timeseries",
                    "s",
                    (("{{pool}}", f"max by (pool) (kvhold_quarantine_oldest_seconds{POOL})"),),
                    "kvhold_quarantine_oldest_seconds",
                ),
                Panel(
                    "Quarantined blocks",
                    "timeseries",
                    "short",
                    (("{{pool}}", QUARANTINED),),
                    "kvhold_pool_blocks{state=quarantined}",
                ),
                Panel(
                    "Steps replayed",
                    "timeseries",
                    "short",
                    (("{{pool}}", per_second("pool", "kvhold_replayed_steps_total")),),
                    "kvhold_replayed_steps_total: retried steps that were answered from the step log",
                ),
                Panel(
                    "Processes that map the memory",
                    "timeseries",
                    "short",
                    (("{{pool}}", now("pool", "kvhold_pool_mappings")),),
                    "kvhold_pool_mappings",
                ),
            ),
        ),
    ),
)

BOARDS = (OVERVIEW, NODE, SESSIONS)


# ---- JSON -----------------------------------------------------------------------------------------------------------
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def variable(name: str, query: str, *, multi: bool = True) -> dict[str, Any]:
    return {
        "name": name, "label": name, "type": "query", "datasource": SOURCE, "query": {"query": query, "refId": name},
        "definition": query, "refresh": 2, "sort": 1, "multi": multi, "includeAll": multi, "allValue": ".*",
        "current": {"text": "All", "value": "$__all"} if multi else {},
    }  # fmt: skip


def variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus", "refresh": 1},
        variable("job", "label_values(kvhold_build_info, job)"),
        variable("instance", 'label_values(kvhold_build_info{job=~"$job"}, instance)'),
        variable("pool", 'label_values(kvhold_pool_info{job=~"$job", instance=~"$instance"}, pool)'),
    ]


def panel_json(panel: Panel, identity: int, x: int, y: int) -> dict[str, Any]:
    steps = [{"color": color, "value": value} for color, value in panel.thresholds] or [
        {"color": "green", "value": None}
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "noValue": panel.no_value, "min": 0,
                                "thresholds": {"mode": "absolute", "steps": steps}}  # fmt: skip
    if panel.high is not None:
        defaults["max"] = panel.high
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 25 if panel.stacked else 5, "stacking": stacking}
    targets = [
        {"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend or "__auto",
         **({"format": "table", "instant": True} if panel.kind == "table" else {})}
        for i, (legend, expr) in enumerate(panel.queries)
    ]  # fmt: skip
    return {
        "id": identity, "title": panel.title, "type": panel.kind, "description": panel.text, "datasource": SOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y}, "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if panel.kind == "timeseries" else {},
    }  # fmt: skip


def board_json(board: Board) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in board.rows:
        panels.append({"id": len(panels) + 1, "title": row.title, "type": "row", "collapsed": False, "panels": [],
                       "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}})  # fmt: skip
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            panels.append(panel_json(panel, len(panels) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return {
        "uid": board.uid, "title": board.title, "description": board.text, "tags": [TAG], "timezone": "browser",
        "schemaVersion": 39, "version": 1, "editable": True, "refresh": "30s", "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": [TAG], "title": "kvhold", "asDropdown": False, "includeVars": True,
                   "keepTime": True, "targetBlank": False, "icon": "", "url": ""}],
        "templating": {"list": variables()}, "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip


def expressions(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """(panel title, expression) of every target."""
    return [(p["title"], t["expr"]) for p in dashboard["panels"] for t in p.get("targets", [])]


def concrete(expression: str, **variables: str) -> str:
    """The expression with Grafana's variables replaced; unknown ones match everything."""
    text = expression.replace("$__rate_interval", variables.pop("rate_interval", "1m"))
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    return re.sub(r"\$\w+", ".*", text)


def files() -> dict[Path, str]:
    return {DEPLOY / "grafana" / f"{b.uid}.json": json.dumps(board_json(b), indent=2) + "\n" for b in BOARDS}


def main() -> int:
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
