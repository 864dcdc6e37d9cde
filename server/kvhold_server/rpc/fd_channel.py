"""The second unix socket: hands a region's file descriptors to the worker that has a token for them.

gRPC cannot carry descriptors, so `ExportMemory` answers with a token, and the worker redeems it here. The socket is a
path, because abstract names stop at network namespaces, and paths in a shared directory do not.

    client ── u32 length, JSON {"token": "…"} ──▶ server
    client ◀── u32 length, JSON {"status": "ok", "chunk_sizes_bytes": […], …} ── server
    client ◀── "F" + SCM_RIGHTS (up to 64 descriptors), as often as needed ── server
    …the connection stays open while the worker has the memory mapped…
    client ── "unmapped" frame, then close ──▶ server          or: the process dies

The open connection is the proof that a mapping exists, and its end the proof that it does not (R17):

| the connection ends                         | the mapping is gone                                     |
|---------------------------------------------|---------------------------------------------------------|
| after an `unmapped` frame                   | at once: the client unmapped first                      |
| without one, pid known (same PID namespace) | when the process has ended: a pidfd says so             |
| without one, pid unknown                    | at once: no better proof can be had                     |

Peers are strangers until SO_PEERCRED and a token say otherwise: frames are short, everything has a deadline,
connections are counted, and a token works once.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvhold_server.domain.errors import KvholdError
from kvhold_server.memory.backend import ExportedRegion
from kvhold_server.rpc.fd_peer import Peer, check_peer, listen, open_pidfd, peer_of
from kvhold_server.rpc.fd_tokens import FdGrant, TokenTable
from kvhold_server.rpc.fd_wire import MAX_FDS_PER_MESSAGE, BadFrame, read_frame, send_fds, send_frame, wait_readable

UNMAPPED = "unmapped"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRegion:
    """A region's description and new descriptors of it; whoever gets it closes them."""

    exported: ExportedRegion
    fds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMapping:
    """One worker that has one region mapped."""

    mapping_id: int
    grant: FdGrant
    pid: int  # 0 where the peer is in a PID namespace that we cannot see
    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FdChannelOptions:
    """Who may connect and how much is kept for them."""

    group_gid: int = -1  # -1: our own group
    mode: int = 0o660
    token_ttl_s: float = 30.0
    max_tokens: int = 1024
    max_connections: int = 1024
    request_timeout_s: float = 5.0


