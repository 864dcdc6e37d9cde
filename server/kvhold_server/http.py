"""A very small HTTP/1.1 server for scrapers and people: GET and HEAD of known paths, one reply a connection.

Requests have at most 8 KiB and 5 seconds. At most 32 connections are served at once: one more cuts the one that has
been silent for longest, so that idle ones keep no scraper out; if all are being answered, it is closed itself. Handlers
run on the event loop and may await threads. Nothing here can change anything.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """What a handler may look at. Header names are lower case."""

    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    """What it answers."""

    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


HttpHandler = Callable[[HttpRequest], Awaitable[HttpReply]]


class HttpServer:
    """Routes by exact path."""

    def __init__(self, routes: Mapping[str, HttpHandler]) -> None:
        self.routes = dict(routes)
        self.port = 0
        self._server: asyncio.Server | None = None
        self._num_connections = 0
        self._silent: dict[asyncio.StreamWriter, None] = {}  # have not sent a whole request yet, oldest first

    async def start(self, host: str, port: int) -> None:
        """Binds; port 0 takes any, see `port`. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= MAX_CONNECTIONS or self._cut_oldest_silent():
                self._silent[writer] = None
                await asyncio.wait_for(self._answer(reader, writer), REQUEST_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a peer that stalls, babbles or leaves gets nothing
        finally:
            self._silent.pop(writer, None)
            self._num_connections -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _cut_oldest_silent(self) -> bool:
        """False: there is none."""
        writer = next(iter(self._silent), None)
        if writer is None:
            return False
        del self._silent[writer]
        writer.transport.abort()
        return True

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self._silent.pop(writer, None)
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        reply = HttpReply(status=400, body=b"not an HTTP request\n")
        if len(parts) == 3:
            reply = await self._reply(parts[0], parts[1], lines[1:])
        length = len(reply.body)
        more = "".join(f"{name}: {value}\r\n" for name, value in {**SECURITY_HEADERS, **reply.headers}.items())
        writer.write(
            f"HTTP/1.1 {reply.status} {REASONS[reply.status]}\r\nContent-Type: {reply.content_type}\r\n"
            f"Content-Length: {length}\r\n{more}Connection: close\r\n\r\n".encode("latin-1")
        )
        if parts[0] != "HEAD":
            writer.write(reply.body)
        await writer.drain()

    async def _reply(self, method: str, target: str, header_lines: list[str]) -> HttpReply:
        if method not in ("GET", "HEAD"):
            return HttpReply(status=405, body=b"GET or HEAD only\n")
        path, _, query = target.partition("?")
        handler = self.routes.get(path)
        if handler is None:
            known = " ".join(sorted(self.routes))
            return HttpReply(status=404, body=f"no such page; there are: {known}\n".encode())
        split = (line.partition(":") for line in header_lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in split}
        try:
            return await handler(HttpRequest(path=path, query=query, headers=headers))
        except Exception:
            logger.exception("GET %s failed", path)
            return HttpReply(status=500, body=b"the daemon's log says why\n")
