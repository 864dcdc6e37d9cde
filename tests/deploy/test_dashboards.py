"""Dashboards, rules and metrics against what a live Prometheus has scraped from a live, loaded daemon."""

import asyncio
import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.deploy.live import LiveDaemon, prometheus
from tests.deploy.load import run_load
from tests.deploy.manifests import load_module

promql_parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")

SCRAPES_S = 8.0
# Panels that are rightly empty while all is well.
MAY_BE_EMPTY = {"Calls that failed", "Calls running"}
# Recording rules that need a longer past than a test has.
NEEDS_PAST: set[str] = set()


@pytest.fixture(scope="module")
def dashboards(deploy_dir: Path) -> ModuleType:
    return load_module(deploy_dir / "dashboards.py")


@pytest.fixture(scope="module")
def boards(deploy_dir: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((deploy_dir / "grafana").glob("*.json"))}


@pytest.fixture(scope="module")
def server(loaded: LiveDaemon, tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Prometheus after a few scrapes under load."""
    program = tool("prometheus")
    load = threading.Thread(target=lambda: asyncio.run(run_load(loaded.target, seconds=SCRAPES_S)), daemon=True)
    with prometheus(tmp_path_factory.mktemp("prometheus"), program, loaded.http) as url:
        load.start()
        time.sleep(SCRAPES_S)
        yield url
        load.join(timeout=30)


def ask(url: str, expression: str) -> list[Any]:
    """Result of an instant query. Raises for a query that Prometheus refuses."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=10) as reply:
        answer = json.load(reply)
    assert answer["status"] == "success", answer
    result: list[Any] = answer["data"]["result"]
    return result


def test_committed_dashboards_are_what_the_code_makes(dashboards: ModuleType) -> None:
    for path, text in dashboards.files().items():
        assert path.read_text() == text, f"run python deploy/dashboards.py: {path.name}"


def test_every_expression_parses(dashboards: ModuleType, boards: dict[str, dict[str, Any]]) -> None:
    assert set(boards) == {"kvhold-overview", "kvhold-node", "kvhold-sessions"}
    for board in boards.values():
        for title, expression in dashboards.expressions(board):
            assert promql_parser.parse(dashboards.concrete(expression)), title


def test_panels_name_their_metrics_and_do_not_overlap(
    dashboards: ModuleType, boards: dict[str, dict[str, Any]]
) -> None:
    for board in boards.values():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
            taken |= cells
            for target in panel.get("targets", []):
                used = set(re.findall(r"\bkvhold_\w+", target["expr"]))
                assert all(metric in panel["description"] for metric in used), (panel["title"], used)
        names = [variable["name"] for variable in board["templating"]["list"]]
        assert names == ["datasource", "job", "instance", "pool"]


@pytest.mark.slow
def test_every_panel_shows_data_of_a_live_daemon(
    dashboards: ModuleType, boards: dict[str, dict[str, Any]], server: str
) -> None:
    empty = [
        title
        for board in boards.values()
        for title, expression in dashboards.expressions(board)
        if not ask(server, dashboards.concrete(expression, rate_interval="10s"))
    ]
    assert set(empty) <= MAY_BE_EMPTY


@pytest.mark.slow
def test_every_recording_rule_and_alert_is_evaluated_on_live_data(server: str, deploy_dir: Path) -> None:
    groups = yaml.safe_load((deploy_dir / "prometheus" / "rules.yaml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        if "record" in rule:
            assert ask(server, rule["record"]) or rule["record"] in NEEDS_PAST, rule["record"]
        else:
            ask(server, rule["expr"])  # is accepted; a healthy daemon need not fire it
            for metric in set(re.findall(r"\bkvhold[_:][\w:]+", rule["expr"])):
                assert ask(server, metric), f"{rule['alert']} asks for {metric}, which is not there"


@pytest.mark.slow
def test_states_sum_to_the_pool_and_tokens_to_the_query(server: str) -> None:
    differences = ask(
        server,
        "sum by (pool) (kvhold_prefix_hit_tokens_total) + sum by (pool) (kvhold_prefix_miss_tokens_total)"
        " - sum by (pool) (kvhold_prefix_query_tokens_total)",
    )
    assert differences and all(float(sample["value"][1]) == 0 for sample in differences)
    totals = ask(server, "sum by (pool) (kvhold_pool_blocks)")
    assert {float(sample["value"][1]) for sample in totals} == {2000.0}


def test_alerts_have_runbooks_and_runbooks_have_alerts(deploy_dir: Path, repo_dir: Path) -> None:
    groups = yaml.safe_load((deploy_dir / "prometheus" / "rules.yaml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    linked = {alert["annotations"]["runbook_url"].rsplit("/", 1)[1] for alert in alerts}
    pages = {path.name: path.read_text() for path in (repo_dir / "docs" / "runbooks").glob("Kvhold*.md")}
    assert linked == set(pages)
    for alert in alerts:
        page = pages[alert["annotations"]["runbook_url"].rsplit("/", 1)[1]]
        assert alert["alert"] in page
        assert alert["labels"]["severity"] in ("warning", "critical")


def test_promtool_accepts_rules_and_their_tests(deploy_dir: Path, tool: Callable[[str], str]) -> None:
    for arguments in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        run = subprocess.run(
            [tool("promtool"), *arguments], cwd=deploy_dir / "prometheus", capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 0, run.stdout + run.stderr


def test_every_alert_is_tested(deploy_dir: Path) -> None:
    groups = yaml.safe_load((deploy_dir / "prometheus" / "rules.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    cases = yaml.safe_load((deploy_dir / "prometheus" / "tests.yaml").read_text())["tests"]
    fired = {t["alertname"] for case in cases for t in case.get("alert_rule_test", []) if t["exp_alerts"]}
    assert fired == alerts


def test_metrics_page_is_what_the_code_exports(repo_dir: Path) -> None:
    page = load_module(repo_dir / "tools" / "metrics_doc.py")
    assert page.TARGET.read_text() == page.text(), "run python tools/metrics_doc.py"


def test_metrics_page_names_everything_that_a_scrape_has(loaded: LiveDaemon, repo_dir: Path) -> None:
    page = (repo_dir / "docs" / "metrics.md").read_text()
    exported = set(re.findall(r"^# TYPE (kvhold_\w+) ", loaded.get("/metrics"), re.M))
    assert exported and all(f"`{name}`" in page for name in exported)
