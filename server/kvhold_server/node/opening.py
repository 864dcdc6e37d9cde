"""Opening a pool in two phases, so that slow memory work never holds up a step.

begin ──▶ Attached                                 somebody has it open, and everything agrees
     └──▶ Opening(requests) ── memory, in a thread ──┬─▶ finish(regions) ──▶ the pool is there
          (the name is taken: PoolBusy)              └─▶ abort() ──▶ as if nothing had been asked
"""

from dataclasses import dataclass, field

from kvhold_server.domain.errors import PreconditionFailed
from kvhold_server.domain.ids import PoolName
from kvhold_server.domain.plan import Plan
from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.node.errors import ByteFormatMismatch, ContentMismatch, PlanMismatch
from kvhold_server.node.identity import ByteFormat, ContentIdentity, PoolIdentity, PoolOptions, first_difference
from kvhold_server.node.live_pool import LivePool, RecoveryReport


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPoolCommand:
    """Who wants which pool, made of what. Without a plan (and without groups given by hand) it only attaches."""

    name: PoolName
    plan: Plan | None
    byte_format: ByteFormat = field(default_factory=ByteFormat)
    content: ContentIdentity = field(default_factory=ContentIdentity)
    options: PoolOptions
    expected_plan_fingerprint: str = ""
    memory_wait_s: float = 0.0
    message: bytes = b""  # the request itself, opaque here: a restarted daemon opens the pool again from it

    @property
    def only_attaches(self) -> bool:
        return self.plan is None and not self.options.overrides.groups

    @property
    def identity(self) -> PoolIdentity:
        return PoolIdentity(
            plan_fingerprint=self.plan.fingerprint if self.plan else "",
            byte_format=self.byte_format,
            content=self.content,
            options=self.options,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A pool that is being made."""

    command: OpenPoolCommand
    config: PoolConfig
    requests: tuple[RegionRequest, ...]
    begun_at_s: float
    replaces: LivePool | None = None  # a recovered pool that nobody claimed, and that is not what is asked for now
    fresh_reason: str = "NEW_POOL"
    fresh_detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPool:
    """The answer: a pool, and how it came to be. `recovery` is None for those that attach."""

    live: LivePool
    recovery: RecoveryReport | None


def region_requests(command: OpenPoolCommand, num_devices: int) -> tuple[RegionRequest, ...]:
    """The memory that a plan needs: each rank's region, and its host-resident part. Ranks without layers need none."""
    if command.plan is None:
        return ()
    devices = command.options.rank_device_indexes
    found = []
    for rank, plan in enumerate(command.plan.ranks):
        device = devices[rank] if devices else rank % num_devices
        if plan.region_size_bytes:
            found.append(
                RegionRequest(pool=command.name, rank=rank, device_index=device, size_bytes=plan.region_size_bytes)
            )
        if plan.host_region_size_bytes and (rank == 0 or not plan.shared_host_pool):
            size = plan.host_region_size_bytes
            found.append(RegionRequest(pool=command.name, rank=rank, device_index=device, size_bytes=size, host=True))
    return tuple(found)


def mismatch_of(live: LivePool, command: OpenPoolCommand) -> PreconditionFailed | None:
    """Why the command cannot attach to this pool, naming the first difference; None if it can."""
    try:
        check_expected(command, live.identity.plan_fingerprint)
        check_same(live, command)
    except PreconditionFailed as mismatch:
        return mismatch
    return None


def check_same(live: LivePool, command: OpenPoolCommand) -> None:
    """Raises PlanMismatch, ByteFormatMismatch or ContentMismatch, naming the first difference."""
    held, asked = live.identity, command.identity
    if not command.only_attaches:
        if held.plan_fingerprint != asked.plan_fingerprint:
            difference = first_difference(live.plan, command.plan, "plan") or "plan.fingerprint"
            raise PlanMismatch(live.name, difference, held.plan_fingerprint, asked.plan_fingerprint)
        difference = first_difference(held.options, asked.options, "options")
        if difference:
            raise PlanMismatch(live.name, difference, held.plan_fingerprint, asked.plan_fingerprint)
    difference = first_difference(held.byte_format, asked.byte_format, "byte_format")
    if difference:
        raise ByteFormatMismatch(live.name, difference)
    difference = first_difference(held.content, asked.content, "content")
    if difference:
        raise ContentMismatch(live.name, difference)


def check_expected(command: OpenPoolCommand, fingerprint: str) -> None:
    """The caller planned by itself and expects the same. Raises PlanMismatch."""
    expected = command.expected_plan_fingerprint
    if expected and expected != fingerprint:
        difference = f"expected_plan_fingerprint: {fingerprint} planned here, {expected} expected"
        raise PlanMismatch(command.name, difference, fingerprint, expected)
