"""What a plan says about itself: where bytes go, what can be admitted, what other memory would change, what else was
possible. Values only; `explanation_codec` makes them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingOption:
    """One way to group and lay out a model, and what it gives."""

    description: str
    layout: str
    num_groups: int
    grid_tokens: int  # all groups' blocks end together at its multiples
    request_bytes: int  # of one longest request
    max_model_len_tokens: int
    capacity_tokens: int
    max_concurrency: float
    verdict: str  # why it was chosen, or why not


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingChoice:
    """What the compact strategy decided between."""

    chosen: GroupingOption
    runners_up: tuple[GroupingOption, ...]
    num_considered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindShare:
    """What the layers of one kind take on one rank."""

    kind: str
    num_layers: int
    block_bytes: int  # that hold something in one block of each
    request_bytes: int  # that hold something while a longest request runs
    host_resident: bool
    in_draft_pool: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Bytes that hold nothing; `cause` is page_padding, narrow_group, block_alignment, null_block, remainder or
    other_limit.
    """

    cause: str
    size_bytes: int
    percent: float
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExplanation:
    """Where the bytes of some equal ranks go."""

    ranks: tuple[int, ...]
    kinds: tuple[KindShare, ...]
    request_bytes: int
    request_waste: tuple[Waste, ...]
    memory_waste: tuple[Waste, ...]
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeasibilityCheck:
    """One thing that a scheduler will ask for: does it ever fit?"""

    description: str
    pool: str  # device, draft or host
    needed_blocks: int
    usable_blocks: int
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStep:
    """The same groups with other memory on every rank."""

    delta_bytes: int
    num_blocks: int  # 0: it does not fit
    capacity_tokens: int
    max_concurrency: float
    max_model_len_tokens: int
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExplanation:
    """Everything that a request with `explain` is answered beside the plan."""

    ranks: tuple[RankExplanation, ...]
    checks: tuple[FeasibilityCheck, ...]
    longest_request_tokens: int | None  # None: no length is too long, or none fits
    memory_steps: tuple[MemoryStep, ...]

    @property
    def feasible(self) -> bool:
        """No request that was asked for waits for ever."""
        return all(check.ok for check in self.checks)
