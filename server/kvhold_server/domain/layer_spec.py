"""What a layer stores, as answers to the questions that planner and pool ask.

A layer spec is a frozen value; equality is exact (same kind, all fields equal, unset differs from zero). Each kind is
one file in `kinds/`. Planner and pool never ask which kind a spec is: they ask for its page, its blocks, its rules.

    page_size_bytes           bytes of one block in one layer, padding included
    max_request_blocks(L)     most blocks that one request may hold
    table_row_blocks(L, n)    entries of a block-table row for n tokens
    uniform_with(other)       may `other` share a block table with me, each layer keeping its own page?
    merge(others)             one spec for all of us, or the reason why not
"""

import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, TypeVar


class Family(enum.Flag):
    """Is-a relations that the planning rules speak of. A sliding-window MLA layer is SLIDING, not MLA."""

    NONE = 0
    ATTENTION = enum.auto()
    FULL = enum.auto()
    MLA = enum.auto()
    SLIDING = enum.auto()
    SLIDING_MLA = enum.auto()
    CHUNKED = enum.auto()
    CROSS = enum.auto()
    STATE = enum.auto()
    RING = enum.auto()
    HISPARSE_HOT = enum.auto()
    HISPARSE_RESIDENT = enum.auto()
    HIDDEN = enum.auto()
    TAIL = enum.auto()


