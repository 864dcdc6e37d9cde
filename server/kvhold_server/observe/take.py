"""Takes a NodeView from a running node, in pieces: after each of them steps that wait may run.

    session │ … │ backend │ … │ pool │ … │ telemetry      each │ is a pause; most pieces take 0.1 ms

Runs on the event loop's thread; costs O(pools + layers), and once in SLOW_PERIOD_S O(held blocks), because each session
counts its blocks, and some system calls.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvhold_server.domain.plan import RankPlan
from kvhold_server.memory.backend import DeviceUsage
from kvhold_server.metrics import PoolSnapshot, Snapshot, lookahead_by_pool, sessions_by_state, take_pool
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.node import Node
from kvhold_server.observe.view import (
    BackendView,
    DeviceView,
    GroupView,
    NodeView,
    PlacementView,
    PoolView,
    ResidencyHistograms,
    SessionView,
)
from kvhold_server.sessions.session import Session

MAX_SHOWN_LAYERS = 512  # of the plan picture; the numbers are exact
SLOW_PERIOD_S = 2.0
PAUSE_S = 0.001  # a step takes several turns of the loop: it meets one piece, not one in each


class Observer:
    """Takes views of one node; remembers the dear parts for a moment."""

    def __init__(self, node: Node, version: str) -> None:
        self._node = node
        self._version = version
        self._started_at_s = node.now_s
        self._sessions: tuple[SessionView, ...] = ()
        self._backends: tuple[BackendView, ...] = ()
        self._devices: tuple[DeviceView, ...] = ()
        self._slow_at_s = float("-inf")
        self._looking = asyncio.Lock()  # who comes while another looks takes what that one finds
        self._residency: dict[str, ResidencyHistograms] = {}
        self._pictures: dict[str, PlanPicture] = {}

    async def take(self) -> NodeView:
        """The whole picture: each pool as of one moment; sessions and devices may be two seconds old."""
        node = self._node
        async with self._looking:
            if node.now_s - self._slow_at_s >= SLOW_PERIOD_S:
                await self._look_at_slow()
                self._slow_at_s = node.now_s
        views = [view async for view in self._pool_views()]
        snapshot = Snapshot(
            boot_id=node.boot_id,
            version=self._version,
            is_draining=node.drain.is_draining,
            uptime_s=node.now_s - self._started_at_s,
            pools=tuple(view.snapshot for view in views),
            telemetry=node.telemetry.copy(),
        )
        return NodeView(
            snapshot=snapshot,
            pools=tuple(views),
            sessions=self._sessions,
            backends=self._backends,
            devices=self._devices,
        )

    async def _look_at_slow(self) -> None:
        self._sessions = await session_views(self._node)
        self._backends = await backend_views(self._node)
        self._devices = await device_views(self._node)

    async def _pool_views(self) -> AsyncIterator[PoolView]:
        node = self._node
        sessions, lookahead = sessions_by_state(node), lookahead_by_pool(node)
        for live in tuple(node.pools.values()):
            await asyncio.sleep(PAUSE_S)
            snapshot = take_pool(live, sessions[live.name], lookahead[live.name])
            yield pool_view(node, live, snapshot, self._picture_of(live), self._residency_of(live))

    def _picture_of(self, live: LivePool) -> "PlanPicture":
        """Made once a pool: a plan never changes, and may have hundreds of layers."""
        known = self._pictures.get(live.name)
        if known is None or known.opened_at_s != live.opened_at_s:
            self._pictures = {name: kept for name, kept in self._pictures.items() if name in self._node.pools}
            known = self._pictures[live.name] = PlanPicture.of(live)
        return known

    def _residency_of(self, live: LivePool) -> ResidencyHistograms:
        """Drains the pool's samples. It keeps a bounded number: a pool that nobody looks at loses the oldest."""
        self._residency = {name: kept for name, kept in self._residency.items() if name in self._node.pools}
        histograms = self._residency.setdefault(live.name, ResidencyHistograms())
        histograms.absorb(live.pool.take_residency_samples())
        return histograms.copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPicture:
    """What a view shows of a pool's plan."""

    opened_at_s: float  # tells a pool from a later one of the same name
    groups: tuple[GroupView, ...]
    placements: tuple[PlacementView, ...]

    @classmethod
    def of(cls, live: LivePool) -> "PlanPicture":
        ranks = live.plan.ranks if live.plan else ()
        placements = _placements(ranks[0]) if ranks else ()
        return cls(opened_at_s=live.opened_at_s, groups=_groups(live), placements=placements)


