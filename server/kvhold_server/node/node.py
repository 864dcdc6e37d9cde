"""The node: pools, sessions and memory under one owner; one method per rpc; synchronous.

    rpc service ──▶ Node ──┬─▶ SessionTable      who may act
                           ├─▶ LivePool.pool     what happens to blocks
                           └─▶ MemoryBackend     only reads here; slow calls are made by the shell between two phases

The event loop's thread owns it. Time is injected as a clock, secrets as a generator, so that tests decide both.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvhold_server.domain.ids import PoolName, SessionId
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.memory.backend import MemoryBackend, Region
from kvhold_server.node.checks import check_devices, check_name, regions_to_export
from kvhold_server.node.errors import (
    BackendUnknown,
    Draining,
    GenerationConflict,
    PlanRequired,
    PoolBusy,
    PoolInUse,
    PoolNotFound,
    TooManyPools,
    TooManyPoolSessions,
)
from kvhold_server.node.identity import ContentIdentity
from kvhold_server.node.live_pool import LivePool, RecoveryReport
from kvhold_server.node.making import put_together
from kvhold_server.node.node_values import Closed, DrainState, Export, ResetReport, Shell
from kvhold_server.node.opening import (
    OpenedPool,
    Opening,
    OpenPoolCommand,
    check_expected,
    mismatch_of,
    region_requests,
)
from kvhold_server.node.pool_config_builder import build_pool_config
from kvhold_server.node.quotas import held_by_tenant, quota_of
from kvhold_server.node.reaping import Reaper
from kvhold_server.node.recovering import Recovering, no_sequences
from kvhold_server.node.step_values import StepAnswer, StepCommand
from kvhold_server.node.steps import apply_step
from kvhold_server.node.telemetry import Telemetry
from kvhold_server.node.upkeep import change_quota, evict, forget_hashes, new_generation
from kvhold_server.node.warm_restart import MadePool, WarmRestart
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.restore import HeldSequence
from kvhold_server.pool.values import Cleared, SessionUse
from kvhold_server.sessions.errors import BootIdMismatch
from kvhold_server.sessions.lease import LeaseTerms
from kvhold_server.sessions.session import NO_SLOT, Credentials, EndCause, OpenRequest, Session, StreamId
from kvhold_server.sessions.session_table import Opened, SessionLimits, SessionTable
from kvhold_server.sessions.worker_watch import WatchId, WorkerWatch

MAX_BLOCKS_AT_ONCE = 5000  # a session that closes with more gives them back in slices


class Node:
    """See the module."""

    def __init__(
        self,
        *,
        shell: Shell,
        backends: Mapping[str, MemoryBackend],
        default_backend: str,
        terms: LeaseTerms,
        limits: ServiceLimits,
        warm: WarmRestart | None = None,
    ) -> None:
        """`warm`: what outlives the daemon is kept there; None: nothing does."""
        self.boot_id = shell.boot_id
        self.limits = limits
        self.backends = backends
        self.default_backend = default_backend
        self.telemetry = Telemetry()
        self.pools: dict[PoolName, LivePool] = {}
        self.drain = DrainState()
        self.watch = WorkerWatch()
        self.sessions = SessionTable(
            boot_id=shell.boot_id,
            terms=terms,
            limits=SessionLimits(max_sessions=limits.max_sessions, max_sessions_per_tenant=limits.max_sessions),
            watch=self.watch,
            on_change=warm.session_changed if warm is not None else None,
            on_gone=warm.session_gone if warm is not None else None,
        )
        self.warm = warm
        self.recovering = Recovering(self.sessions, warm)
        self._shell = shell
        self._busy: dict[PoolName, str] = {}  # pools that are being opened or deleted → which of the two
        self._reaper = Reaper(self.sessions, self.pools)
        self._last_event_number = 0  # where new pools go on, so that no cursor of a deleted one is taken for theirs

    @property
    def now_s(self) -> float:
        """The node's clock."""
        return self._shell.clock()

    # ------------------------------------------------------------------- pools
    def begin_open_pool(self, command: OpenPoolCommand) -> OpenedPool | Opening:
        """Attaches, or takes the name and says which memory the pool needs; `finish_open_pool` or `abort_open_pool`
        must follow. Raises the mismatches, PlanRequired, PoolBusy, TooManyPools, Draining, InvalidField.
        """
        check_name(command.name)
        self._check_busy(command.name)
        live = self.pools.get(command.name)
        mismatch = mismatch_of(live, command) if live is not None else None
        if live is not None:
            if mismatch is None:
                return self._attached(live)
            if not self._may_replace(live, command):
                raise mismatch
        self.check_admitting()
        if command.only_attaches:
            raise PlanRequired(command.name)
        check_expected(command, command.identity.plan_fingerprint)
        if live is None and len(self.pools) + len(self._busy) >= self.limits.max_pools:
            raise TooManyPools(len(self.pools) + len(self._busy), self.limits.max_pools)
        if command.options.backend not in self.backends:
            raise BackendUnknown(command.options.backend, ", ".join(self.backends))
        check_devices(command)
        num_devices = max(1, len(self.backends[command.options.backend].usage().devices))
        requests = region_requests(command, num_devices)
        config = build_pool_config(command.plan, command.options, command.content)
        self._busy[command.name] = "being opened"
        opening = Opening(command=command, config=config, requests=requests, begun_at_s=self.now_s)
        if live is None or mismatch is None:
            return opening
        self._retire(live)
        return replace(opening, replaces=live, fresh_reason=mismatch.reason(), fresh_detail=str(mismatch))

    def make_pool(self, opening: Opening, regions: tuple[Region, ...]) -> MadePool:
        """The pool's blocks, and the files that outlive the daemon. Slow, and safe in a thread."""
        if self.warm is None:
            report = RecoveryReport(outcome="fresh", reason=opening.fresh_reason, detail=opening.fresh_detail)
            return MadePool(pool=Pool(opening.config), journal=None, recovery=report)
        return self.warm.make(opening, self.backends[opening.command.options.backend], regions)

    def finish_open_pool(self, opening: Opening, regions: tuple[Region, ...], made: MadePool) -> OpenedPool:
        """Publishes the pool with its memory. Does not fail once `begin_open_pool` accepted."""
        del self._busy[opening.command.name]
        live = put_together(opening, regions, made, self.now_s, self.limits.max_event_buffer)
        live.events.last_number = self._last_event_number
        self.pools[live.name] = live
        return OpenedPool(live=live, recovery=live.recovery)

    def abort_open_pool(self, opening: Opening) -> None:
        """The memory could not be had: the name is free again."""
        del self._busy[opening.command.name]

    def pool(self, name: str) -> LivePool:
        """Raises PoolNotFound."""
        live = self.pools.get(PoolName(name))
        if live is None:
            raise PoolNotFound(name)
        return live

    def begin_delete_pool(self, name: str, *, force: bool) -> LivePool | None:
        """Takes the pool out of service; its regions are the caller's to release, then `finish_delete_pool`. None if it
        is gone already. Raises PoolInUse, PoolBusy."""
        self._check_busy(PoolName(name))
        live = self.pools.get(PoolName(name))
        if live is None:
            return None
        num_sessions, num_mappings = self.sessions.num_open(live.name), self.watch.num_mappings(live.name)
        if (num_sessions or num_mappings) and not force:
            raise PoolInUse(name, num_sessions, num_mappings)
        for session in self.sessions.sessions(live.name):
            self.sessions.kill(session.session_id, self.now_s)
        self.watch.drop_pool(live.name)
        self._retire(live)
        self._busy[live.name] = "being deleted"
        return live

    def finish_delete_pool(self, live: LivePool) -> None:
        """Its memory is given back."""
        del self._busy[live.name]

    def update_content(
        self,
        name: str,
        expected_generation: int,
        content: ContentIdentity,
        *,
        even_if_shared: bool,
        message: bytes = b"",
    ) -> tuple[int, int]:
        """Returns (new generation, blocks fenced). Raises GenerationConflict, PoolInUse."""
        live = self.pool(name)
        if expected_generation != live.content_generation:
            raise GenerationConflict(name, live.content_generation, expected_generation)
        others = self.sessions.num_open(live.name)
        if others > 1 and not even_if_shared:
            raise PoolInUse(name, others, self.watch.num_mappings(live.name))
        self.recovering.contents_change(live)
        if self.warm is not None and live.journal is not None:
            self.warm.save_content(live.name, live.journal, content, message, expected_generation + 1)
        return new_generation(live, content)

    # ------------------------------------------------------------------ memory
    def export(self, name: str, rank: int, *, expected_size_bytes: int, num_warmup_blocks: int) -> Export:
        """How to map a rank. Changes nothing; mappings are reported by `worker_mapped`."""
        live = self.pool(name)
        checked = regions_to_export(
            live, rank, expected_size_bytes=expected_size_bytes, num_warmup_blocks=num_warmup_blocks
        )
        backend = live.identity.options.backend
        live.totals.num_exports += 1
        regions = tuple((region, self.backends[backend].export(region)) for region in checked)
        return Export(backend=backend, regions=regions)

    def worker_mapped(self, pool: PoolName, rank: int, session_id: str, pid: int, *, is_watched: bool) -> WatchId:
        """A process has a rank's memory mapped (or its name, when nobody can watch it)."""
        watch = self.watch.add(
            pool=pool,
            rank=rank,
            session_id=SessionId(session_id) if session_id else None,
            pid=pid,
            is_watched=is_watched,
            now_s=self.now_s,
        )
        if self.warm is not None:
            self.warm.worker_mapped(watch, self.watch)
        return watch.id

    def worker_gone(self, watch_id: WatchId, *, process_ended: bool = False) -> None:
        """Its mapping is gone for certain, perhaps because its process is."""
        watch = self.watch.get(watch_id)
        self.watch.gone(watch_id)
        if process_ended and watch is not None and watch.session_id is not None:
            self.client_died(watch.session_id, watch.pid)
        if self.warm is not None:
            self.warm.worker_gone(watch_id)

    # ---------------------------------------------------------------- sessions
    def client_died(self, session_id: str, pid: int) -> None:
        """A process is proven gone; if it was the session's client, the session ends at once."""
        session = self.sessions.client_died(session_id, pid, self.now_s)
        if session is not None:
            self._ended(session)

    def open_session(
        self, request: OpenRequest, resume_token: str, held: Callable[[LivePool], list[HeldSequence]] = no_sequences
    ) -> Opened:
        """Opens or resumes; `held` matters only to a session of before a restart.

        Raises PoolNotFound, ResumeRefused, TooManySessions, Draining, InvalidField."""
        live = self.pool(request.pool)
        credentials = Credentials(session_id=SessionId(self._shell.new_secret()), resume_token=self._shell.new_secret())
        if resume_token:
            opened = self.sessions.resume(live.name, resume_token, credentials, self.now_s)
            if opened.must_reassert:
                return replace(opened, lost_sequence_ids=self.recovering.take_up(live, opened.session, held(live)))
            live.resume_slot(opened.session.slot)
            return opened
        self.check_admitting()
        if (num_sessions := self.sessions.num_open(live.name)) >= self.limits.max_sessions_per_pool:
            raise TooManyPoolSessions(live.name, num_sessions, self.limits.max_sessions_per_pool)
        opened = self.sessions.open(request, credentials, self.now_s)
        if opened.is_new:
            opened.session.slot = live.open_slot()
            live.members.add(opened.session.session_id)
        return opened

    def fenced(self, session_id: str, epoch: int, boot_id: str = "") -> Session:
        """The caller's session, if it still is. Raises UnknownSession, SessionFenced, BootIdMismatch."""
        if boot_id and boot_id != self.boot_id:
            raise BootIdMismatch(self.boot_id)
        return self.sessions.require(session_id, epoch)

    def close_session(self, session_id: str, epoch: int, completed_step: int) -> Closed:
        """Ends a session in order; closing one that is gone succeeds. Raises SessionFenced, StepOutOfOrder."""
        session = self.sessions.close(session_id, epoch, completed_step, self.now_s)
        if session is None:
            return Closed()
        return self._ended(session)

    def attach_stream(self, session_id: str, epoch: int) -> StreamId:
        """A KeepAlive stream is up."""
        return self.sessions.attach_stream(session_id, epoch, self.now_s)

    def keep_alive(self, session_id: str, epoch: int, stream: StreamId) -> Session:
        """A message arrived on it. Raises UnknownSession, SessionFenced."""
        return self.sessions.keepalive(session_id, epoch, stream, self.now_s)

    def stream_broken(self, session_id: str, stream: StreamId) -> None:
        """It ended, however."""
        self.sessions.stream_broken(session_id, stream, self.now_s)

    def tick(self) -> bool:
        """Looks at leases and cleans up after the dead, a slice at a time. True: call again soon, there is more."""
        for session in self.sessions.expire(self.now_s):
            self._ended(session)
        self.recovering.settle(self.now_s)
        for live in self.pools.values():
            if live.journal is not None:
                live.journal.keep_order()
        return self._reaper.work(self.now_s)

    def session_use(self, session: Session) -> SessionUse:
        """What it holds. O(its blocks)."""
        live = self.pools.get(session.pool)
        if live is None or session.session_id not in live.members or session.slot == NO_SLOT:
            return SessionUse()
        return live.pool.use_of(session.slot)

    # ------------------------------------------------------------------ blocks
    def step(self, session: Session, command: StepCommand) -> StepAnswer:
        """Applies one step of a fenced session. Raises StepOutOfOrder, TooManyOpenSteps, PoolRecovering."""
        if self.recovering.pools:
            self.recovering.check(session, command, self.now_s)
        live = self.pools[session.pool]
        quota_left = quota_of(live, self.sessions, session.request.tenant) if live.quotas else None
        return apply_step(live, session, command, self.now_s, quota_left)

    def reset_cache(self, name: str, *, force: bool) -> ResetReport:
        """Forgets every cached prefix. Raises BlocksInUse unless forced."""
        live = self.pool(name)
        if force:
            self.recovering.contents_change(live)
        num_hashed, slots = forget_hashes(live, self.sessions.sessions(live.name), force=force, reason="RESET")
        kept = [session for session in self.sessions.sessions(live.name) if session.slot in slots]
        return ResetReport(num_reset_blocks=num_hashed, holders=tuple(kept))

    def evict_blocks(self, name: str, block_ids: list[int]) -> int:
        """Drops the hashes of blocks, held or not. Returns how many had one."""
        return evict(self.pool(name), block_ids)

    def set_quota(self, name: str, tenant: str, max_held_blocks: int) -> int:
        """Bounds a tenant; 0: no longer. Returns what it holds now. Raises TooManyTenants, ShmTooSmall, ..."""
        live = self.pool(name)
        change_quota(live, tenant, max_held_blocks, self.limits.max_tenants, self.warm)
        return held_by_tenant(live, self.sessions, tenant)

    # ------------------------------------------------------------------- drain
    def begin_drain(self, deadline_s: float) -> None:
        """No new sessions or pools from now on."""
        self.drain.is_draining = True
        self.drain.deadline_at_s = min(self.drain.deadline_at_s, self.now_s + deadline_s)

    @property
    def drain_left_s(self) -> float:
        """Time left to running sessions."""
        return max(0.0, self.drain.deadline_at_s - self.now_s)

    # ----------------------------------------------------------------- private
    def _attached(self, live: LivePool) -> OpenedPool:
        """The first who opens a pool after a restart learns what was kept."""
        recovery = None if live.is_claimed else live.recovery
        live.is_claimed = True
        return OpenedPool(live=live, recovery=recovery)

    def _may_replace(self, live: LivePool, command: OpenPoolCommand) -> bool:
        """A recovered pool that nobody uses gives way to what is wanted now."""
        may_resume = any(session.token_digest for session in self.sessions.sessions(live.name))
        is_used = live.is_claimed or may_resume or self.watch.num_mappings(live.name)
        return not is_used and not command.only_attaches

    def _retire(self, live: LivePool) -> None:
        """Out of service, here and for a successor; its regions are still held."""
        live.is_deleted = True
        del self.pools[live.name]
        live.events.absorb(None, [Cleared()], "POOL_DELETED")
        self._last_event_number = max(self._last_event_number, live.events.last_number + 1)
        if live.journal is not None:
            live.journal.end(is_clean=False)
            live.journal = None
        if self.warm is not None:
            self.warm.forget_pool(live.name)

    def _ended(self, session: Session) -> Closed:
        live = self.pools[session.pool]
        cause = session.end_cause or EndCause.KILLED
        live.totals.sessions_ended[cause.value] += 1
        use = live.pool.use_of(session.slot) if cause is EndCause.CLOSED else SessionUse()
        done = session.steps.completed_step
        completed = live.pool.complete(session.slot, done) if done else None
        live.annotations.drop_session(session.slot)
        if cause is EndCause.CLOSED and use.num_held_blocks <= MAX_BLOCKS_AT_ONCE:
            live.pool.close_session(session.slot)
            session.slot = NO_SLOT
        else:
            live.pool.kill_session(session.slot)
            live.totals.num_reaped_sessions += cause is not EndCause.CLOSED
        live.note(completed, live.pool.take_events())
        self._reaper.began(session)
        return Closed(num_sequences=use.num_sequences, num_blocks=use.num_held_blocks)

    def _check_busy(self, name: PoolName) -> None:
        if name in self._busy:
            raise PoolBusy(name, self._busy[name])

    def check_admitting(self) -> None:
        """Raises Draining: nothing new begins any more."""
        if self.drain.is_draining:
            raise Draining(self.drain.retry_after_s)
