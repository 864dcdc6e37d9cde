"""The node page from views made by hand."""

import base64
import hashlib
import re

import pytest

from kvhold_server.node.live_pool import RecoveryReport
from kvhold_server.node.telemetry import Telemetry
from kvhold_server.observe.page import Page, Search, body, count, duration, size
from kvhold_server.observe.view import BackendView
from kvhold_server.pool.values import PrefixStatistics
from tests.observe.views import node_view, pool_view, session_view

NOTHING = Search()
HOSTILE = "<img src=x onerror=alert(1)>'\"&"


def test_every_state_is_listed_with_its_number() -> None:
    html = body(node_view(pool_view()), [], NOTHING)
    shown = dict(re.findall(r"data-key='(\w+)' data-value='(\d+)'", html))
    states = {"free": 11, "cached": 23, "held": 41, "quarantined": 5, "reserved": 2, "null": 1}
    assert {state: int(shown[state]) for state in states} == states
    assert shown["provisional"] == "7" and shown["miss_evicted"] == "150"


def test_usage_leaves_out_null_and_reserved_blocks() -> None:
    assert "<dd>57.5%</dd>" in body(node_view(pool_view()), [], NOTHING)  # (41 + 5) / (83 - 1 - 2)


def test_no_traffic_is_not_a_hit_rate_of_zero() -> None:
    html = body(node_view(pool_view(prefix=PrefixStatistics())), [], NOTHING)
    assert "<dd>no traffic</dd>" in html and "NaN" not in html


@pytest.mark.parametrize("where", ["client_name", "tenant", "quarantine_reason", "pool"])
def test_text_of_clients_is_escaped(where: str) -> None:
    session = session_view(state="quarantined", **{where: HOSTILE})
    html = body(
        node_view(pool_view(), sessions=(session,)), [HOSTILE], Search(pool="chat", query=HOSTILE, answer=HOSTILE)
    )
    assert "<img" not in html and "&lt;img" in html


def test_layer_and_model_names_are_escaped() -> None:
    html = body(node_view(pool_view(plan_fingerprint=HOSTILE)), [], NOTHING)
    assert "<img" not in html


def test_what_needs_a_person_is_said_first() -> None:
    lost = pool_view(recovery=RecoveryReport(outcome="fresh", reason="HEADER_CORRUPT", detail="torn"))
    dead = session_view(state="quarantined", quarantine_reason="worker of rank 1, pid 4711")
    telemetry = Telemetry(num_unexpected_errors=2)
    backends = (BackendView(name="cuda_vmm", ok=False, detail="driver lost"),)
    html = body(node_view(lost, sessions=(dead,), telemetry=telemetry, backends=backends), [], NOTHING)
    alert = html[html.index("role=alert") : html.index("</div>", html.index("role=alert"))]
    for word in ("HEADER_CORRUPT", "pid 4711", "2 calls failed", "driver lost"):
        assert word in alert
    assert "<ul" not in body(node_view(pool_view()), [], NOTHING).split("role=alert")[1].split("</div>")[0]


def test_many_sessions_are_cut_and_counted() -> None:
    html = body(node_view(pool_view(), sessions=tuple(session_view(i) for i in range(130))), [], NOTHING)
    assert html.count("<td>engine-") == 100 and "and 30 more" in html


def test_policy_names_the_script_that_is_sent() -> None:
    page = Page()
    html = page.render(node_view(), [], NOTHING)
    script = re.findall(r"<script>(.*?)</script>", html, re.S)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in page.headers["Content-Security-Policy"]
    assert "http://" not in html and "https://" not in html


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.02, "20 ms"), (9.94, "9.9 s"), (59, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (90000, "1 d 1 h")],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_and_counts_are_readable() -> None:
    assert (size(0), size(1536), size(83 << 20), size(3 << 40)) == ("0 B", "1.5 KiB", "83.0 MiB", "3.0 TiB")
    assert count(1234567) == "1\u202f234\u202f567"


def test_what_more_memory_would_bring_is_said() -> None:
    html = body(node_view(pool_view()), [], NOTHING)
    assert "larger by a quarter would have hit 1.0% more of the tokens, one twice as large 3.0%" in html
    assert "larger by a quarter" not in body(node_view(pool_view(evicted_miss_tokens_by_age=(0, 0, 0, 0))), [], NOTHING)
