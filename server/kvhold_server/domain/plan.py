"""What a plan is: groups of layers that share one block table, and where each layer's pages lie in memory.

Address of layer `l` (its index in `layer_names`), block `b` of a placement, in bytes from the start of the rank's
region (the device's, or the host's where `host_resident`):

    offset_bytes + l * layer_stride_bytes + b * block_stride_bytes

and inside the page, head `h`, state `n`:   + h * head_stride_bytes + n * state_stride_bytes

Groups alias: each group's tensors start again at byte 0, because block `b` belongs to one group at a time.
A placement whose layers share the same bytes (the legacy strategy's `shared_by`) has layer_stride_bytes 0.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import LayerSpec
from kvhold_server.domain.layouts import Layout


class Strategy(enum.Enum):
    """Which planner made a plan."""

    MODERN = "modern"
    LEGACY = "legacy"
    COMPACT = "compact"


class GroupRole(enum.Enum):
    """What a group is for, beyond holding layers."""

    DEFAULT = "default"
    HISPARSE_SOURCE = "hisparse_source"  # full rows, kept in host memory
    HISPARSE_INDEXER = "hisparse_indexer"  # decides which rows are fetched to the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share one block table, as one rank (or the scheduler) sees them."""

    layer_names: tuple[LayerName, ...]  # this rank's, in order; may be empty on a pipeline stage
    spec: LayerSpec  # of every layer; kind "uniform_type" where each member keeps its own
    max_request_blocks: int  # most blocks that one request of the plan's length holds
    is_eagle_group: bool = False  # holds a drafter's layers: hits lose their last block
    host_resident: bool = False
    enable_kv_transfer: bool = True
    role: GroupRole = GroupRole.DEFAULT
    uses_draft_pool: bool = False  # its blocks are those of the drafter's own pool, with ids of their own

    @property
    def kind(self) -> str:
        """Name of the layer kind, or "uniform_type"."""
        return self.spec.kind

    @property
    def block_size_tokens(self) -> int:
        """Tokens of one block."""
        return self.spec.block_size_tokens

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: in one layer, or, for uniform_type, in all layers together."""
        return self.spec.page_size_bytes

    @property
    def max_request_bytes(self) -> int:
        """Bytes of `max_request_blocks` pages."""
        return self.max_request_blocks * self.page_size_bytes

    @property
    def prefix_cacheable(self) -> bool:
        """Do its blocks take part in prefix hits?"""
        return self.spec.prefix_cacheable


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlacement:
    """One strided tensor [layer, block, head, state, content bytes] over a rank's region."""

    layer_names: tuple[LayerName, ...]
    size_bytes: int  # of the region the formula runs in (modern) or of this tensor alone (legacy)
    offset_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int
    page_size_bytes: int  # of one layer, padding included
    num_blocks: int  # ids 0..num_blocks-1 have a page here
    num_heads: int = 1
    head_stride_bytes: int = 0
    num_states: int = 1
    state_stride_bytes: int = 0
    content_size_bytes: int = 0  # innermost axis, contiguous; 0: the page is opaque
    host_resident: bool = False  # lies in the host region, not in the device's

    def page_offset_bytes(self, layer_index: int, block_id: int) -> int:
        """Where the page of one layer and block begins, in bytes from the start of the region."""
        return self.offset_bytes + layer_index * self.layer_stride_bytes + block_id * self.block_stride_bytes

    @property
    def end_bytes(self) -> int:
        """First byte of the region behind everything that this placement reaches."""
        if not self.layer_names or not self.num_blocks:
            return self.offset_bytes
        last = self.page_offset_bytes(len(self.layer_names) - 1, self.num_blocks - 1)
        if not self.content_size_bytes:
            return last + self.page_size_bytes
        inner = (self.num_heads - 1) * self.head_stride_bytes + (self.num_states - 1) * self.state_stride_bytes
        return last + inner + self.content_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's share: which of the groups' layers it has and where their pages lie."""

    num_blocks: int  # null block included; the same on all ranks
    bytes_per_block: int  # of all groups' layers together: what one block id costs here
    needed_bytes: int  # by one request of the plan's length, without the null block
    groups: tuple[Group, ...]  # as many as on every rank, in the same order
    tensors: tuple[TensorPlacement, ...]  # host tensors first
    region_size_bytes: int  # device memory to reserve
    needs_zeroing: bool  # a block must be zeroed before it is used again
    draft_num_blocks: int | None = None  # the drafter's own pool (its own ids, its own null block)
    draft_layer_names: tuple[LayerName, ...] = ()
    host_num_blocks: int | None = None
    host_block_stride_bytes: int | None = None
    host_region_size_bytes: int = 0
    shared_host_pool: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer of a requested spec costs by itself, before any grouping."""

    kind: str
    page_size_bytes: int
    unpadded_page_size_bytes: int
    max_request_blocks: int
    table_row_blocks: int
    num_states: int
    prefix_cacheable: bool

    @property
    def max_request_bytes(self) -> int:
        """Bytes that a request of the asked length holds in one such layer."""
        return self.max_request_blocks * self.page_size_bytes