class FdChannel:
    """The server. Lives on the event loop and calls back on it.

    `open_region` finds the grant's region and opens descriptors; it must not block. Both callbacks are about one
    mapping, and each `on_peer_mapped` is followed by exactly one `on_peer_gone`, unless the channel is closed first.
    """

    def __init__(
        self,
        path: Path,
        *,
        open_region: Callable[[FdGrant], OpenedRegion],
        on_peer_mapped: Callable[[PeerMapping], None],
        on_peer_gone: Callable[[PeerMapping], None],
        options: FdChannelOptions | None = None,
    ) -> None:
        self.path = path
        self.options = options or FdChannelOptions()
        self.tokens = TokenTable(max_tokens=self.options.max_tokens, ttl_s=self.options.token_ttl_s)
        self._open_region = open_region
        self._on_peer_mapped = on_peer_mapped
        self._on_peer_gone = on_peer_gone
        self._group_gid = os.getegid() if self.options.group_gid < 0 else self.options.group_gid
        self._listener: socket.socket | None = None
        self._closing = False
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._mappings: dict[int, PeerMapping] = {}
        self._next_mapping_id = 1
        self.num_refused = 0  # connections over the limit, strangers, junk, bad tokens

    @property
    def mappings(self) -> tuple[PeerMapping, ...]:
        """Every mapping that is not proven gone."""
        return tuple(self._mappings.values())

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def issue(self, grant: FdGrant) -> bytes:
        """A token for `ExportMemory` to hand out. Raises TooManyTokens."""
        return self.tokens.issue(grant, asyncio.get_running_loop().time())

    async def start(self) -> None:
        """Binds. A socket left by a dead daemon is replaced; a live one raises SocketInUse."""
        self._listener = listen(self.path, mode=self.options.mode, group_gid=self.options.group_gid)
        self._accepting = asyncio.create_task(self._accept_forever(self._listener), name="fd-channel")

    async def close(self) -> None:
        """Ends all connections; clients keep what they have mapped, so nobody is reported gone."""
        self._closing = True
        tasks = {task for task in (self._accepting, *self._connections) if task is not None}
        while tasks:  # wait_for may swallow a cancellation that meets its result
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.1)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with suppress(FileNotFoundError):
                self.path.unlink()

    async def _accept_forever(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors: let some connections end first
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            if len(self._connections) >= self.options.max_connections:
                self.num_refused += 1
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        pid_fd = -1
        mapping: PeerMapping | None = None
        try:
            with connection:
                peer = peer_of(connection)
                pid_fd = open_pidfd(peer.pid)
                admitted = await self._admit(connection, peer)
                if admitted is None:
                    return
                mapping = self._mapped(admitted.grant, peer)  # before the descriptors leave, never after
                if await self._hand_over_and_watch(connection, admitted):
                    return
            if pid_fd >= 0:
                await wait_readable(pid_fd)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            self.num_refused += 1
        finally:
            if pid_fd >= 0:
                os.close(pid_fd)
            if mapping is not None:
                del self._mappings[mapping.mapping_id]
                if not self._closing:  # our own end proves nothing about theirs
                    self._on_peer_gone(mapping)

    def _mapped(self, grant: FdGrant, peer: Peer) -> PeerMapping:
        mapping = PeerMapping(mapping_id=self._next_mapping_id, grant=grant, pid=peer.pid, uid=peer.uid, gid=peer.gid)
        self._next_mapping_id += 1
        self._mappings[mapping.mapping_id] = mapping
        self._on_peer_mapped(mapping)
        return mapping

    async def _admit(self, connection: socket.socket, peer: Peer) -> "_Admitted | None":
        """The region that the peer may have; None if it got a refusal instead."""
        try:
            check_peer(peer, self.path, self._group_gid)
            request = await asyncio.wait_for(read_frame(connection), self.options.request_timeout_s)
            grant = self.tokens.redeem(_token_of(request), asyncio.get_running_loop().time())
            return _Admitted(grant=grant, opened=self._open_region(grant))
        except KvholdError as error:
            self.num_refused += 1
            refusal: dict[str, object] = {"status": error.reason(), "message": str(error), "fields": _plain(error)}
            await asyncio.wait_for(send_frame(connection, refusal), self.options.request_timeout_s)
            return None

    async def _hand_over_and_watch(self, connection: socket.socket, admitted: "_Admitted") -> bool:
        """Until the connection ends, however it does: True if the peer said that it has unmapped."""
        try:
            await asyncio.wait_for(_hand_over(connection, admitted), self.options.request_timeout_s)
        except (OSError, asyncio.TimeoutError):
            return False  # it may have got some of the descriptors
        finally:
            for fd in admitted.opened.fds:
                os.close(fd)
        return await self._wait_for_goodbye(connection)

    async def _wait_for_goodbye(self, connection: socket.socket) -> bool:
        """Until the connection ends: True if the peer said that it has unmapped."""
        while True:
            try:
                if (await read_frame(connection)).get("event") == UNMAPPED:
                    return True
            except (asyncio.IncompleteReadError, BadFrame, OSError):
                return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Admitted:
    grant: FdGrant
    opened: OpenedRegion


async def _hand_over(connection: socket.socket, admitted: _Admitted) -> None:
    opened = admitted.opened
    await send_frame(connection, _describe(opened, admitted.grant))
    for start in range(0, len(opened.fds), MAX_FDS_PER_MESSAGE):
        await send_fds(connection, opened.fds[start : start + MAX_FDS_PER_MESSAGE])


def _token_of(request: dict[str, object]) -> bytes:
    token = request.get("token")
    try:
        return bytes.fromhex(token) if isinstance(token, str) else b""
    except ValueError:
        return b""


def _describe(opened: OpenedRegion, grant: FdGrant) -> dict[str, object]:
    return {
        "status": "ok",
        "size_bytes": opened.exported.size_bytes,
        "chunk_sizes_bytes": list(opened.exported.chunk_sizes_bytes),
        "device_uuid": opened.exported.device_uuid,
        "read_only": grant.read_only,
        "num_fds": len(opened.fds),
    }


def _plain(error: KvholdError) -> dict[str, str]:
    return {name: str(value)[:256] for name, value in error.fields().items()}
