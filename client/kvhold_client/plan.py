"""A plan as the client shows it: groups, tensors, capacities. Where bytes lie in a rank is `mapping.RankLayout`."""

from dataclasses import dataclass

from kvhold_client.explanation import GroupingChoice, PlanExplanation
from kvhold_client.layout import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """Layers that share one block table."""

    kind: str
    layer_names: tuple[str, ...]
    block_size_tokens: int
    page_size_bytes: int  # of one layer; of all layers together for uniform_type
    max_request_blocks: int
    max_request_bytes: int
    prefix_cacheable: bool
    is_eagle_group: bool
    host_resident: bool
    sliding_window_tokens: int = 0
    extra_retained_tokens: int = 0
    attention_chunk_size_tokens: int = 0
    member_kinds: tuple[str, ...] = ()  # of a uniform_type's layers, each once


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """One worker's share."""

    num_blocks: int
    bytes_per_block: int
    needed_bytes: int  # of one request of the longest length
    region_size_bytes: int
    host_region_size_bytes: int
    groups: tuple[PlannedGroup, ...]
    placements: tuple[Placement, ...]
    draft_layer_names: tuple[str, ...] = ()  # their blocks are those of the drafter's own pool

    @property
    def wasted_bytes_per_block(self) -> int:
        """Bytes of a block id that no layer of its group uses: padding, and layers that the group lacks.

        A block belongs to one group at a time; what the widest group needs is what every block costs. The waste is that
        of the narrowest group, i.e. the worst case.
        """
        return self.bytes_per_block - min((self.used_bytes(group) for group in self.groups), default=0)

    def used_bytes(self, group: PlannedGroup) -> int:
        """Bytes of a block that hold something while the group has it."""
        names = set(group.layer_names)
        return sum(p.used_page_bytes * len(names.intersection(p.layer_names)) for p in self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWarning:
    """What a person should know; `kind` is stable, `message` is not."""

    kind: str
    message: str
    args: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of a planner."""

    fingerprint: str
    strategy: str
    layout: str
    num_blocks: int  # null block included
    max_model_len_tokens: int
    capacity_tokens: int
    max_concurrency: float
    cache_block_size_tokens: int
    scheduler_block_size_tokens: int
    hash_block_size_tokens: int
    max_in_flight_tokens: int
    min_request_blocks: int
    groups: tuple[PlannedGroup, ...]  # the scheduler's view: those of rank 0
    ranks: tuple[PlannedRank, ...]
    warnings: tuple[PlanWarning, ...]
    choice: GroupingChoice | None = None  # of the compact strategy
    explanation: PlanExplanation | None = None  # where the request asked for it