class WarningType(enum.Enum):
    """What a planner may say beside a plan. Values are stable."""

    HYBRID_DISABLED = "hybrid_disabled"  # local layers were promoted to full ones
    PADDING_LAYERS = "padding_layers"  # groups are filled up with dummy layers
    PAGES_NOT_UNIFIABLE = "pages_not_unifiable"  # everything is allocated as full attention
    NO_EAGLE_GROUP = "no_eagle_group"  # speculation with recurrent states, and no drafter group was found
    HISPARSE_BUFFER_ROWS_UNUSED = "hisparse_buffer_rows_unused"
    OVERRIDE_EXCEEDS_MEMORY = "override_exceeds_memory"  # more blocks were asked for than the memory given holds
    MAX_NUM_SEQS_UNREACHABLE = "max_num_seqs_unreachable"  # fewer minimal requests fit than may be scheduled
    LENGTH_REDUCED = "length_reduced"  # auto-fit chose a smaller length than asked
    GLM_LAYOUT_NOT_USED = "glm_layout_not_used"  # a rank does not have the shape that the aliasing layout needs


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWarning:
    """Something a person should know about a plan that is nevertheless right."""

    type: WarningType
    message: str
    args: tuple[tuple[str, str], ...] = ()  # name, value


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingOption:
    """One way to group and lay out a model, and what it gives."""

    description: str
    layout: Layout
    num_groups: int
    grid_tokens: int  # all groups' blocks end together at its multiples
    request_bytes: int  # of one longest request on the rank with the largest block
    max_model_len_tokens: int
    capacity_tokens: int
    max_concurrency: float
    verdict: str  # why it was chosen, or why not


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingChoice:
    """What the compact strategy decided between."""

    chosen: GroupingOption
    runners_up: tuple[GroupingOption, ...]  # best first
    num_considered: int  # options compared, most of them by formula only


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of a planner. Ranks with the same layers and memory share one RankPlan object."""

    strategy: Strategy
    layout: Layout
    ranks: tuple[RankPlan, ...]  # by rank; never empty
    scheduler_groups: tuple[Group, ...]  # rank 0's, a uniform_type reduced to its first layer's spec
    max_model_len_tokens: int  # after auto-fit
    cache_block_size_tokens: int | None  # smallest block of the groups that take part in prefix hits
    scheduler_block_size_tokens: int | None  # all groups' blocks end together at multiples of it
    hash_block_size_tokens: int | None  # unit of the request's hash chain
    capacity_tokens: int | None  # None: the model has no cache at all
    max_concurrency: float | None  # requests of the plan's length that fit at once
    max_in_flight_tokens: int
    num_prefill_lookahead_tokens: int
    min_request_blocks: int  # blocks that the shortest request holds: the footprint floor
    layer_costs: tuple[LayerCost, ...]  # one per layer spec of the request, in its order
    warnings: tuple[PlanWarning, ...]
    fingerprint: str  # sha256 hex of what must match to attach (see domain/fingerprint.py)
    choice: GroupingChoice | None = None  # of the compact strategy

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, null block included; ids 0..num_blocks-1 exist on every rank."""
        return self.ranks[0].num_blocks

    def iter_tensors(self, rank: int) -> Iterator[TensorPlacement]:
        """The placements of one rank, host tensors first."""
        return iter(self.ranks[rank].tensors)
