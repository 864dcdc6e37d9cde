"""The daemon: everything is put together here, started, watched, drained and taken down in order.

start   lock socket ▶ backends ▶ node ▶ gRPC ▶ fd channel ▶ /metrics ▶ ticker ▶ ready
SIGTERM not ready ▶ no new sessions ▶ wait for sessions (drain deadline; a second signal ends the wait) ▶ stop ▶ exit 0
        while starting: the start goes on to its end first
"""

import asyncio
import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from kvhold_server.backends import make_backends
from kvhold_server.config import ServerConfig, split_host_port
from kvhold_server.domain.errors import PreconditionFailed
from kvhold_server.http import HttpServer
from kvhold_server.node.node import Node
from kvhold_server.node.node_values import Shell
from kvhold_server.node.warm_restart import WarmRestart
from kvhold_server.pages import make_routes
from kvhold_server.quarantine_log import QuarantineLog
from kvhold_server.rpc.admin_door import AdminDoor
from kvhold_server.rpc.fd_channel import FdChannel
from kvhold_server.rpc.fd_peer import listen
from kvhold_server.rpc.fd_wire import wait_readable
from kvhold_server.rpc.interceptors import Guard
from kvhold_server.rpc.local_transport import LocalTokens, LocalTransport
from kvhold_server.rpc.regions import RegionKeeper
from kvhold_server.rpc.reopen import FormerWorker, log_notices, reclaim_all, reopen_all
from kvhold_server.rpc.server import (
    SOCKET_MODE,
    AddressInUse,
    HealthBoard,
    SocketClaim,
    listen_inside,
    listen_tcp,
    listen_unix,
    make_server,
)
from kvhold_server.rpc.services.blocks import BlockService
from kvhold_server.rpc.services.register import add_admin_services, add_engine_services
from kvhold_server.rpc.tls import TlsFiles, check_exposure
from kvhold_server.rpc.tracing import SPANS, Tracing
from kvhold_server.rpc.workers import make_fd_channel
from kvhold_server.sessions.lease import LeaseTerms

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.3  # for calls under way after the drain; an idle stream makes every stop last so long
BUSY_SLEEP_S = 0.001


@dataclass(eq=False)
class StateDirectoryUnusable(PreconditionFailed):
    """Nothing can be kept there for the next daemon."""

    template = "state_dir {path}: {problem}; name another, or keep nothing with --no-keep-pools"
    path: str
    problem: str


