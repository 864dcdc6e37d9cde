"""gRPC servers of a daemon: one for engines, perhaps one for administrators; health, reflection, the guard.

Listening on a unix socket is guarded by hand, because gRPC would take over a live daemon's path without a word:

    <path>.lock   flock held while we live, our pid in it     a second daemon is refused with the first one's pid
    <path>        removed if it is a socket nobody holds the lock of; refused if it is anything else
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvhold_server.domain.errors import AlreadyExists, InvalidRequest, PreconditionFailed
from kvhold_server.memory.errors import InstanceInUse
from kvhold_server.memory.instance_lock import InstanceLock

LIVENESS, READINESS = "liveness", "readiness"
SOCKET_MODE = 0o660
MAX_SOCKET_PATH_BYTES = 107
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(eq=False)
class SocketInUse(AlreadyExists):
    """Another live daemon listens on this path."""

    template = "{path} belongs to a running daemon (pid {pid}); stop it or choose another path"
    path: str
    pid: int


@dataclass(eq=False)
class SocketPathTaken(PreconditionFailed):
    """Something that is not a socket lies at the path; it is not ours to delete."""

    template = "{path} exists and is not a socket: {what}; move it away or choose another path"
    path: str
    what: str


@dataclass(eq=False)
class SocketPathUnusable(InvalidRequest):
    """The path cannot hold a socket."""

    template = "{path}: {problem}"
    path: str
    problem: str


@dataclass(eq=False)
class AddressInUse(AlreadyExists):
    """The TCP address cannot be bound."""

    template = "{address} cannot be bound: {problem}"
    address: str
    problem: str


class SocketClaim:
    """The right to listen on a path; held from `take` to `release`."""

    def __init__(self, path: Path, lock: InstanceLock) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def take(cls, path: Path) -> "SocketClaim":
        """Locks the path and clears a dead daemon's socket away. Raises SocketInUse, SocketPathTaken,
        SocketPathUnusable."""
        size = len(os.fsencode(path))
        if size > MAX_SOCKET_PATH_BYTES:
            raise SocketPathUnusable(str(path), f"{size} bytes, a socket's path has at most {MAX_SOCKET_PATH_BYTES}")
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            lock = InstanceLock.acquire(Path(f"{path}.lock"))
        except InstanceInUse as error:
            raise SocketInUse(str(path), error.pid) from None
        except OSError as error:
            raise SocketPathUnusable(str(path), error.strerror or "cannot be used") from None
        try:
            _clear_stale(path)
        except BaseException:
            lock.close(remove=True)
            raise
        return cls(path, lock)

    def open_to_group(self, gid: int) -> None:
        """Lets the group in, after binding. Raises SocketPathUnusable."""
        os.chmod(self.path, SOCKET_MODE)
        if gid < 0:
            return
        try:
            os.chown(self.path, -1, gid)
        except OverflowError:
            raise SocketPathUnusable(str(self.path), f"there is no group {gid}") from None
        except OSError as error:
            raise SocketPathUnusable(str(self.path), f"cannot be given to group {gid}: {error.strerror}") from None

    def release(self) -> None:
        """Removes socket and lock."""
        self.path.unlink(missing_ok=True)
        self._lock.close(remove=True)


def _clear_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketPathTaken(str(path), stat.filemode(mode))
    path.unlink()


def make_server(interceptors: Sequence[grpc.aio.ServerInterceptor], max_message_bytes: int) -> grpc.aio.Server:
    """A server without services. The transport's own bound is twice ours, so that ours answers with a typed error."""
    return grpc.aio.server(
        interceptors=interceptors,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", 2 * max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_concurrent_streams", 4096),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ],
    )


def listen_unix(server: grpc.aio.Server, claim: SocketClaim, gid: int) -> None:
    """Binds; nobody but us can connect until the mode is set."""
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{claim.path}")
    except RuntimeError as error:
        raise SocketPathUnusable(str(claim.path), str(error)) from None
    finally:
        os.umask(before)
    claim.open_to_group(gid)


def listen_inside(server: grpc.aio.Server, path: Path) -> None:
    """Binds where nobody but our own user (and root) can connect. The path is under its claim's lock."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise SocketPathUnusable(str(path), f"{size} bytes, a socket's path has at most {MAX_SOCKET_PATH_BYTES}")
    _clear_stale(path)
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise SocketPathUnusable(str(path), str(error)) from None
    finally:
        os.umask(before)


def listen_tcp(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Binds, in plaintext without credentials, and returns the port. Raises AddressInUse."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUse(address, str(error)) from None
    if not bound:
        raise AddressInUse(address, "another process listens there, or the host is unknown")
    return bound


class HealthBoard:
    """grpc.health.v1 with the names of ours: "" and "readiness" follow the daemon's, "liveness" is up while we run."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_ready(self, ready: bool) -> None:
        """Ready: new sessions are welcome."""
        await self._servicer.set(LIVENESS, SERVING)
        for name in ("", READINESS):
            await self._servicer.set(name, SERVING if ready else NOT_SERVING)


def add_reflection(server: grpc.aio.Server, services: Sequence[Any]) -> None:
    """Lets tools ask which services there are."""
    names = [service.full_name for service in services]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
