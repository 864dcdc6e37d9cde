"""An open pool: its plan, memory and blocks, and what the daemon counts about it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from kvhold_server.domain.ids import PoolName, SessionId
from kvhold_server.domain.plan import Plan
from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.memory.backend import Region
from kvhold_server.node.annotations import Annotations
from kvhold_server.node.event_log import EventLog
from kvhold_server.node.identity import PoolIdentity
from kvhold_server.node.journal import BlockJournal
from kvhold_server.node.telemetry import Histogram
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.values import Completed, Event, Removed
from kvhold_server.sessions.session import EndCause

ALLOCATION_RESULTS = (
    "ok", "out_of_blocks", "not_tried", "no_budget", "hit_conflict", "state_not_ready", "never_fits", "quota", "error"
)  # fmt: skip


STEP_ITEMS_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096)


@dataclass(slots=True, kw_only=True)
class PoolTotals:
    """Counters since the daemon opened the pool; every one exists at zero."""

    allocations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ALLOCATION_RESULTS, 0))
    num_allocated_blocks: int = 0
    num_freed_blocks: int = 0
    num_published_blocks: int = 0
    num_evicted_blocks: int = 0
    num_steps: int = 0
    step_items: Histogram = field(default_factory=lambda: Histogram(STEP_ITEMS_BOUNDS))  # freed, extended, admitted
    num_replayed_steps: int = 0
    num_exports: int = 0
    num_reaped_sessions: int = 0
    sessions_ended: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys([cause.value for cause in EndCause], 0)
    )

    def copy(self) -> "PoolTotals":
        """A snapshot that another thread may read."""
        return replace(
            self,
            allocations=dict(self.allocations),
            sessions_ended=dict(self.sessions_ended),
            step_items=self.step_items.copy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What a pool began with, and why not with more."""

    outcome: str  # "recovered" or "fresh"
    num_kept_blocks: int = 0
    num_dropped_torn_blocks: int = 0
    num_dropped_provisional_blocks: int = 0  # allotted to a client; others that were incomplete have no record
    num_dropped_generation_blocks: int = 0
    num_dropped_checksum_blocks: int = 0
    reason: str = ""
    detail: str = ""
    duration_s: float = 0.0

    @property
    def num_dropped_blocks(self) -> int:
        """For all reasons."""
        return (
            self.num_dropped_torn_blocks
            + self.num_dropped_provisional_blocks
            + self.num_dropped_generation_blocks
            + self.num_dropped_checksum_blocks
        )


@dataclass(slots=True, kw_only=True)
class LivePool:
    """Mutable; only the node changes it."""

    name: PoolName
    plan: Plan | None  # None: groups were given by hand, for simulation
    identity: PoolIdentity
    config: PoolConfig
    pool: Pool
    regions: tuple[Region, ...]
    opened_at_s: float
    recovery: RecoveryReport
    content_generation: int = 1
    is_deleted: bool = False
    is_claimed: bool = True  # False: recovered after a restart, and nobody has opened it since
    journal: BlockJournal | None = None  # None: its memory does not outlive the daemon
    members: set[SessionId] = field(default_factory=set)  # sessions of this pool, dead ones that still wait included
    events: EventLog
    annotations: Annotations
    totals: PoolTotals = field(default_factory=PoolTotals)
    quotas: dict[str, int] = field(default_factory=dict)  # tenant → blocks
    preempted: dict[tuple[int, int], None] = field(default_factory=dict)  # (slot, sequence), oldest first

    def note(self, completed: Completed | None, events: Collection[Event], clear_reason: str = "RESET") -> None:
        """Tells everybody who follows the pool's index what one call of the pool did to it."""
        self.totals.num_published_blocks = self.pool.store.prefixes.num_published
        self._ask_for(stored=self.events.is_following, completed=self.events.is_following or self.journal is not None)
        for event in events:
            if isinstance(event, Removed):
                self.totals.num_evicted_blocks += len(event.hashes)
        self.events.absorb(completed, events, clear_reason)
        if self.journal is not None:
            self.journal.absorb(completed, events)

    def open_slot(self) -> int:
        """A new session in the pool. What another one was allotted loses its hashes."""
        slot = self.pool.open_session()
        self.note(None, self.pool.take_events())
        return slot

    def resume_slot(self, slot: int) -> None:
        """A session's client came back: what it was allotted loses its hashes."""
        self.pool.resume_session(slot)
        self.note(None, self.pool.take_events())

    def verify(self, hashes: Iterable[bytes], overwritten: Iterable[int]) -> None:
        """Before recovered blocks are hit for the first time: those whose bytes have changed count as dropped, unless
        their session has just said that it overwrote them."""
        assert self.journal is not None
        for block in overwritten:
            self.journal.unverified.pop(block, None)
        num_before = self.journal.num_failed_checksums
        self.journal.verify(hashes)
        num = self.journal.num_failed_checksums - num_before
        if num:
            found = self.recovery
            self.recovery = replace(
                found,
                num_kept_blocks=found.num_kept_blocks - num,
                num_dropped_checksum_blocks=found.num_dropped_checksum_blocks + num,
            )

    def follow(self) -> None:
        """From now on the pool's events are told to watchers, beginning with what is visible now."""
        self.events.follow(self.pool.published())
        self._ask_for(stored=True, completed=True)

    def _ask_for(self, *, stored: bool, completed: bool) -> None:
        """What of its doings the pool lists block by block: only what somebody reads."""
        self.pool.store.prefixes.tells_stored = stored
        self.pool.tenures.tells_completed = completed and self.config.report_completed

    @property
    def num_ranks(self) -> int:
        return len(self.plan.ranks) if self.plan else 0

    @property
    def size_bytes(self) -> int:
        return sum(region.size_bytes for region in self.regions)
