"""What the metrics listener serves: the node page, /metrics, the same picture as JSON, probes for HTTP.

A scrape costs the event loop a snapshot, and then a few lines at a time: between two parts, waiting steps run. (A
thread would hold the interpreter's lock for up to 5 ms at a time.) Scrapes within CACHE_S share one answer.
"""

import asyncio
import dataclasses
import json
import time
from urllib.parse import parse_qsl

from kvhold_server.exposition import expose
from kvhold_server.http import HttpHandler, HttpReply, HttpRequest
from kvhold_server.metrics import SnapshotCollector
from kvhold_server.node.node import Node
from kvhold_server.observe.block_map import BlockMap, draw_map, find
from kvhold_server.observe.event_tail import event_lines
from kvhold_server.observe.extra_metrics import WATCHED_CODES, ViewCollector
from kvhold_server.observe.page import Page, Search
from kvhold_server.observe.take import PAUSE_S, Observer
from kvhold_server.observe.view import NodeView

CACHE_S = 0.25
MAP_CACHE_S = 1.0
HTML, JSON = "text/html; charset=utf-8", "application/json"


async def render_in_slices(view: NodeView, accept: str) -> HttpReply:
    """The exposition in the format that the scraper accepts."""
    exposition = expose((SnapshotCollector(view.snapshot), ViewCollector(view)), accept)
    parts: list[str] = []
    for part in exposition.parts:
        parts.append(part)
        await asyncio.sleep(PAUSE_S)
    return HttpReply(content_type=exposition.content_type, body="".join(parts).encode())


class Observatory:
    """All routes of one node."""

    def __init__(self, node: Node, version: str) -> None:
        self._node = node
        self._observer = Observer(node, version)
        self._page = Page()
        self._scrapes: dict[str, tuple[float, HttpReply]] = {}
        self._maps: dict[str, tuple[float, BlockMap]] = {}
        for method, code in WATCHED_CODES:
            node.telemetry.method(method).codes.setdefault(code, 0)

    def routes(self) -> dict[str, HttpHandler]:
        """Path → handler."""
        return {
            "/": self.page,
            "/metrics": self.metrics,
            "/view.json": self.view,
            "/blocks.json": self.blocks,
            "/healthz": self.alive,
            "/readyz": self.ready,
        }

    async def metrics(self, request: HttpRequest) -> HttpReply:
        """Prometheus text or OpenMetrics, as the scraper accepts."""
        accept = request.headers.get("accept", "")
        at_s, reply = self._scrapes.get(accept, (float("-inf"), None))
        now_s = time.monotonic()
        if reply is None or now_s - at_s > CACHE_S:
            reply = await render_in_slices(await self._observer.take(), accept)
            self._scrapes = {accept: (now_s, reply)}
        return reply

    async def page(self, request: HttpRequest) -> HttpReply:
        """The node page; with `pool` and `q` it answers a search."""
        query = dict(parse_qsl(request.query, max_num_fields=8))
        view = await self._observer.take()
        text = self._page.render(view, event_lines(self._node), self._search(query.get("pool", ""), query.get("q", "")))
        return HttpReply(content_type=HTML, body=text.encode(), headers=self._page.headers)

    def _search(self, pool: str, asked: str) -> Search:
        live = next((live for name, live in self._node.pools.items() if name == pool), None)
        if not asked:
            return Search(pool=pool)
        answer = find(live.pool, asked[:128]) if live else f"no pool {pool!r}"
        return Search(pool=pool, query=asked, answer=answer)

    async def view(self, request: HttpRequest) -> HttpReply:
        """Everything that the page shows, for scripts. Field names are internal and may change."""
        view = dataclasses.asdict(await self._observer.take())
        return HttpReply(content_type=JSON, body=json.dumps(view, default=str).encode())

    async def blocks(self, request: HttpRequest) -> HttpReply:
        """The map of one pool's blocks; at most a second old."""
        name = dict(parse_qsl(request.query, max_num_fields=8)).get("pool", "")
        live = next((live for known, live in self._node.pools.items() if known == name), None)
        if live is None:
            return HttpReply(status=404, body=f"no pool {name!r}\n".encode())
        at_s, drawn = self._maps.get(name, (float("-inf"), None))
        now_s = time.monotonic()
        if drawn is None or now_s - at_s > MAP_CACHE_S:
            drawn = await draw_map(live.pool)
            self._maps = {known: kept for known, kept in self._maps.items() if known in self._node.pools}
            self._maps[name] = (now_s, drawn)
        return HttpReply(content_type=JSON, body=json.dumps(dataclasses.asdict(drawn)).encode())

    async def alive(self, request: HttpRequest) -> HttpReply:
        """Up while the event loop turns."""
        return HttpReply(body=b"alive\n")

    async def ready(self, request: HttpRequest) -> HttpReply:
        """Whether new sessions are welcome."""
        if self._node.drain.is_draining:
            return HttpReply(status=503, body=b"draining\n")
        return HttpReply(body=b"ready\n")
