"""A node with its files, engines with their workers, and real bytes: what random histories with restarts consist of.

    Engine ── the client's own SequenceTable ──▶ World.answer ──▶ node        may die between any two stores
       └── kernels, later, in order ──▶ the region's bytes: each token a digest of its prompt, place and weights

A kernel checks, before it writes, every byte that its sequences read. So whatever a restart confuses shows up as wrong
bytes: a block given to two, a hit on another prompt, on half-written blocks, on states of another
place, on old weights.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvhold.v1 import block_pb2, plan_pb2, pool_pb2
from kvhold_client.step import decode_step
from kvhold_client.step_reply import StepReply
from kvhold_server.domain.ids import PoolName
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.failpoints import Stopped
from kvhold_server.memory.backend import Region
from kvhold_server.memory.posix_shm import PosixShmBackend, PosixShmOptions
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.node import Node
from kvhold_server.node.node_values import Shell
from kvhold_server.node.opening import Opening
from kvhold_server.node.quotas import held_by_tenant
from kvhold_server.node.recovering import IN_FLIGHT_S
from kvhold_server.node.warm_restart import WarmRestart
from kvhold_server.rpc.planning import make_plan
from kvhold_server.rpc.pool_codec import decode_content, decode_open_pool
from kvhold_server.rpc.reopen import reclaim_all, reopen_all
from kvhold_server.rpc.services.blocks import BlockService
from kvhold_server.sessions.lease import LeaseTerms
from tests.recovery.history_bytes import STATE_TOKENS, UNIT, WINDOW_TOKENS, Memory

if TYPE_CHECKING:
    from tests.recovery.history_engine import Engine

POOL = PoolName("p")
TERMS = LeaseTerms(lease_ttl_s=10.0, grace_s=5.0, unproven_grace_s=5.0, max_tick_s=1e9)
LIMITS = ServiceLimits()


def plan_request(groups: str, memory_bytes: int) -> plan_pb2.PlanRequest:
    geometry = plan_pb2.AttentionGeometry(num_kv_heads=1, head_size_elems=16, dtype=plan_pb2.DTYPE_BFLOAT16)
    specs = {
        "f": plan_pb2.LayerSpec(block_size_tokens=UNIT, geometry=geometry, full_attention=plan_pb2.FullAttention()),
        "w": plan_pb2.LayerSpec(
            block_size_tokens=UNIT,
            geometry=geometry,
            sliding_window=plan_pb2.SlidingWindow(sliding_window_tokens=WINDOW_TOKENS),
        ),
        "s": plan_pb2.LayerSpec(block_size_tokens=STATE_TOKENS),
    }
    specs["s"].mamba.states.add(shape=[40], dtype=plan_pb2.DTYPE_FLOAT32)
    specs["s"].mamba.state_cache_mode = plan_pb2.STATE_CACHE_MODE_ALIGN
    layers = [plan_pb2.Layer(layer_name=f"l{i}", layer_spec_index=i) for i in range(len(groups))]
    return plan_pb2.PlanRequest(
        config=plan_pb2.PlannerConfig(
            layout=plan_pb2.LAYOUT_LBNHC,
            max_model_len_tokens=120,
            max_num_batched_tokens=512,
            enable_prefix_caching=True,
        ),
        layer_specs=[specs[kind] for kind in groups],
        ranks=[plan_pb2.Rank(available_memory_bytes=memory_bytes, layers=layers)],
    )


class World:
    """The machine: files, memory, time, engines, and the node that dies now and then."""

    def __init__(self, directory: Path, choice: random.Random, groups: str) -> None:
        self.choice = choice
        self.groups = groups
        self.now_s = 100.0
        self.version = 1  # of the weights, and of the contents
        self.quotas: dict[str, int] = {}
        self.engines: list[Engine] = []
        self.num_restarts = self.num_deaths_with_draws = 0
        self._secrets = itertools.count()
        self._boots = itertools.count()
        self._directory = directory
        self._hits_left = 0  # stores until the node dies; 0: it does not
        (directory / "shm").mkdir()
        self._start()
        self._open_pool()

    # -------------------------------------------------------------- life of the node
    def _start(self) -> None:
        boot_id = f"boot {next(self._boots)}"
        options = PosixShmOptions(directory=self._directory / "shm")
        self.backend = PosixShmBackend(self._directory / "state", options)
        warm = WarmRestart(
            self._directory / "state", boot_id=boot_id, max_sessions=32, max_workers=8, hit=self._reached
        )
        secret: Callable[[], str] = lambda: f"secret {next(self._secrets)}"  # noqa: E731
        self.node = Node(
            shell=Shell(boot_id=boot_id, clock=lambda: self.now_s, new_secret=secret),
            backends={"posix_shm": self.backend},
            default_backend="posix_shm",
            terms=TERMS,
            limits=LIMITS,
            warm=warm,
        )
        reopen_all(self.node, warm)
        reclaim_all(self.node)
        self.service = BlockService(self.node)
        self.started_at_s = self.now_s

    def _open_pool(self) -> None:
        content = pool_pb2.ContentIdentity(weight_version=str(self.version))
        request = pool_pb2.OpenPoolRequest(
            name=POOL,
            plan=plan_request(self.groups, 16 << 10),
            content=content,
            options=pool_pb2.PoolOptions(enable_prefix_caching=True),
        )
        plan = make_plan(request.plan, LIMITS)
        command = decode_open_pool(request, plan, "posix_shm", LIMITS)
        opening = self.node.begin_open_pool(replace(command, message=request.SerializeToString()))
        assert isinstance(opening, Opening)
        regions: tuple[Region, ...] = tuple(self.backend.reserve(request) for request in opening.requests)
        self.node.finish_open_pool(opening, regions, self.node.make_pool(opening, regions))
        self.memory = Memory(self.live, self.backend, self.groups)
        self.kinds = [group.kind.value for group in self.live.config.groups]
        self.first_generation = self.version

    @property
    def live(self) -> LivePool:
        return self.node.pools[POOL]

    def _reached(self, place: str) -> None:
        if self._hits_left:
            self._hits_left -= 1
            if not self._hits_left:
                raise Stopped

    def arm(self, num_hits: int) -> None:
        """The node dies at the n-th store from now on that matters."""
        self._hits_left = num_hits

    def die(self, *, in_the_middle: bool) -> None:
        """SIGKILL, and a successor. Its pool must be the former one's, byte for byte."""
        self._hits_left = 0
        self.num_restarts += 1
        self.num_deaths_with_draws += any(engine.has_unsaid_draws for engine in self.engines)
        former, old = self.live, self.node
        for live in old.pools.values():
            assert live.journal is not None
            live.journal.table.close()
        assert old.warm is not None
        old.warm.close()
        self.backend.close(keep=True)
        self._start()
        assert POOL in self.node.pools, "it is never lost"
        if not in_the_middle:
            self._compare(former)
        self.check()

    def _compare(self, former: LivePool) -> None:
        live, public, now = self.live, former.pool.published(), self.live.pool.published()
        sizes = [group.block_size_tokens for group in live.config.groups]
        rows = zip(public.blocks, public.groups, public.hashes, public.key_tokens, strict=True)
        allotted = {block for owner in former.pool.tenures.sessions.values() for block in owner.allotted}
        whole = {row for row in rows if not row[3] % sizes[row[1]] and row[0] not in allotted}
        found = set(zip(now.blocks, now.groups, now.hashes, now.key_tokens, strict=True))
        assert found == whole, f"invented {found - whole}, lost {whole - found}"
        assert live.quotas == self.quotas == former.quotas
        assert live.content_generation == former.content_generation
        assert live.identity == former.identity

    def guarded(self, act: Callable[[], object]) -> bool:
        """False: the node died in the middle of it, and there is another one."""
        try:
            act()
        except Stopped:
            self.die(in_the_middle=True)
            return False
        return True

    # ------------------------------------------------------------------------- events
    def set_quota(self, tenant: str, num_blocks: int) -> None:
        wanted = {name: num for name, num in (self.quotas | {tenant: num_blocks}).items() if num}
        if not self.guarded(lambda: self.node.set_quota(POOL, tenant, num_blocks)):
            assert self.live.quotas in (self.quotas, wanted), "one of the two"
            wanted = dict(self.live.quotas)
        self.quotas = wanted

    def update_content(self) -> None:
        """New weights: from the answer on nothing old is hit."""
        before = self.live.content_generation
        content = pool_pb2.ContentIdentity(weight_version=str(self.version + 1))

        def act() -> None:
            self.node.update_content(
                POOL, before, decode_content(content), even_if_shared=True, message=content.SerializeToString()
            )

        was_done = self.guarded(act)
        assert not was_done or self.live.content_generation == before + 1
        if was_done or self.live.content_generation == before + 1:
            self.version += 1

    def reset(self) -> None:
        self.guarded(lambda: self.node.reset_cache(POOL, force=True))

    def evict(self) -> None:
        blocks = self.choice.sample(range(1, self.live.config.num_blocks), 5)
        self.guarded(lambda: self.node.evict_blocks(POOL, blocks))

    def pass_time(self, seconds: float) -> None:
        """Kernels of before a restart are done in IN_FLIGHT_S; engines keep their sessions alive."""
        if self.now_s < self.started_at_s + IN_FLIGHT_S <= self.now_s + seconds:
            for engine in self.engines:
                engine.run_kernels()
        self.resume_all()
        self.now_s += seconds
        for engine in self.alive():
            engine.keep_alive()
        is_busy = [True]
        while is_busy[-1] and self.guarded(lambda: is_busy.append(self.node.tick())):
            pass

    def alive(self) -> "list[Engine]":
        return [engine for engine in self.engines if engine.is_alive]

    def resume_all(self) -> None:
        for engine in self.choice.sample(self.alive(), len(self.alive())):
            if engine.is_alive:
                engine.resume_if_needed()

    def check(self) -> None:
        self.live.pool.check_invariants()
        self.node.sessions.check_invariants()

    def answer(self, tenant: str, request: block_pb2.StepRequest) -> StepReply:
        """One step; it takes no more than the tenant's quota leaves."""
        live, quota = self.live, self.quotas.get(tenant)
        slot = self.node.fenced(request.session_id, request.epoch).slot
        held, num_available = held_by_tenant(live, self.node.sessions, tenant), live.pool.available(slot)
        reply = decode_step(self.service.answer_step(request))
        if quota is not None:
            assert num_available - live.pool.available(slot) <= max(0, quota - held), "beyond its quota"
        return reply
