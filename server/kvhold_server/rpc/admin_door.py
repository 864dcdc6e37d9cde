"""The administrators' socket: accepts connections itself, so that the kernel says who is on the other end.

gRPC takes connections and tells nobody whose they are: of a caller on a unix socket it knows "unix:". So it does not
listen where administrators connect, but on an inner socket that only our own user can reach; this door relays bytes.
A relay's own socket has a name that no other one has (the kernel picks it), and that name is what gRPC calls the peer:

    administrator ──▶ admin.sock                      SO_PEERCRED: uid 1000, gid 1000, pid 4711
                          │  relay, named @0003f
                          └──▶ admin.sock.in ──▶ gRPC, whose peer is "unix-abstract:0003f"
                                                   └──▶ caller_of ──▶ "uid=1000 gid=1000 pid=4711"

The credentials are those of the moment when the connection was made. They are known for a while after its end: a call
may be carried out although its caller has just hung up. Administrators' calls are few and slow: what the relay costs
them is some 100 µs. Engines never come here.
"""

import asyncio
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from kvhold_server.domain.errors import KvholdError
from kvhold_server.rpc.fd_peer import Peer, PeerNotAllowed, check_peer, peer_of

logger = logging.getLogger(__name__)

INNER_SUFFIX = ".in"
MAX_CONNECTIONS = 256
MAX_PAST = 4096  # connections that are remembered after their end
READ_BYTES = 1 << 16
CLOSE_WAIT_S = 1.0
REFUSAL_LOG_INTERVAL_S = 10.0
UNKNOWN = "unknown"


class AdminDoor:
    """Lives on the event loop. `inner` is where gRPC listens; `start` takes the listening socket of the outer path."""

    def __init__(self, path: Path, group_gid: int) -> None:
        self.path = path
        self.inner = Path(f"{path}{INNER_SUFFIX}")
        self._group_gid = os.getegid() if group_gid < 0 else group_gid
        self._callers: dict[str, Peer] = {}  # name of a relay's socket, as gRPC has it → who is behind it
        self._past: dict[str, Peer] = {}  # the same of relays that are over, oldest first
        self._relays: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._num_unsaid_refusals = 0
        self._refusal_said_at_s = -REFUSAL_LOG_INTERVAL_S

    def caller_of(self, grpc_peer: str) -> str:
        """Who made the connection on which gRPC has this peer."""
        peer = self._callers.get(grpc_peer) or self._past.get(grpc_peer)
        return f"uid={peer.uid} gid={peer.gid} pid={peer.pid or UNKNOWN}" if peer else f"{UNKNOWN} ({grpc_peer})"

    def start(self, listener: socket.socket) -> None:
        """Begins to accept."""
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept_forever(listener), name="admin-door")

    async def close(self) -> None:
        """Accepts nobody any more, and lets last answers through; gRPC has stopped before."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self._relays:
            await asyncio.wait(self._relays, timeout=CLOSE_WAIT_S)
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        self.inner.unlink(missing_ok=True)

    async def _accept_forever(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                outer, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors: let some connections end first
                await asyncio.sleep(0.1)
                continue
            if len(self._relays) >= MAX_CONNECTIONS:
                outer.close()
                continue
            relay = asyncio.create_task(self._relay(outer))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)

    async def _relay(self, outer: socket.socket) -> None:
        """One connection, until either side ends it."""
        name = ""
        with outer, suppress(OSError, KvholdError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner:
            outer.setblocking(False)
            inner.setblocking(False)
            peer = peer_of(outer)
            self._check(peer)
            inner.bind("")
            name = f"unix-abstract:{inner.getsockname()[1:].decode()}"
            self._callers[name] = peer
            await asyncio.get_running_loop().sock_connect(inner, str(self.inner))
            ways = [asyncio.create_task(_pump(outer, inner)), asyncio.create_task(_pump(inner, outer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        self._remember(name)

    def _check(self, peer: Peer) -> None:
        """Raises PeerNotAllowed. Says so in the log, seldom enough that who knocks all the time does not fill it."""
        try:
            check_peer(peer, self.path, self._group_gid)
        except PeerNotAllowed as error:
            now_s, more = time.monotonic(), self._num_unsaid_refusals
            self._num_unsaid_refusals += 1
            if now_s - self._refusal_said_at_s >= REFUSAL_LOG_INTERVAL_S:
                logger.warning(
                    "refused an administrator: %s%s", error, f" ({more} more since the last line)" * bool(more)
                )
                self._refusal_said_at_s, self._num_unsaid_refusals = now_s, 0
            raise

    def _remember(self, name: str) -> None:
        """Its connection is over."""
        peer = self._callers.pop(name, None)
        if peer is not None:
            self._past.pop(name, None)  # now it is the newest
            self._past[name] = peer
        if len(self._past) > MAX_PAST:
            del self._past[next(iter(self._past))]


async def _pump(source: socket.socket, target: socket.socket) -> None:
    """Until the source has no more. Holds one piece at a time: who does not read is not read from."""
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, READ_BYTES):
        await loop.sock_sendall(target, data)
