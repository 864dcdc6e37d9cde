"""The blocking client: connect, plan, open a pool, open a session, map its memory.

    with Client("unix:/run/kvhold/kvhold.sock") as client:
        pool = client.open_pool("llama", plan_request)
        with pool.open_session(client_name="scheduler-0") as session, pool.map_rank(0) as memory:
            …

Calls that change nothing, or that are idempotent by name, may simply be repeated; steps are repeated by the session,
and exactly once. Make a client after forking, never before.
"""

import os
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import grpc

from kvhold.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    block_pb2,
    block_pb2_grpc,
    plan_pb2,
    plan_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from kvhold_client.calls import CallSettings, call
from kvhold_client.channels import open_channel
from kvhold_client.codec import (
    decode_capabilities,
    decode_plan,
    decode_plan_response,
    decode_prefix_stats,
    decode_session_info,
)
from kvhold_client.mapping import MappedRegion, map_region
from kvhold_client.plan import Plan
from kvhold_client.pools import PoolInfo, PoolRequest, decode_pool
from kvhold_client.rank_layout import rank_layout_from_message, region_export_from_message
from kvhold_client.results import Capabilities, PoolCounts, PrefixStats, SessionInfo
from kvhold_client.session import Session
from kvhold_client.session_core import SessionCore
from kvhold_client.step import StepBuilder
from kvhold_client.step_reply import decode_counts
from kvhold_client.target import default_target, normal_target


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """What changes about a pool."""

    counts: PoolCounts
    prefix_stats: PrefixStats
    num_sessions: int


class Client:
    """One connection to one daemon. Thread-safe. Connects at the first call."""

    def __init__(self, target: str | None = None, *, timeout_s: float = 30.0) -> None:
        self.target = default_target() if target is None else normal_target(target)
        self._settings = CallSettings(target=self.target, timeout_s=timeout_s)
        self._channel = open_channel(self.target)
        self._plans = plan_pb2_grpc.PlanServiceStub(self._channel)
        self._pools = pool_pb2_grpc.PoolServiceStub(self._channel)
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        # An open stream can hang the interpreter's exit: cancel it and close the channel in time.
        self._at_exit = weakref.finalize(self, _hang_up, self._channel, self._open_sessions)

    # ------------------------------------------------------------------------------------------------------- plans
    def capabilities(self) -> Capabilities:
        """What the daemon can do, and its bounds."""
        return decode_capabilities(call(self._plans.GetCapabilities, plan_pb2.GetCapabilitiesRequest(), self._settings))

    def plan(self, request: plan_pb2.PlanRequest) -> Plan:
        """Plans without allocating anything. Raises InvalidRequest, Exhausted, Unsupported, PreconditionFailed."""
        return decode_plan_response(call(self._plans.Plan, request, self._settings))

    # ------------------------------------------------------------------------------------------------------- pools
    def open_pool(self, request: PoolRequest) -> "Pool":
        """Makes the pool or attaches to it; never writes to its memory."""
        message = request.message()
        response = call(self._pools.OpenPool, message, self._settings)
        info = decode_pool(response.pool, response.outcome, response.recovery)
        return Pool(self, response.pool, info, opened_with=message)

    def get_pool(self, name: str) -> "Pool":
        """Attaches to a pool that somebody opened. Raises PoolNotFound."""
        response = call(self._pools.GetPool, pool_pb2.GetPoolRequest(name=name), self._settings)
        return Pool(self, response.pool, decode_pool(response.pool))

    def list_pools(self) -> list[PoolInfo]:
        """All pools, by name, without their plans."""
        response = call(self._pools.ListPools, pool_pb2.ListPoolsRequest(), self._settings)
        return [decode_pool(pool) for pool in response.pools]

    def delete_pool(self, name: str, *, force: bool = False) -> int:
        """Gives its memory back and returns its bytes; 0 if it was gone. Raises PoolInUse unless forced."""
        request = pool_pb2.DeletePoolRequest(name=name, force=force)
        return call(self._pools.DeletePool, request, self._settings).freed_bytes

    def list_sessions(self, pool: str = "") -> list[SessionInfo]:
        """Sessions of a pool, or of all."""
        response = call(self._sessions.ListSessions, session_pb2.ListSessionsRequest(pool=pool), self._settings)
        return [decode_session_info(session) for session in response.sessions]

    def reset_prefix_cache(self, pool: str, *, force: bool = False) -> int:
        """Forgets all cached prefixes and returns how many blocks lost theirs."""
        request = admin_pb2.ResetPrefixCacheRequest(pool=pool, force=force)
        return call(self._admin.ResetPrefixCache, request, self._settings).num_reset_blocks

    # --------------------------------------------------------------------------------------------------- lifetime
    def close(self) -> None:
        """Closes what sessions are still open, in order, and then the connection. Idempotent."""
        for session in list(self._open_sessions):
            session.close()
        self._at_exit.detach()
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _hang_up(channel: grpc.Channel, sessions: "weakref.WeakSet[Session]") -> None:
    for session in list(sessions):
        session.abandon()
    channel.close()


