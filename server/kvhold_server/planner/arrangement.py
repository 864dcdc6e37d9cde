"""How one rank's groups use its memory: what a block costs, what a request needs, where everything lies.

An arrangement is made once per different set of layers and shared by the ranks that have it. Nothing in it depends on
memory or on a length: those are arguments, so that searches change nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import Limits
from kvhold_server.domain.plan import PlanWarning, TensorPlacement
from kvhold_server.planner.groups import LayerGroup
from kvhold_server.planner.placement import bytes_per_block, check_layout, place_groups
from kvhold_server.planner.request import PlannerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The finished layout of one rank."""

    groups: tuple[LayerGroup, ...]
    tensors: tuple[TensorPlacement, ...]
    region_size_bytes: int
    draft_num_blocks: int | None = None
    draft_layer_names: tuple[LayerName, ...] = ()
    host_num_blocks: int | None = None
    host_block_stride_bytes: int | None = None
    host_region_size_bytes: int = 0
    shared_host_pool: bool = False


class Arrangement(ABC):
    """Base of the three arrangements."""

    def __init__(self, groups: Sequence[LayerGroup], config: PlannerConfig) -> None:
        self.groups = tuple(groups)
        self.config = config

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """What one block id costs on this rank."""

    @property
    def reserve_bytes(self) -> int:
        """What the null block takes from the memory that requests may use."""
        return self.block_bytes

    @abstractmethod
    def need_bytes(self, limits: Limits) -> int:
        """What one request of `limits.max_model_len_tokens` needs, null block not included."""

    @abstractmethod
    def place(self, num_blocks: int, limits: Limits, host_num_blocks: int | None) -> Placed:
        """Where everything lies with that many blocks. Raises typed refusals of the layout."""

    def pool_bytes(self, limits: Limits) -> int:
        """Memory beside the blocks: a drafter's own pool."""
        return 0

    def num_blocks(self, memory_bytes: int, limits: Limits) -> int:
        """Blocks that the memory holds, null block included; not positive if it is not enough for one."""
        return (memory_bytes - self.pool_bytes(limits)) // self.block_bytes

    def host_num_blocks(self) -> int | None:
        """Blocks that the host pool holds; None without one. Raises HisparseInvalid."""
        return None

    def pooled_groups(self) -> frozenset[int]:
        """Indexes of the groups that have a block pool of their own."""
        return frozenset()

    def warnings(self) -> tuple[PlanWarning, ...]:
        """What is to be said about the settings, once per plan."""
        return ()

    def scheduler_groups(self) -> tuple[LayerGroup, ...]:
        """The groups as they will be after the layout."""
        return self.groups

    def fits(self, limits: Limits, spare_bytes: int) -> bool:
        """Does one request fit into the memory beside the null block?"""
        return self.need_bytes(limits) <= spare_bytes


class GenericArrangement(Arrangement):
    """All groups over the same bytes, in the layout asked for."""

    def __init__(self, groups: Sequence[LayerGroup], config: PlannerConfig) -> None:
        super().__init__(groups, config)
        self._block_bytes = bytes_per_block(self.groups)

    @property
    def block_bytes(self) -> int:
        """The widest group's block."""
        return self._block_bytes

    def need_bytes(self, limits: Limits) -> int:
        """Every block id costs the same, whichever group uses it. Groups without layers here use ids, too."""
        return self._block_bytes * sum(group.spec.max_request_blocks(limits) for group in self.groups)

    def place(self, num_blocks: int, limits: Limits, host_num_blocks: int | None) -> Placed:
        """Raises LayoutCannotHoldPages, PaddedPageSplit, LayoutMixesStrides."""
        check_layout(self.config.layout, self.groups)
        return Placed(
            groups=self.groups,
            tensors=place_groups(self.groups, num_blocks, self._block_bytes, self.config.layout),
            region_size_bytes=num_blocks * self._block_bytes,
        )
