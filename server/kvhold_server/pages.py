"""What the metrics listener serves: /metrics, /healthz, /readyz."""

import asyncio

from kvhold_server.http import HttpHandler, HttpReply, HttpRequest
from kvhold_server.metrics import render, take_snapshot
from kvhold_server.node.node import Node
from kvhold_server.rpc.services.plans import server_version


def make_routes(node: Node) -> dict[str, HttpHandler]:
    """Path → handler."""
    version, started_at_s = server_version(), node.now_s

    async def metrics(request: HttpRequest) -> HttpReply:
        snapshot = take_snapshot(node, version, started_at_s)
        rendered = await asyncio.to_thread(render, snapshot, request.headers.get("accept", ""))
        return HttpReply(content_type=rendered.content_type, body=rendered.body)

    async def alive(request: HttpRequest) -> HttpReply:
        return HttpReply(body=b"alive\n")

    async def ready(request: HttpRequest) -> HttpReply:
        if node.drain.is_draining:
            return HttpReply(status=503, body=b"draining\n")
        return HttpReply(body=b"ready\n")

    return {"/metrics": metrics, "/healthz": alive, "/readyz": ready}
