"""Where a plan's bytes go, what it can admit, what other memory would change: the values that `explain` gives."""

import enum
from dataclasses import dataclass


class WasteCause(enum.Enum):
    """Why bytes hold nothing."""

    PAGE_PADDING = "page_padding"  # pages are padded: to a common size, an alignment, or as asked for
    NARROW_GROUP = "narrow_group"  # a group's layers fill less than a block, which is as wide as the widest group
    BLOCK_ALIGNMENT = "block_alignment"  # blocks are rounded up to an alignment of their stride
    NULL_BLOCK = "null_block"
    REMAINDER = "remainder"  # less than a block is left of the memory
    OTHER_LIMIT = "other_limit"  # another rank has less memory, or the number of blocks was overridden


class BlockPool(enum.Enum):
    """Whose block ids."""

    DEVICE = "device"
    DRAFT = "draft"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindShare:
    """What the layers of one kind take on one rank."""

    kind: str
    num_layers: int
    block_bytes: int  # that hold something in one block of each layer
    request_bytes: int  # that hold something while a longest request runs
    pool: BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Bytes that hold nothing."""

    cause: WasteCause
    size_bytes: int
    whole_bytes: int  # of which they are a part
    groups: tuple[int, ...] = ()  # those concerned, where it is a matter of groups

    @property
    def percent(self) -> float:
        """Of the whole."""
        return 100 * self.size_bytes / self.whole_bytes if self.whole_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExplanation:
    """One rank's bytes. The device's kinds and the waste of a request sum to `request_bytes`."""

    ranks: tuple[int, ...]  # that it describes
    kinds: tuple[KindShare, ...]
    request_bytes: int  # device memory of one longest request
    request_waste: tuple[Waste, ...]
    memory_waste: tuple[Waste, ...]
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeasibilityCheck:
    """One thing that a scheduler will ask for."""

    description: str
    pool: BlockPool
    needed_blocks: int
    usable_blocks: int  # null block not counted

    @property
    def ok(self) -> bool:
        """It fits."""
        return self.needed_blocks <= self.usable_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStep:
    """The same groups with other memory."""

    delta_bytes: int  # on every rank
    num_blocks: int = 0  # null block included; 0: it does not fit
    capacity_tokens: int = 0
    max_concurrency: float = 0.0
    max_model_len_tokens: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything beside the plan itself."""

    ranks: tuple[RankExplanation, ...]  # those that differ in layers or memory
    checks: tuple[FeasibilityCheck, ...]
    longest_request_tokens: int | None  # None: no length is too long, or none fits
    memory_steps: tuple[MemoryStep, ...]
