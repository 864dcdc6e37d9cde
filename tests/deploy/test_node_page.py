"""The node page of a live, loaded daemon: numbers without a script, live with one, nothing loaded from elsewhere."""

import asyncio
import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import grpc
import pytest

from kvhold.v1 import event_pb2, event_pb2_grpc
from tests.deploy.live import LiveDaemon, chromium, daemon
from tests.deploy.load import Client

VOID = {"meta", "link", "input", "br", "img", "rect"}


class Outline(HTMLParser):
    """What a screen reader needs, and whether tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.labels: list[str] = []
        self.unlabelled: list[str] = []
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.urls += [value for name, value in attrs if name in ("src", "href", "action") and value]
        if found.get("role") == "img" and not found.get("aria-label"):
            self.unlabelled.append(tag)
        if tag in ("input", "select") and "label" not in self.open:
            self.unlabelled.append(tag)
        if tag == "th" and "scope" not in found:
            self.unlabelled.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("li", "p", "option", "circle"):
            while self.open and self.open[-1] != tag:
                self.open.pop()
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
            self.open.pop()


def shown(html: str) -> dict[str, list[int]]:
    """Legend key → numbers, one per pool."""
    found: dict[str, list[int]] = {}
    for key, value in re.findall(r"data-key='?\"?(\w+)'?\"? data-value='?\"?(\d+)", html):
        found.setdefault(key, []).append(int(value))
    return found


def scraped(text: str, name: str, **labels: str) -> list[int]:
    """Values of a metric with these labels, in the order of the scrape."""
    lines = [line for line in text.splitlines() if re.match(rf"{name}[{{ ]", line)]
    wanted = [line for line in lines if all(f'{k}="{v}"' in line for k, v in labels.items())]
    return [int(float(line.rsplit(" ", 1)[1])) for line in wanted]


def test_numbers_equal_the_scrape(loaded: LiveDaemon) -> None:
    """Nobody works now, so page and scrape are of the same state."""
    page, metrics = shown(loaded.get("/")), loaded.get("/metrics")
    for state in ("free", "cached", "held", "quarantined", "reserved", "null"):
        assert page[state] == scraped(metrics, "kvhold_pool_blocks", state=state), state
    assert page["hit_own"] == scraped(metrics, "kvhold_prefix_hit_tokens_total", source="self")
    assert page["miss_evicted"] == scraped(metrics, "kvhold_prefix_miss_tokens_total", reason="evicted")
    assert sum(page["hit_own"]) > 0 and len(page["held"]) == 2


def test_page_needs_nothing_from_elsewhere_and_is_well_formed(loaded: LiveDaemon) -> None:
    outline = Outline()
    outline.feed(loaded.get("/?pool=chat&q=1"))
    assert not outline.open and not outline.unlabelled
    assert all(url.startswith(("/", "data:", "#")) for url in outline.urls)


def test_policy_lets_only_our_script_run(loaded: LiveDaemon) -> None:
    with urllib.request.urlopen(loaded.http + "/", timeout=10) as reply:
        policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "'sha256-" in policy and "unsafe-inline'; connect" in policy
    assert "script-src 'unsafe-inline'" not in policy


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed_over_http(loaded: LiveDaemon, method: str) -> None:
    request = urllib.request.Request(loaded.http + "/", method=method, data=b"x=1")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 405


def test_names_from_clients_cannot_become_markup(loaded: LiveDaemon) -> None:
    html = loaded.get("/?pool=chat&q=%3Cscript%3Ealert(1)%3C/script%3E")
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html


def test_search_finds_a_block_and_its_hash(loaded: LiveDaemon) -> None:
    cells = json.loads(loaded.get("/blocks.json?pool=chat"))["cells"]
    block = next(i for i, letter in enumerate(cells) if letter in "ABCDhp" and i)
    by_id = loaded.get(f"/?pool=chat&q={block}")
    assert f"block {block}: " in by_id
    digest = re.search(r"hash ([0-9a-f]{64})", by_id)
    assert digest, "a cached block has a hash"
    assert f"block {block}: " in loaded.get(f"/?pool=chat&q={digest[1]}")
    assert "not cached" in loaded.get(f"/?pool=chat&q={'00' * 32}")
    assert "neither a block id nor a hash" in loaded.get("/?pool=chat&q=hello")
    assert "no block 99999" in loaded.get("/?pool=chat&q=99999")


def test_map_has_a_cell_for_every_block_and_agrees_with_the_counts(loaded: LiveDaemon) -> None:
    drawn = json.loads(loaded.get("/blocks.json?pool=code"))
    metrics = loaded.get("/metrics")
    assert drawn["num_blocks"] == len(drawn["cells"]) == 2000
    held = scraped(metrics, "kvhold_pool_blocks", pool="code", state="held")[0]
    cached = scraped(metrics, "kvhold_pool_blocks", pool="code", state="cached")[0]
    assert sum(drawn["cells"].count(letter) for letter in "hp") == held
    assert sum(drawn["cells"].count(letter) for letter in "ABCD") == cached


def test_scrape_is_clean_and_small(loaded: LiveDaemon, tool: Callable[[str], str]) -> None:
    text = loaded.get("/metrics")
    run = subprocess.run([tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    assert run.returncode == 0, run.stdout + run.stderr
    pools = len(scraped(text, "kvhold_pool_info"))
    without_pools = [line for line in text.splitlines() if 'pool="' not in line]
    per_pool = (len(text.splitlines()) - len(without_pools)) / pools
    assert len(without_pools) + 8 * per_pool < 1000


def test_openmetrics_is_served_to_who_asks(loaded: LiveDaemon) -> None:
    text = loaded.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n") and "# TYPE kvhold_steps counter" in text


def test_view_as_json_names_no_secret(loaded: LiveDaemon) -> None:
    text = loaded.get("/view.json")
    view = json.loads(text)
    assert {pool["snapshot"]["name"] for pool in view["pools"]} == {"chat", "code"}
    assert all(len(session["short_id"]) == 8 for session in view["sessions"])
    assert "token_digest" not in text and "resume" not in text.replace("resumed", "")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_browser_draws_the_maps_without_a_complaint(
    loaded: LiveDaemon, tool: Callable[[str], str], tmp_path: Path, dark: bool
) -> None:
    """Chromium's console stays empty; the script has drawn every pool's map and goes on asking."""
    dom = chromium(tool("chromium"), loaded.http + "/", tmp_path, dark=dark)
    assert 'data-ready="1"' in dom
    drawn = re.findall(r'<canvas[^>]*data-pool="(\w+)"[^>]*data-total="(\d+)"', dom)
    assert sorted(drawn) == [("chat", "2000"), ("code", "2000")]
    assert '<span id="status" role="status" class="dim">live</span>' in dom
    assert shown(dom)["held"] == shown(loaded.get("/"))["held"]


async def watch_and_work(live: LiveDaemon) -> None:
    """Some steps while somebody reads events."""
    client = Client(live.target, "events", "engine", seed=3)
    await client.open()
    async with grpc.aio.insecure_channel(live.target) as channel:
        stream = event_pb2_grpc.EventServiceStub(channel).WatchEvents(event_pb2.WatchEventsRequest(pool="events"))
        await stream.read()  # the snapshot: the log has begun
        for _ in range(20):
            await client.step()
        stream.cancel()
    await client.close()


def test_event_tail_shows_what_a_reader_gets(tmp_path: Path) -> None:
    with daemon(tmp_path) as live:
        asyncio.run(watch_and_work(live))
        page = live.get("/")
        assert re.search(r"events #\d+ stored +\d+ in group 0: [0-9a-f]{12}", page)
        assert scraped(live.get("/metrics"), "kvhold_events_total", pool="events")[0] > 0
