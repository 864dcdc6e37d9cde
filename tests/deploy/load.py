"""Load for a live daemon: small schedulers that talk the contract and nothing else, so that what is watched is real.

    python -m tests.deploy.load --target unix:/run/kvhold/kvhold.sock --seconds 30

Each client opens (or attaches to) a pool, admits prompts that share prefixes, decodes, finishes, sometimes preempts.
One of them may vanish without a word (`kill_after_steps`): its session must pass through grace and quarantine.
"""

import argparse
import asyncio
import hashlib
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvhold.v1 import block_pb2, block_pb2_grpc, plan_pb2, pool_pb2, pool_pb2_grpc, session_pb2, session_pb2_grpc

BLOCK_TOKENS = 16
HASH_BYTES = 32
MAX_RUNNING = 10


def layer_specs() -> list[plan_pb2.LayerSpec]:
    """A full and a sliding-window kind, small enough for any machine."""
    geometry = plan_pb2.AttentionGeometry(num_kv_heads=1, head_size_elems=64, dtype=plan_pb2.DTYPE_BFLOAT16)
    full = plan_pb2.LayerSpec(
        block_size_tokens=BLOCK_TOKENS, geometry=geometry, full_attention=plan_pb2.FullAttention()
    )
    window = plan_pb2.LayerSpec(
        block_size_tokens=BLOCK_TOKENS,
        geometry=geometry,
        sliding_window=plan_pb2.SlidingWindow(sliding_window_tokens=256),
    )
    return [full, window]


def plan_request(num_blocks: int, num_layers: int = 12, *, hybrid: bool = True) -> plan_pb2.PlanRequest:
    """Every third layer looks at everything, the others at a window."""
    layers = [
        plan_pb2.Layer(layer_name=f"model.layers.{i}.attn", layer_spec_index=int(hybrid and i % 3 != 0))
        for i in range(num_layers)
    ]
    return plan_pb2.PlanRequest(
        config=plan_pb2.PlannerConfig(
            strategy=plan_pb2.STRATEGY_MODERN,
            layout=plan_pb2.LAYOUT_BLNHC,
            max_model_len_tokens=4096,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
            num_blocks_override=num_blocks,
            enable_prefix_caching=True,
        ),
        layer_specs=layer_specs(),
        ranks=[plan_pb2.Rank(available_memory_bytes=1 << 30, layers=layers)],
    )


def digests(tokens: tuple[int, ...], salt: str) -> list[bytes]:
    """A chained digest per block: equal prefixes, equal digests."""
    found, state = [], hashlib.sha256(salt.encode())
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        state.update(repr(tokens[start : start + BLOCK_TOKENS]).encode())
        found.append(state.digest()[:HASH_BYTES])
    return found


@dataclass
class Request:
    """One prompt on its way."""

    sequence_id: int
    num_prompt: int
    hashes: list[bytes]
    num_output: int
    computed: int = 0
    sent_hashes: bool = False


@dataclass
class Workload:
    """Conversations that begin with one of a few system prompts; a seed repeats them."""

    seed: int
    num_prefixes: int = 6
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def next(self, sequence_id: int) -> Request:
        rng = self.rng
        prefix = min(int(rng.expovariate(0.7)), self.num_prefixes - 1)
        shared = tuple(prefix * 10_000 + i for i in range(BLOCK_TOKENS * rng.choice((8, 16, 24))))
        own = tuple(rng.randrange(50_000) for _ in range(rng.randrange(20, 400)))
        tokens = shared + own
        return Request(sequence_id, len(tokens), digests(tokens, "load"), rng.randrange(8, 64))


