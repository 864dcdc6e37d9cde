"""The node page: what this daemon's memory does, as one HTML document that needs nothing from anywhere else.

Every number is in the HTML that the server sends. The script only asks for the same HTML again, swaps the parts marked
`data-live`, and draws the block maps, so that there is one rendering and not two. Text is escaped where it is put in.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from importlib.resources import files
from string import Template

from kvhold_server.metrics import PoolSnapshot, block_states, usage_ratio
from kvhold_server.node.telemetry import Histogram
from kvhold_server.observe.view import NodeView, PlacementView, PoolView, SessionView

OUTCOME_WORDS = {
    "hit_own": "hit, own session",
    "hit_shared": "hit, another session",
    "miss_never_seen": "never seen",
    "miss_evicted": "was evicted",
    "miss_rule": "cut by a rule",
    "miss_other": "not visible yet",
}
MAX_SHOWN_SESSIONS = 100
GROUP_COLOURS = ("--held", "--cached", "--other", "--miss", "--quarantined", "--provisional", "--reserved", "--never")


def token_outcomes(pool: PoolSnapshot) -> dict[str, int]:
    """Outcome → tokens: disjoint, and their sum is what was asked for."""
    prefix = pool.prefix
    return {
        "hit_own": prefix.hit_own_tokens,
        "hit_shared": prefix.hit_shared_tokens,
        "miss_never_seen": prefix.miss_never_seen_tokens,
        "miss_evicted": prefix.miss_evicted_tokens,
        "miss_rule": prefix.miss_rule_tokens,
        "miss_other": prefix.miss_other_tokens,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What the reader asked for, and the answer as text."""

    pool: str = ""
    query: str = ""
    answer: str = ""