class StateCacheMode(enum.Enum):
    """Which recurrent states stay cached: only the current one, one per aligned prefix, or one per block."""

    NONE = "none"
    ALIGN = "align"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The engine's limits that decide how many blocks one request may hold."""

    max_model_len_tokens: int
    max_in_flight_tokens: int  # tokens scheduled but not finished: batch tokens × concurrent batches
    max_num_encoder_input_tokens: int = 0
    decode_context_parallel_size: int = 1
    state_cache_mode: StateCacheMode = StateCacheMode.NONE

    def with_len(self, max_model_len_tokens: int) -> "Limits":
        """The same limits at another length: how lengths are searched without changing anything."""
        return dataclasses.replace(self, max_model_len_tokens=max_model_len_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Why specs do not merge into one."""

    field: str  # of the spec
    first: object
    second: object
    conflict: bool = False  # the request contradicts itself (two windows): not just "not the same", but never together


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec(ABC):
    """Base of all kinds."""

    kind: ClassVar[str]  # the name of its arm in the wire's LayerSpec.kind
    family: ClassVar[Family] = Family.NONE
    planner_made: ClassVar[bool] = False  # exists in plans only, never in requests
    plannable: ClassVar[bool] = True  # the modern strategies give it a place

    block_size_tokens: int
    dcp_sharded: bool = False  # tokens are spread over the decode-context-parallel ranks
    block_stride_alignment_bytes: int | None = None  # the bytes of one block of all layers are a multiple of it

    # --- bytes of a page -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """Extent of the head axis of a page."""

    @property
    @abstractmethod
    def num_states(self) -> int:
        """Extent of the state axis of a page."""

    @property
    @abstractmethod
    def content_size_bytes(self) -> int:
        """Bytes of one state of one head."""

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of a page that hold something."""
        return self.num_heads * self.num_states * self.content_size_bytes

    @property
    def padded_page_size_bytes(self) -> int | None:
        """The padded size where padding is in force (asked for, or from an alignment)."""
        return None

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer."""
        padded = self.padded_page_size_bytes
        return self.unpadded_page_size_bytes if padded is None else padded

    # --- blocks of a request ---------------------------------------------------------------------------------------

    @abstractmethod
    def max_request_blocks(self, limits: Limits) -> int:
        """Most blocks that one request of the longest length holds at once. Raises a typed refusal where undefined."""

    def table_row_blocks(self, limits: Limits, num_tokens: int) -> int:
        """Entries in a block-table row that serves `num_tokens`."""
        return cdiv(num_tokens, self.block_size_tokens)

    @property
    def prefix_cacheable(self) -> bool:
        """Do its blocks take part in prefix hits?"""
        return True

    @property
    def needs_zeroing(self) -> bool:
        """Must its blocks be zeroed before they are used again, whatever the other layers are?"""
        return False

    @property
    def storage_format(self) -> tuple[str, str] | None:
        """What bytes mean, where leftovers of another format would do harm. None: they never do."""
        return None

    # --- parts that some layouts tell apart ------------------------------------------------------------------------

    @property
    def state_tokens(self) -> "int | Fraction":
        """Tokens that one state of a page covers."""
        return 1

    @property
    def window_tokens(self) -> int | None:
        """How far back the layer attends, where that is limited."""
        return None

    @property
    def own_state_mode(self) -> StateCacheMode | None:
        """How a recurrent layer wants its states cached; None for layers without states."""
        return None

    @property
    def decodes_without_order(self) -> bool:
        """Does a decode step read several tokens without causal order, as a drafter does?"""
        return False

    @property
    def selects_rows(self) -> bool:
        """Is it an indexer's cache?"""
        return False

    @property
    def leads_selection(self) -> bool:
        """Does its selection of rows serve the layers behind it, too?"""
        return False

    @property
    def model_generation(self) -> str | None:
        """The model generation whose rules it follows, where they differ."""
        return None

    @property
    def hidden_token_bytes(self) -> int | None:
        """Bytes of one token's hidden state; None for layers that keep none."""
        return None

    def min_request_blocks(self, limits: Limits) -> int:
        """Blocks that a request of one token holds."""
        return 1

    def check(self, layer_name: str, limits: Limits) -> None:
        """Raises a typed refusal that names the layer if the spec contradicts itself or the limits."""
        return None

    def each(self) -> "Iterable[LayerSpec]":
        """The different layer specs behind this one: itself, or the members of a uniform_type."""
        return (self,)

    # --- sharing ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def uniform_with(self, other: "LayerSpec") -> bool:
        """May `other` join a group whose first layer is mine? Not symmetric; block sizes are compared by the caller."""

    def merge(self, others: "Sequence[LayerSpec]") -> "LayerSpec | Mismatch":
        """One spec for me and `others`. The rule is that of the first spec: the order matters."""
        for other in others:
            if other is not self and other != self:
                return first_mismatch(self, other)
        return self

    def retaining(self, extra_tokens: int) -> "LayerSpec":
        """A copy that keeps that many tokens beyond its window; itself where there is no window."""
        return self

    def promoted(self, block_size_tokens: int) -> "LayerSpec | None":
        """The full-attention spec that may stand for a local one, with that block; None where there is none."""
        return None

    def scaled(self, factor: int) -> "LayerSpec":
        """A copy with `factor` times the block, and the padding grown with it. Does not change a state's page."""
        return dataclasses.replace(self, block_size_tokens=self.block_size_tokens * factor)

    def padded_to(self, page_size_bytes: int) -> "LayerSpec | None":
        """A copy whose page is padded to that size, block size unchanged; None where the kind cannot be padded."""
        return None


SpecT = TypeVar("SpecT", bound=LayerSpec)


def cdiv(numerator: int, denominator: int) -> int:
    """Ceiling division of integers."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return cdiv(value, multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCount:
    """A spec and how often it occurs."""

    spec: LayerSpec
    count: int


def count_specs(specs: Iterable[LayerSpec]) -> list[SpecCount]:
    """The different specs, by first occurrence. Compares objects first: hashing a spec is slow, and few are
    different.
    """
    by_object: dict[int, SpecCount] = {}
    tally: dict[int, int] = {}
    for spec in specs:
        key = id(spec)
        tally[key] = tally.get(key, 0) + 1
        if key not in by_object:
            by_object[key] = SpecCount(spec=spec, count=0)
    by_value: dict[LayerSpec, int] = {}
    for key, entry in by_object.items():
        by_value[entry.spec] = by_value.get(entry.spec, 0) + tally[key]
    return [SpecCount(spec=spec, count=count) for spec, count in by_value.items()]


def first_mismatch(first: LayerSpec, second: LayerSpec) -> Mismatch:
    """Names the first field in which two unequal specs differ."""
    if first.kind != second.kind:
        return Mismatch(field="kind", first=first.kind, second=second.kind)
    for field in dataclasses.fields(first):
        mine, its = getattr(first, field.name), getattr(second, field.name)
        if mine != its:
            return Mismatch(field=field.name, first=mine, second=its)
    raise AssertionError("the specs are equal")


def merge_specs(specs: Sequence[LayerSpec]) -> LayerSpec | Mismatch:
    """One spec for all of `specs` (at least one) by the rule of the first."""
    return specs[0].merge(specs[1:])