class Client:
    """One scheduler process in miniature."""

    def __init__(
        self, target: str, pool: str, name: str, *, seed: int, tenant: str = "", num_blocks: int = 2000
    ) -> None:
        self.channel = grpc.aio.insecure_channel(target)
        self.pools = pool_pb2_grpc.PoolServiceStub(self.channel)
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.blocks = block_pb2_grpc.BlockServiceStub(self.channel)
        self.pool, self.name, self.tenant, self.num_blocks = pool, name, tenant, num_blocks
        self.workload = Workload(seed)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.preempted: list[int] = []
        self.step_number = 0
        self.next_sequence = 1
        self.session: Any = None
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Pool, session, heartbeat."""
        await self.pools.OpenPool(
            pool_pb2.OpenPoolRequest(
                name=self.pool,
                plan=plan_request(self.num_blocks),
                content=pool_pb2.ContentIdentity(model=f"example/{self.pool}", hash_algorithm="sha256"),
                options=pool_pb2.PoolOptions(enable_prefix_caching=True, hash_size_bytes=HASH_BYTES),
            )
        )
        self.session = await self.sessions.OpenSession(
            session_pb2.OpenSessionRequest(pool=self.pool, client_name=self.name, tenant=self.tenant)
        )
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        async def messages() -> Any:
            while True:
                yield session_pb2.KeepAliveRequest(session_id=self.session.session_id, epoch=self.session.epoch)
                await asyncio.sleep(0.5)

        async for _ in self.sessions.KeepAlive(messages()):
            pass

    async def step(self) -> Any:
        """One scheduler step: finish and preempt, decode, admit."""
        rng = self.workload.rng
        while len(self.waiting) < 4:
            self.waiting.append(self.workload.next(self.next_sequence))
            self.next_sequence += 1
        self.step_number += 1
        done = [r for r in self.running.values() if r.computed >= r.num_prompt + r.num_output]
        victims = [r for r in self.running.values() if r not in done][-1:] if rng.random() < 0.02 else []
        reply = await self.blocks.Step(self._request(done, victims))
        self._apply(reply, done, victims)
        return reply

    def _request(self, done: list[Request], victims: list[Request]) -> block_pb2.StepRequest:
        leaving = [*done, *victims]
        going_on = [r for r in self.running.values() if r not in leaving]
        admitted = list(self.waiting)[: 2 if len(going_on) < MAX_RUNNING else 0]
        self._asked = going_on, admitted
        request = block_pb2.StepRequest(
            session_id=self.session.session_id,
            epoch=self.session.epoch,
            step=self.step_number,
            completed_step=max(0, self.step_number - 2),
        )
        if leaving:
            request.free.sequence_ids.extend(r.sequence_id for r in leaving)
            request.free.publish_tokens.extend(min(r.computed, r.num_prompt) for r in leaving)
            request.free.preempted.extend(r in victims for r in leaving)
        if going_on:
            request.extend.sequence_ids.extend(r.sequence_id for r in going_on)
            request.extend.slots_needed.extend(r.computed + 1 for r in going_on)
            request.extend.processed_tokens.extend(r.computed for r in going_on)
        if admitted:
            request.admit.token_budget = 2048
            for r in admitted:
                request.admit.sequence_ids.append(r.sequence_id)
                request.admit.num_tokens.append(r.num_prompt)
                request.admit.num_hashes.append(0 if r.sent_hashes else len(r.hashes))
            request.admit.hashes = b"".join(b"".join(r.hashes) for r in admitted if not r.sent_hashes)
        return request

    def _apply(self, reply: Any, done: list[Request], victims: list[Request]) -> None:
        going_on, admitted = self._asked
        for r in done:
            del self.running[r.sequence_id]
        for r in victims:
            del self.running[r.sequence_id]
            r.computed = 0
            self.waiting.append(r)
        for r, status in zip(going_on, reply.extend.statuses, strict=True):
            if status == block_pb2.ITEM_STATUS_OK:
                r.computed += 1
            elif status == block_pb2.ITEM_STATUS_OUT_OF_BLOCKS:
                self.preempted.append(r.sequence_id)
        for r, status, hit, new in zip(
            admitted, reply.admit.statuses, reply.admit.hit_tokens, reply.admit.granted_tokens, strict=True
        ):
            r.sent_hashes = status != block_pb2.ITEM_STATUS_UNKNOWN_SEQUENCE
            if status == block_pb2.ITEM_STATUS_OK:
                self.waiting.remove(r)
                self.running[r.sequence_id] = r
                r.computed = hit + new
        if self.preempted:  # no room to decode: the youngest gives way in the next step by being called done
            youngest = max(self.running.values(), key=lambda r: r.sequence_id)
            youngest.num_output = min(youngest.num_output, max(0, youngest.computed - youngest.num_prompt))
            self.preempted.clear()

    async def vanish(self) -> None:
        """Dies without a word."""
        if self._beating:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        await self.channel.close()

    async def close(self) -> None:
        """Leaves in order."""
        request = session_pb2.CloseSessionRequest(
            session_id=self.session.session_id, epoch=self.session.epoch, completed_step=self.step_number
        )
        await self.sessions.CloseSession(request)
        await self.vanish()


async def run_load(
    target: str,
    *,
    seconds: float,
    pools: tuple[str, ...] = ("chat", "code"),
    pause_s: float = 0.005,
    kills: bool = True,
) -> dict[str, int]:
    """Two clients a pool; one of the first pool vanishes half way. Returns steps by client."""
    clients = [
        Client(target, pool, f"engine-{pool}-{i}", seed=17 * p + i, tenant=f"team-{i}")
        for p, pool in enumerate(pools)
        for i in range(2)
    ]
    for client in clients:
        await client.open()
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    doomed = clients[1] if kills else None

    async def drive(client: Client) -> None:
        stop = end - seconds / 2 if client is doomed else end
        while loop.time() < stop:
            await client.step()
            await asyncio.sleep(pause_s)
        if client is doomed:
            await client.vanish()

    await asyncio.gather(*(drive(client) for client in clients))
    for client in clients:
        if client is not doomed:
            await client.vanish() if kills else await client.close()
    return {client.name: client.step_number for client in clients}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    print(asyncio.run(run_load(arguments.target, seconds=arguments.seconds)))


if __name__ == "__main__":
    main()
