"""One consistent picture of the daemon for people, taken on the event loop's thread, read anywhere.

    Node ──take_view──▶ NodeView ──▶ page.py (people)   extra_metrics.py (Prometheus)   as JSON (scripts)
                          └ snapshot: the numbers that metrics.py exports, so that page and scrape cannot differ

A view holds no reference to anything that changes, so a slow reader never sees half a step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvhold_server.metrics import PoolSnapshot, Snapshot
from kvhold_server.node.telemetry import Histogram
from kvhold_server.pool.residency import ResidencySample


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Layers that share a block table."""

    kind: str
    block_size_tokens: int
    num_layers: int
    first_layer: str = ""
    last_layer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementView:
    """Where one layer's bytes lie on rank 0.

    `is_in_block`: all layers of a block lie together, and the numbers are within block 0, `axis_bytes` long. Otherwise
    each layer has a stretch of its own, and the numbers are within the region.
    """

    layer_name: str
    group: int  # -1: shared by several groups
    start_bytes: int
    size_bytes: int
    axis_bytes: int
    is_in_block: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session without its secrets."""

    short_id: str
    pool: str
    client_name: str
    tenant: str
    state: str  # live, grace, quarantined
    epoch: int
    age_s: float
    grace_left_s: float = 0.0
    dead_for_s: float = 0.0  # quarantined: since when
    num_sequences: int = 0
    num_held_blocks: int = 0
    last_step: int = 0
    completed_step: int = 0
    quarantine_reason: str = ""


RESIDENCY_BOUNDS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 86400.0)


@dataclass(slots=True, kw_only=True)
class ResidencyHistograms:
    """Lives of a sample of blocks, in seconds."""

    idle_before_evict: Histogram = field(default_factory=lambda: Histogram(RESIDENCY_BOUNDS_S))
    reuse_gap: Histogram = field(default_factory=lambda: Histogram(RESIDENCY_BOUNDS_S))

    def absorb(self, samples: Iterable[ResidencySample]) -> None:
        """Adds what the pool gathered since it was asked last."""
        for sample in samples:
            self.idle_before_evict.observe(sample.idle_s)
            for gap_s in sample.reuse_gaps_s:
                self.reuse_gap.observe(gap_s)

    def copy(self) -> "ResidencyHistograms":
        """A snapshot that another thread may read."""
        return ResidencyHistograms(
            idle_before_evict=self.idle_before_evict.copy(),
            reuse_gap=self.reuse_gap.copy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """What a scrape does not tell about a pool, beside what it does."""

    snapshot: PoolSnapshot
    plan_fingerprint: str
    block_size_tokens: int  # of the scheduler: what hits are aligned to
    num_ranks: int
    age_s: float
    num_mappings: int
    num_event_watchers: int = 0
    num_events: int = 0
    num_event_losses: int = 0
    groups: tuple[GroupView, ...] = ()
    placements: tuple[PlacementView, ...] = ()
    quotas: Mapping[str, int] = field(default_factory=dict)
    evicted_miss_tokens_by_age: tuple[int, ...] = ()
    residency: ResidencyHistograms = field(default_factory=ResidencyHistograms)

    @property
    def name(self) -> str:
        return self.snapshot.name


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """Memory of one device, as one backend sees it."""

    backend: str
    device: str
    total_bytes: int
    free_bytes: int  # -1: nobody can say
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendView:
    """Whether a backend can be expected to work."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Everything at one moment."""

    snapshot: Snapshot
    pools: tuple[PoolView, ...]
    sessions: tuple[SessionView, ...]
    backends: tuple[BackendView, ...] = ()
    devices: tuple[DeviceView, ...] = ()
