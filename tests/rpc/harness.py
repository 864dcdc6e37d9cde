"""A whole daemon inside the test's event loop, on a real unix socket, with stubs of every service."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from kvhold.v1 import (
    admin_pb2_grpc,
    block_pb2,
    block_pb2_grpc,
    event_pb2_grpc,
    plan_pb2,
    plan_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from kvhold_server.app import Daemon
from kvhold_server.config import ServerConfig

BLOCK_TOKENS = 16
HASH_BYTES = 32


def digest(*keys: int) -> bytes:
    """Concatenated digests, one for each number."""
    return b"".join(key.to_bytes(HASH_BYTES, "big") for key in keys)


def simulated(num_blocks: int = 100, **options: Any) -> pool_pb2.PoolOptions:
    """Options of a pool with one full-attention group and no memory."""
    group = pool_pb2.GroupOverride(kind="full", block_size_tokens=BLOCK_TOKENS)
    overrides = pool_pb2.PoolOverrides(groups=[group], num_blocks=num_blocks, max_model_len_tokens=65536)
    return pool_pb2.PoolOptions(enable_prefix_caching=True, overrides=overrides, **options)


def llama(memory_bytes: int = 8 << 20, num_layers: int = 2, num_ranks: int = 1) -> plan_pb2.PlanRequest:
    """A small dense model."""
    geometry = plan_pb2.AttentionGeometry(num_kv_heads=2, head_size_elems=64, dtype=plan_pb2.DTYPE_BFLOAT16)
    spec = plan_pb2.LayerSpec(
        block_size_tokens=BLOCK_TOKENS, geometry=geometry, full_attention=plan_pb2.FullAttention()
    )
    layers = [plan_pb2.Layer(layer_name=f"layers.{i}", layer_spec_index=0) for i in range(num_layers)]
    return plan_pb2.PlanRequest(
        config=plan_pb2.PlannerConfig(
            layout=plan_pb2.LAYOUT_LBNHC,
            max_model_len_tokens=1024,
            max_num_batched_tokens=512,
            enable_prefix_caching=True,
        ),
        layer_specs=[spec],
        ranks=[plan_pb2.Rank(available_memory_bytes=memory_bytes, layers=layers) for _ in range(num_ranks)],
    )


class RunningDaemon:
    """The daemon and a client's view of it."""

    def __init__(self, daemon: Daemon, channel: grpc.aio.Channel) -> None:
        self.daemon = daemon
        self.node = daemon.node
        self.connect(channel)

    def connect(self, channel: grpc.aio.Channel) -> None:
        """Makes the stubs."""
        self.channel = channel
        self.plans = plan_pb2_grpc.PlanServiceStub(channel)
        self.pools = pool_pb2_grpc.PoolServiceStub(channel)
        self.sessions = session_pb2_grpc.SessionServiceStub(channel)
        self.blocks = block_pb2_grpc.BlockServiceStub(channel)
        self.events = event_pb2_grpc.EventServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)

    async def open_pool(self, name: str = "p", **options: Any) -> pool_pb2.OpenPoolResponse:
        return await self.pools.OpenPool(pool_pb2.OpenPoolRequest(name=name, options=simulated(**options)))

    async def open_session(self, pool: str = "p", **fields: Any) -> "ClientSession":
        opened = await self.sessions.OpenSession(session_pb2.OpenSessionRequest(pool=pool, **fields))
        return ClientSession(self, opened)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Waits for what the daemon does by itself."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "it never came true"
            await asyncio.sleep(0.005)

    def check(self) -> None:
        """All invariants of everything."""
        self.node.sessions.check_invariants()
        for live in self.node.pools.values():
            live.pool.check_invariants()


class ClientSession:
    """One session, with the numbers that go with every request."""

    def __init__(self, running: RunningDaemon, opened: session_pb2.OpenSessionResponse) -> None:
        self._running = running
        self.opened = opened
        self.next_step = opened.last_step + 1
        self._stream: Any = None

    @property
    def head(self) -> dict[str, Any]:
        return {"session_id": self.opened.session_id, "epoch": self.opened.epoch}

    async def keep_alive(self) -> None:
        """Opens the stream; it lasts until `break_stream`."""
        head = self.head

        async def messages() -> AsyncIterator[session_pb2.KeepAliveRequest]:
            while True:
                yield session_pb2.KeepAliveRequest(**head)
                await asyncio.sleep(0.02)

        self._stream = self._running.sessions.KeepAlive(messages())
        await self._stream.read()

    def break_stream(self) -> None:
        self._stream.cancel()

    async def step(self, **parts: Any) -> block_pb2.StepResponse:
        """The next step, of which the one before is complete."""
        parts.setdefault("step", self.next_step)
        parts.setdefault("completed_step", parts["step"] - 1)
        self.next_step = max(self.next_step, parts["step"] + 1)
        return await self._running.blocks.Step(block_pb2.StepRequest(**self.head, **parts))

    async def admit(self, sequence_id: int, num_tokens: int, *hashes: int, **fields: Any) -> block_pb2.StepResponse:
        """One sequence, all of it."""
        items = block_pb2.AdmitItems(
            sequence_ids=[sequence_id],
            num_tokens=[num_tokens],
            num_hashes=[len(hashes)],
            hashes=digest(*hashes),
            **fields,
        )
        return await self.step(admit=items)

    async def free(self, *sequence_ids: int) -> block_pb2.StepResponse:
        return await self.step(free=block_pb2.FreeItems(sequence_ids=sequence_ids))

    async def close(self) -> session_pb2.CloseSessionResponse:
        request = session_pb2.CloseSessionRequest(**self.head, completed_step=self.next_step - 1)
        return await self._running.sessions.CloseSession(request)


@contextlib.asynccontextmanager
async def running(directory: Path, **settings: Any) -> AsyncIterator[RunningDaemon]:
    """A daemon that forgets nobody while a slow machine runs the test."""
    defaults: dict[str, Any] = {
        "socket": str(directory / "k.sock"),
        "backend": "fake",
        "keep_pools": False,
        "grace_period_s": 60.0,
        "tick_interval_s": 0.01,
    }
    daemon = Daemon(ServerConfig(**defaults | settings))
    await daemon.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{daemon.config.socket}") as channel:
            yield RunningDaemon(daemon, channel)
    finally:
        await daemon.close()


class Refusal:
    """What a failed call says."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        status = Status()
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                status.ParseFromString(value)  # type: ignore[arg-type]
        info = ErrorInfo()
        self.has_info = bool(status.details) and status.details[0].Unpack(info)
        self.reason = info.reason
        self.metadata = dict(info.metadata)


async def refused(call: Any) -> Refusal:
    """Awaits a call that must fail."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return Refusal(error)
    raise AssertionError(f"it was accepted: {answer}")