class Pool:
    """An open pool. Made by `Client.open_pool` and `Client.get_pool`."""

    def __init__(
        self,
        client: Client,
        message: pool_pb2.Pool,
        info: PoolInfo,
        opened_with: pool_pb2.OpenPoolRequest | None = None,
    ) -> None:
        self.info = info
        self._client = client
        self._message = message
        self._opened_with = opened_with
        self._blocks = block_pb2_grpc.BlockServiceStub(client._channel)

    @property
    def name(self) -> str:
        """Its name."""
        return self.info.name

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return decode_plan(self._message.plan)

    def open_session(
        self,
        *,
        client_name: str = "",
        tenant: str = "",
        on_lost: Callable[[list[int]], None] | None = None,
        local_transport: bool = True,
        step_stream: bool = True,
    ) -> Session:
        """Opens a session and keeps it alive in the background.

        `local_transport`: send steps as frames over a second unix socket where the daemon offers one and we reach it;
        otherwise, and for everything else, gRPC. `step_stream`: steps go over gRPC on one stream where the daemon has
        it, not call by call.

        If the daemon restarts, the session reopens the pool, provided that this object came from `open_pool`, and
        re-asserts what it holds. `on_lost` is called with the ids of sequences that could not be given back, from
        whichever thread noticed; they must be preempted. They are also marked LOST in the session's table.
        """
        client = self._client
        name = client_name or f"pid-{os.getpid()}"
        core = SessionCore(
            pool=self.name,
            client_name=name,
            tenant=tenant,
            request_id=uuid.uuid4().hex,
            pid=os.getpid(),
            local=local_transport,
        )
        reopen = self._reopen if self._opened_with is not None else None
        session = Session(client._channel, core, self.info.shape, client._settings, on_lost, reopen, step_stream)
        client._open_sessions.add(session)
        return session

    def _reopen(self) -> None:
        """After a daemon's restart: opens the pool as it was opened, so that its sessions can be resumed."""
        call(self._client._pools.OpenPool, self._opened_with, self._client._settings)

    def map_rank(
        self,
        rank: int = 0,
        *,
        session: Session | None = None,
        read_only: bool = False,
        library: str = "auto",
        num_warmup_blocks: int = 0,
        wanted_address: int = 0,
    ) -> MappedRegion:
        """Maps one rank's memory: a view per layer, nothing copied. Raises MappingError.

        `session`: whose worker this is, so that the death of either is told apart. `wanted_address`: the
        `device_address` of an earlier mapping, to map device memory there again: captured graphs stay valid.
        """
        request = pool_pb2.ExportMemoryRequest(
            pool=self.name,
            rank=rank,
            read_only=read_only,
            num_warmup_blocks=num_warmup_blocks,
            session_id=session.session_id if session is not None else "",
        )
        response = call(self._client._pools.ExportMemory, request, self._client._settings)
        layout = rank_layout_from_message(self._message.plan, rank)
        exports = [region_export_from_message(region) for region in response.regions]
        return map_region(exports, layout, read_only=read_only, library=library, wanted_address=wanted_address)

    def lookup(self, *, num_tokens: int, hashes: bytes) -> int:
        """Tokens of a prompt that are cached for everybody now: a hint, nothing is pinned."""
        builder = StepBuilder(self.info.shape.hash_size_bytes)
        builder.lookup(num_tokens=num_tokens, hashes=hashes)
        items = builder.encode().lookup
        request = block_pb2.LookupRequest(pool=self.name, lookup=items)
        return call(self._blocks.Lookup, request, self._client._settings).lookup.hit_tokens[0]

    def status(self) -> PoolStatus:
        """Blocks by state, prefix statistics, sessions, as of now."""
        request = pool_pb2.GetPoolRequest(name=self.name)
        now = call(self._client._pools.GetPool, request, self._client._settings).pool
        return PoolStatus(
            counts=decode_counts(now.counts),
            prefix_stats=decode_prefix_stats(now.prefix_stats),
            num_sessions=now.num_sessions,
        )