class Daemon:
    """One running daemon: `run` it; or use its parts in a test."""

    def __init__(self, config: ServerConfig, *, hit: Callable[[str], None] | None = None) -> None:
        """Claims the sockets, then the memory's instance; a second daemon fails here. Changes nothing if it raises.

        `hit` is called at the named places of failpoints.py, by tests.
        """
        self.config = config
        self._claims = _claim_sockets(config)
        boot_id = secrets.token_hex(8)
        try:
            self.backends = make_backends(config)
            self.warm = _open_state(config, boot_id, hit)
        except BaseException:
            for claim in self._claims.values():
                claim.release()
            raise
        self.node = Node(
            shell=Shell(boot_id=boot_id, clock=time.monotonic, new_secret=lambda: secrets.token_urlsafe(24)),
            backends=self.backends,
            default_backend=config.backend,
            terms=LeaseTerms(
                lease_ttl_s=config.lease_ttl_s,
                grace_s=config.grace_period_s,
                unproven_grace_s=config.grace_period_s,
                max_tick_s=max(1.0, 4 * config.tick_interval_s),
            ),
            limits=config.limits,
            warm=self.warm,
        )
        self.health = HealthBoard()
        self.keeper = RegionKeeper(self.backends)
        self.tcp_port = 0
        self.health_port = 0
        self.metrics_port = 0
        self.fd_channel: FdChannel | None = None
        self.local_transport: LocalTransport | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._stack = AsyncExitStack()

    def _end_state(self) -> None:
        """Everything that a successor needs is written."""
        for live in self.node.pools.values():
            if live.journal is not None:
                live.journal.end(is_clean=True)
        if self.warm is not None:
            self.warm.close()

    # -------------------------------------------------------------- lifecycle
    async def run(self) -> None:
        """All of its life, until a signal or an administrator ends it."""
        with self.stops_on_signals():
            await self.start()
            await self.run_until_stopped()

    @contextmanager
    def stops_on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask to stop. From before the sockets answer until all is taken down, so that no moment is
        left in which one would end us at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def start(self) -> None:
        """Brings everything up; on failure whatever was up is taken down again."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        config, stack = self.config, self._stack
        for claim in self._claims.values():
            stack.callback(claim.release)
        gc.collect()  # now, while it need not look at millions of recovered blocks
        for backend in self.backends.values():
            stack.callback(partial(backend.close, keep=config.keep_pools))
        if self.warm is not None:
            stack.callback(self._end_state)
            # Nothing was awaited yet, so no wish to stop was heard: it would keep pools from being offered again.
            for worker in reopen_all(self.node, self.warm):
                watching = asyncio.create_task(self._watch_former(worker), name=f"former-worker-{worker.watch_id}")
                stack.push_async_callback(_cancelled, watching)
        reclaim_all(self.node)
        stack.push_async_callback(self.keeper.close)
        server = make_server(self._interceptors(), config.limits.max_message_bytes)
        if config.socket:
            listen_unix(server, self._claims[config.socket], config.socket_gid)
            self.fd_channel = make_fd_channel(self.node, Path(f"{config.socket}.fd"), config.socket_gid)
            await self.fd_channel.start()
            stack.push_async_callback(self.fd_channel.close)
            if config.local_transport:
                await self._start_local_transport(f"{config.socket}.local")
        if config.tcp:
            check_exposure(config)
            tls = TlsFiles.of(config)
            address = split_host_port("--tcp", "tcp", config.tcp)
            self.tcp_port = listen_tcp(server, *address, tls.credentials() if tls else None)
        add_engine_services(
            server, self.node, self.keeper, self.health, fd_channel=self.fd_channel, local=self.local_transport
        )
        await self._start_admin(server)
        await self._start_server(server)
        if config.health:
            await self._start_health()
        if config.metrics:
            await self._start_metrics()
        ticker = asyncio.create_task(self._tick_forever(), name="ticker")
        stack.push_async_callback(_cancelled, ticker)
        gc.freeze()  # what was imported and recovered stays: full collections need not look at it again
        await self.health.set_ready(not self._stop.is_set())
        socket, tcp_port = config.socket or "-", self.tcp_port or "-"
        logger.info("ready: boot %s, socket %s, tcp port %s", self.node.boot_id, socket, tcp_port)

    async def _start_local_transport(self, path: str) -> None:
        limits = self.config.limits
        tokens = LocalTokens(time.monotonic, partial(secrets.token_bytes, 24), max_tokens=limits.max_sessions)
        self.local_transport = LocalTransport(
            Path(path),
            BlockService(self.node),
            self.node.telemetry,
            tokens,
            max_message_bytes=limits.max_message_bytes,
            max_connections=limits.max_sessions,
            gid=self.config.socket_gid,
        )
        await self.local_transport.start()
        self._stack.push_async_callback(self.local_transport.close)

    async def _start_admin(self, engine_server: grpc.aio.Server) -> None:
        """AdminService on its own socket, or beside the engines' services if none is configured."""
        if not self.config.admin_socket:
            add_admin_services(engine_server, self.node, self.request_stop)
            return
        path, gid = Path(self.config.admin_socket), self.config.socket_gid
        door = AdminDoor(path, gid)
        self._stack.push_async_callback(door.close)
        server = make_server(self._interceptors(), self.config.limits.max_message_bytes)
        listen_inside(server, door.inner)
        add_admin_services(server, self.node, self.request_stop, door.caller_of)
        self.health.add_to(server)
        await self._start_server(server)
        door.start(listen(path, mode=SOCKET_MODE, group_gid=gid))

    async def _start_health(self) -> None:
        """Health alone, for probes that speak plaintext TCP only: nothing else is reachable there."""
        server = make_server([], self.config.limits.max_message_bytes)
        self.health_port = listen_tcp(server, *split_host_port("--health", "health", self.config.health))
        self.health.add_to(server)
        await self._start_server(server)

    async def _start_server(self, server: grpc.aio.Server) -> None:
        await server.start()
        self._stack.push_async_callback(server.stop, STOP_GRACE_S)

    async def _start_metrics(self) -> None:
        host, port = split_host_port("--metrics", "metrics", self.config.metrics)
        http = HttpServer(make_routes(self.node))
        try:
            await http.start(host, port)
        except OSError as error:
            raise AddressInUse(self.config.metrics, error.strerror or str(error)) from None
        self.metrics_port = http.port
        self._stack.push_async_callback(http.close)

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """Tracing, if it is on, around the guard."""
        guard = Guard(self.node.telemetry, self.config.limits.max_message_bytes)
        make_span = SPANS.get(self.config.tracing)
        return [Tracing(self.node.telemetry, make_span()), guard] if make_span else [guard]

    def request_stop(self, deadline_s: float | None = None) -> None:
        """Begins to drain, by default with the configured deadline; asked a second time, stops waiting."""
        if self._stop.is_set():
            self._hurry.set()
        else:
            self.node.begin_drain(self.config.drain_deadline_s if deadline_s is None else deadline_s)
            self._stop.set()

    async def run_until_stopped(self) -> None:
        """Serves until asked to stop, then drains and takes everything down."""
        try:
            await self._stop.wait()
            await self._drain()
        finally:
            await self.close()

    async def close(self) -> None:
        """Takes everything down, last started first."""
        await self._stack.aclose()

    async def _drain(self) -> None:
        """No new sessions; running ones may finish until the deadline."""
        await self.health.set_ready(False)
        logger.info("draining: %d sessions, at most %.1f s", self.node.sessions.num_open(), self.node.drain_left_s)
        while self.node.sessions.num_open() and self.node.drain_left_s and not self._hurry.is_set():
            await asyncio.sleep(min(0.02, self.node.drain_left_s))
        logger.info("drained: %d sessions are cut off", self.node.sessions.num_open())

    async def _watch_former(self, worker: FormerWorker) -> None:
        """Until a process that mapped a pool before the restart is gone."""
        try:
            await wait_readable(worker.pid_fd)
            self.node.worker_gone(worker.watch_id, process_ended=True)
        finally:
            os.close(worker.pid_fd)

    async def _tick_forever(self) -> None:
        """Leases, reaping, the loop's own lag. Slices of reaping yield to waiting steps in between."""
        interval_s, loop = self.config.tick_interval_s, asyncio.get_running_loop()
        quarantine = QuarantineLog(self.node)
        while True:
            try:
                while self.node.tick():
                    await asyncio.sleep(BUSY_SLEEP_S)
                quarantine.look()
                if self.warm is not None:
                    log_notices(self.warm)  # of pools opened meanwhile
            except Exception:
                self.node.telemetry.num_unexpected_errors += 1
                logger.exception("tick failed")
            due = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            self.node.telemetry.loop_lag.observe(max(0.0, loop.time() - due))


def _claim_sockets(config: ServerConfig) -> dict[str, SocketClaim]:
    """All sockets that gRPC will listen on, or none."""
    claims: dict[str, SocketClaim] = {}
    try:
        for path in filter(None, (config.socket, config.admin_socket)):
            claims[path] = SocketClaim.take(Path(path))
    except BaseException:
        for claim in claims.values():
            claim.release()
        raise
    return claims


def _open_state(config: ServerConfig, boot_id: str, hit: Callable[[str], None] | None) -> WarmRestart | None:
    """What a former daemon left and a later one will find; None: this daemon leaves nothing."""
    if not config.keep_pools:
        return None
    try:
        return WarmRestart(
            config.state_path,
            boot_id=boot_id,
            max_sessions=config.limits.max_sessions,
            max_workers=config.limits.max_exports,
            max_tenants=config.limits.max_tenants,
            hit=hit,
        )
    except OSError as error:
        raise StateDirectoryUnusable(str(config.state_path), error.strerror or str(error)) from None


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def serve(config: ServerConfig) -> None:
    """Runs a daemon until a signal ends it."""
    await Daemon(config).run()