class Page:
    """The template, read once, and the policy that lets its own script run and nothing else."""

    def __init__(self) -> None:
        self._template = Template(files("kvhold_server.observe").joinpath("page.html").read_text("utf-8"))
        shown = self._template.substitute(body="")
        script = _hash(re.findall(r"<script>(.*?)</script>", shown, re.S)[0])
        self.headers = {
            "Content-Security-Policy": f"default-src 'none'; script-src '{script}'; style-src 'unsafe-inline'; "
            "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        }

    def render(self, view: NodeView, events: Sequence[str], search: Search) -> str:
        """The whole document."""
        return self._template.substitute(body=body(view, events, search))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def body(view: NodeView, events: Sequence[str], search: Search) -> str:
    """Everything inside <body> but the script."""
    pools = "".join(_pool(pool) for pool in view.pools) or _no_pools()
    return (
        f"<header><h1>kvhold</h1><span data-live='head' class=dim>{_head(view)}</span>"
        "<span><button id=pause type=button hidden aria-pressed=false>Pause</button> "
        "<span id=status role=status class=dim></span></span></header>"
        f"<main>{_warnings(view)}{pools}{_sessions(view)}{_search(view, search)}{_events(events)}{_calls(view)}</main>"
        "<footer class=dim><p><a href=/metrics>/metrics</a> · <a href=/view.json>/view.json</a> · read-only</p>"
        "</footer>"
    )


# ---- parts ----------------------------------------------------------------------------------------------------------
def _head(view: NodeView) -> str:
    now = view.snapshot
    state = " · <b>draining</b>" if now.is_draining else ""
    return (
        f"version {escape(now.version)} · up {duration(now.uptime_s)} · boot {escape(now.boot_id[:8])}"
        f" · {len(view.pools)} pools · {len(view.sessions)} sessions{state}"
    )


def _warnings(view: NodeView) -> str:
    """What needs a person, if anything does."""
    found = [f"Memory backend {b.name} is not well: {b.detail}" for b in view.backends if not b.ok]
    found += [
        f"Session {s.short_id} of pool {s.pool} is dead; its blocks wait: {s.quarantine_reason}"
        for s in view.sessions
        if s.state == "quarantined" and s.quarantine_reason
    ]
    found += [
        f"Pool {p.name} came back empty: {p.recovery.reason} {p.recovery.detail}"
        for p in view.snapshot.pools
        if p.recovery.outcome == "fresh" and p.recovery.reason not in ("", "NEW_POOL")
    ]
    if view.snapshot.telemetry.num_unexpected_errors:
        found.append(
            f"{view.snapshot.telemetry.num_unexpected_errors} calls failed with a bug of ours; see the log's tracebacks"
        )
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    shown = f"<ul class='card warn'>{items}</ul>" if items else ""
    return f"<div data-live=warnings role=alert>{shown}</div>"


def _no_pools() -> str:
    return "<section class=card><h2>No pool yet</h2><p>An engine makes one with OpenPool.</p></section>"


def _pool(pool: PoolView) -> str:
    name = escape(pool.name)
    states = block_states(pool.snapshot.counts)
    outcomes = token_outcomes(pool.snapshot)
    asked = sum(outcomes.values())
    return (
        f"<section class=card aria-labelledby='pool-{name}'><h2 id='pool-{name}'>Pool {name}</h2>"
        f"<div class=dim>{escape(_subtitle(pool))}</div>"
        f"<dl class=facts data-live='facts {name}'>{_facts(pool, outcomes, asked)}</dl>"
        f"<h3>Blocks</h3><div data-live='states {name}'>{_bar(states)}{_block_legend(pool, states)}</div>"
        f"<div class=map><canvas data-pool='{name}' role=img height=0 "
        f"aria-label='Map of the blocks of pool {name} by state; the numbers are in the list above'></canvas></div>"
        f"<h3>Tokens asked for, and where they came from</h3><div data-live='tokens {name}'>"
        f"{_bar(outcomes) if asked else ''}{_token_legend(outcomes, asked)}{_larger(pool, asked)}</div>"
        f"<h3>Plan: where each layer lies</h3>{_plan(pool)}</section>"
    )


def _subtitle(pool: PoolView) -> str:
    now = pool.snapshot
    parts = [now.model, now.backend, f"{size(now.size_bytes)} on {pool.num_ranks} rank{'s' * (pool.num_ranks != 1)}"]
    parts += [f"{pool.block_size_tokens} tokens a block", f"plan {pool.plan_fingerprint[:12]}", _recovery(now)]
    return " · ".join(part for part in parts if part)


def _recovery(pool: PoolSnapshot) -> str:
    r = pool.recovery
    if r.outcome == "recovered":
        return f"recovered {r.num_kept_blocks} blocks in {duration(r.duration_s)}"
    return f"began empty ({r.reason})" if r.reason not in ("", "NEW_POOL") else "new"


def _facts(pool: PoolView, outcomes: dict[str, int], asked: int) -> str:
    now = pool.snapshot
    hit = outcomes["hit_own"] + outcomes["hit_shared"]
    facts = [
        ("in use", f"{usage_ratio(now.counts):.1%}"),
        ("hit rate", f"{hit / asked:.1%}" if asked else "no traffic"),
        ("sequences", count(now.counts.sequences)),
        ("steps", count(now.totals.num_steps)),
        ("published", count(now.totals.num_published_blocks)),
        ("evicted", count(now.totals.num_evicted_blocks)),
        ("refused", count(now.totals.allocations["out_of_blocks"])),
        ("workers", count(pool.num_mappings)),
    ]
    return "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in facts)


def _bar(parts: dict[str, int]) -> str:
    """A stacked bar; the list below it says the same in numbers."""
    whole = sum(parts.values())
    spans = (f"<span class=c-{key} style='flex:{n}'></span>" for key, n in parts.items() if n)
    return f"<div class=bar aria-hidden=true>{''.join(spans)}</div>" if whole else ""


def _block_legend(pool: PoolView, states: dict[str, int]) -> str:
    now = pool.snapshot
    bytes_per_block = now.size_bytes / now.counts.total
    rows = [_legend_item(key, key, n, size(n * bytes_per_block)) for key, n in states.items()]
    rows.append(_legend_item("provisional", "of these provisional", now.counts.provisional, ""))
    rows.append("<li class=dim>in the map, the paler a cached block, the sooner it is evicted</li>")
    return f"<ul class=legend>{''.join(rows)}</ul>"


def _token_legend(outcomes: dict[str, int], asked: int) -> str:
    rows = [
        _legend_item(key, OUTCOME_WORDS[key], n, f"{n / asked:.1%}" if asked else "") for key, n in outcomes.items()
    ]
    return f"<ul class=legend>{''.join(rows)}<li>asked <b>{count(asked)}</b></li></ul>"


def _larger(pool: PoolView, asked: int) -> str:
    """What more memory would have brought: a block evicted n evictions ago would be there in a pool larger by n."""
    if not asked or not any(pool.evicted_miss_tokens_by_age):
        return ""
    quarter, one, *_ = pool.evicted_miss_tokens_by_age
    return (
        f"<p class=dim>A pool larger by a quarter would have hit {quarter / asked:.1%} more of the tokens, "
        f"one twice as large {(quarter + one) / asked:.1%}.</p>"
    )


def _legend_item(key: str, word: str, n: int, detail: str) -> str:
    shown = f" <span class=dim>{detail}</span>" if detail else ""
    return f"<li data-key='{key}' data-value='{n}'><i class=c-{key}></i>{word} <b>{count(n)}</b>{shown}</li>"


def _plan(pool: PoolView) -> str:
    """One row per group: its layers' bytes on a common axis. Groups use the same bytes, at different times."""
    rows = "".join(
        f"<tr><td>{i}</td><td>{escape(g.kind)}</td><td class=num>{g.block_size_tokens}</td>"
        f"<td class=num>{g.num_layers}</td>"
        f"<td>{escape(' … '.join(dict.fromkeys(filter(None, (g.first_layer, g.last_layer)))))}</td></tr>"
        for i, g in enumerate(pool.groups)
    )
    table = _table(("group", "kind", "#tokens a block", "#layers", "layers"), rows)
    return _plan_svg(pool.placements) + table


@lru_cache(maxsize=64)
def _plan_svg(placed: tuple[PlacementView, ...]) -> str:
    if not placed:
        return ""
    groups = sorted({p.group for p in placed})
    axis = max(p.axis_bytes for p in placed)
    what = "one block" if placed[0].is_in_block else "the region"
    height = 20 * len(groups) + 18
    rects = []
    for p in placed:
        y, colour = 20 * groups.index(p.group), GROUP_COLOURS[p.group % len(GROUP_COLOURS)]
        x, width = 1000 * p.start_bytes / axis, max(0.5, 1000 * p.size_bytes / axis)
        title = escape(f"{p.layer_name}: bytes {p.start_bytes}–{p.start_bytes + p.size_bytes - 1}")
        rects.append(
            f"<rect class=layer x={x:.2f} y={y} width={width:.2f} height=16 fill='var({colour})'>"
            f"<title>{title}</title></rect>"
        )
    label = f"{len(placed)} layers in {len(groups)} groups over {what}, {size(axis)}"
    return (
        f"<svg class=plan viewBox='0 0 1000 {height}' role=img aria-label='{label}'>{''.join(rects)}"
        f"<text x=0 y={height - 4}>0</text>"
        f"<text x=1000 y={height - 4} text-anchor=end>{size(axis)}: {what}</text></svg>"
    )


def _sessions(view: NodeView) -> str:
    shown = view.sessions[:MAX_SHOWN_SESSIONS]
    rows = "".join(_session_row(s) for s in shown)
    head = ("session", "pool", "client", "tenant", "state", "#sequences", "#blocks", "#step", "#complete", "#age")
    rest = len(view.sessions) - len(shown)
    more = f"<p class=dim>and {rest} more: kvhold sessions</p>" if rest > 0 else ""
    table = _table(head, rows) if rows else "<p class=dim>Nobody is connected.</p>"
    return f"<section class=card data-live=sessions><h2>Sessions</h2>{table}{more}</section>"


def _session_row(s: SessionView) -> str:
    state = s.state
    if s.state == "grace":
        state += f", {duration(s.grace_left_s)} left"
    if s.state == "quarantined":
        state += f" for {duration(s.dead_for_s)}: {s.quarantine_reason or 'being cleaned up'}"
    texts = "".join(f"<td>{escape(t)}</td>" for t in (s.short_id, s.pool, s.client_name, s.tenant, state))
    numbers = (count(s.num_sequences), count(s.num_held_blocks), count(s.last_step), count(s.completed_step))
    return f"<tr>{texts}{''.join(f'<td class=num>{n}</td>' for n in (*numbers, duration(s.age_s)))}</tr>"


def _search(view: NodeView, search: Search) -> str:
    options = "".join(f"<option{' selected' * (p.name == search.pool)}>{escape(p.name)}</option>" for p in view.pools)
    answer = f"<pre tabindex=0 role=status>{escape(search.answer)}</pre>" if search.answer else ""
    return (
        "<section class=card id=search><h2>Find a block or a hash</h2><form method=get action='/#search'>"
        f"<label>pool<select name=pool>{options}</select></label>"
        f"<label>block id, or hash in hex"
        f"<input name=q value='{escape(search.query)}' maxlength=128 spellcheck=false></label>"
        f"<button>Find</button></form>{answer}</section>"
    )


def _events(events: Sequence[str]) -> str:
    text = "\n".join(events) or "nothing yet"
    return (
        "<section class=card data-live=events><h2>Latest cache events</h2>"
        f"<pre tabindex=0>{escape(text)}</pre></section>"
    )


def _calls(view: NodeView) -> str:
    rows = []
    for name, stats in sorted(view.snapshot.telemetry.methods.items()):
        total = sum(stats.codes.values())
        if not total and not stats.in_flight:
            continue
        failed = ", ".join(f"{code} {n}" for code, n in stats.codes.items() if n and code not in ("OK", "CANCELLED"))
        numbers = (
            count(total),
            count(stats.in_flight),
            _quantile(stats.durations, 0.5),
            _quantile(stats.durations, 0.99),
        )
        cells = "".join(f"<td class=num>{n}</td>" for n in numbers)
        rows.append(f"<tr><td>{escape(name)}</td>{cells}<td>{escape(failed)}</td></tr>")
    lag = _quantile(view.snapshot.telemetry.loop_lag, 0.99)
    table = _table(("method", "#calls", "#running", "#p50", "#p99", "failed"), "".join(rows))
    return (
        f"<section class=card data-live=calls><h2>Calls</h2>{table if rows else '<p class=dim>none yet</p>'}"
        f"<p class=dim>event loop late by {lag} (p99)</p></section>"
    )


def _table(head: Iterable[str], rows: str) -> str:
    """A `#` before a heading says: numbers."""
    cells = "".join(
        f"<th scope=col class=num>{h[1:]}</th>" if h.startswith("#") else f"<th scope=col>{h}</th>" for h in head
    )
    return f"<div class=scroll><table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table></div>"


# ---- words for numbers ----------------------------------------------------------------------------------------------
def count(n: float) -> str:
    """1234567 → "1 234 567", with narrow spaces."""
    return f"{int(n):,}".replace(",", "\u202f")


def size(n: float) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def duration(s: float) -> str:
    """Two units at most."""
    if s < 1:
        return f"{s * 1000:.0f} ms"
    if s < 60:
        return f"{s:.1f} s" if s < 10 else f"{s:.0f} s"
    if s < 3600:
        return f"{int(s // 60)} min {int(s % 60)} s"
    if s < 86400:
        return f"{int(s // 3600)} h {int(s % 3600 // 60)} min"
    return f"{int(s // 86400)} d {int(s % 86400 // 3600)} h"


def _quantile(histogram: Histogram, q: float) -> str:
    """The upper end of the bucket that the quantile lies in: a bound, not a guess inside the bucket."""
    total = sum(histogram.buckets)
    if not total:
        return "–"
    seen = 0
    for bound, n in zip(histogram.bounds, histogram.buckets, strict=False):
        seen += n
        if seen >= q * total:
            return f"≤ {milliseconds(bound)}"
    return f"> {milliseconds(histogram.bounds[-1])}"


def milliseconds(s: float) -> str:
    """Without trailing zeros."""
    return f"{s * 1000:g} ms"