def pool_view(
    node: Node, live: LivePool, snapshot: PoolSnapshot, picture: PlanPicture, residency: ResidencyHistograms
) -> PoolView:
    """One pool."""
    return PoolView(
        snapshot=snapshot,
        plan_fingerprint=live.identity.plan_fingerprint,
        block_size_tokens=live.config.scheduler_block_tokens,
        num_ranks=live.num_ranks,
        age_s=node.now_s - live.opened_at_s,
        num_mappings=node.watch.num_mappings(live.name),
        num_event_watchers=len(live.events.watchers),
        num_events=live.events.last_number,
        num_event_losses=live.events.num_losses,
        groups=picture.groups,
        placements=picture.placements,
        quotas=dict(live.quotas),
        evicted_miss_tokens_by_age=tuple(snapshot.prefix.miss_evicted_by_age_tokens),
        residency=residency,
    )


async def session_views(node: Node) -> tuple[SessionView, ...]:
    """All sessions, open and dead-but-waiting, in order of opening; each as of its own moment."""
    found = []
    for session in node.sessions.sessions():
        found.append(_session_view(node, session))
        await asyncio.sleep(PAUSE_S)
    return tuple(found)


def _session_view(node: Node, session: Session) -> SessionView:
    use, now_s = node.session_use(session), node.now_s
    is_open = session.state.is_open
    return SessionView(
        short_id=session.short_id,
        pool=session.pool,
        client_name=session.request.client_name,
        tenant=session.request.tenant,
        state=session.state.value if is_open else "quarantined",
        epoch=session.epoch,
        age_s=now_s - session.opened_at_s,
        grace_left_s=node.sessions.grace_left_s(session, now_s),
        dead_for_s=0.0 if is_open else now_s - session.ended_at_s,
        num_sequences=use.num_sequences,
        num_held_blocks=use.num_held_blocks,
        last_step=session.steps.last_step,
        completed_step=session.steps.completed_step,
        quarantine_reason="" if is_open else node.sessions.quarantine_reason(session.session_id, now_s),
    )


async def backend_views(node: Node) -> tuple[BackendView, ...]:
    """Health of every memory backend. Pressure is not ill health."""
    found = []
    for name, backend in node.backends.items():
        health = backend.health()
        found.append(BackendView(name=name, ok=health.ok, detail=health.detail))
        await asyncio.sleep(PAUSE_S)
    return tuple(found)


async def device_views(node: Node) -> tuple[DeviceView, ...]:
    """Memory of every device that a backend holds something on, or that is not host memory."""
    found: list[DeviceView] = []
    for name, backend in node.backends.items():
        found += (_device_view(name, device) for device in backend.usage().devices)
        await asyncio.sleep(PAUSE_S)
    return tuple(found)


def _device_view(backend: str, device: DeviceUsage) -> DeviceView:
    return DeviceView(
        backend=backend,
        device=device.device_uuid,
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        held_bytes=device.held_bytes,
    )


def _groups(live: LivePool) -> tuple[GroupView, ...]:
    if live.plan is None or not live.plan.ranks:
        return tuple(
            GroupView(kind=g.kind.value, block_size_tokens=g.block_size_tokens, num_layers=0)
            for g in live.config.groups
        )
    return tuple(
        GroupView(
            kind=group.kind,
            block_size_tokens=group.block_size_tokens,
            num_layers=len(group.layer_names),
            first_layer=group.layer_names[0] if group.layer_names else "",
            last_layer=group.layer_names[-1] if group.layer_names else "",
        )
        for group in live.plan.ranks[0].groups
    )


def _placements(rank: RankPlan) -> tuple[PlacementView, ...]:
    """Where each layer's pages lie: inside one block where blocks are contiguous, else in the region."""
    group_of = {name: i for i, group in enumerate(rank.groups) for name in group.layer_names}
    found: list[PlacementView] = []
    for tensor in rank.tensors:
        in_block = tensor.block_stride_bytes >= tensor.layer_stride_bytes * len(tensor.layer_names)
        for index, name in enumerate(tensor.layer_names):
            found.append(
                PlacementView(
                    layer_name=name,
                    group=group_of.get(name, -1),
                    start_bytes=tensor.page_offset_bytes(index, 0),
                    size_bytes=tensor.page_size_bytes if in_block else tensor.block_stride_bytes * tensor.num_blocks,
                    axis_bytes=tensor.block_stride_bytes if in_block else rank.region_size_bytes,
                    is_in_block=in_block,
                )
            )
            if len(found) == MAX_SHOWN_LAYERS:
                return tuple(found)
    return tuple(found)
