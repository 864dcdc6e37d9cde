"""What a block pool is built from: how many blocks, and for each group how its layers use them.

The planner makes these values from a plan (a group's layer kind decides its `kind`); tests and the conformance runner
make them by hand. Sizes are validated once, here, so that the pool may trust them.

    group "full"   16 tokens per block   ┐
    group "window"  8 tokens per block   ├─ scheduler block = lcm = 16, hash unit = gcd = 8
"""

from dataclasses import dataclass
from enum import Enum
from math import gcd, lcm

from kvhold_server.domain.errors import InvalidField

MAX_GROUPS = 64
MAX_BLOCKS = 2**31 - 1
MAX_TOKENS = 2**31 - 1


class GroupKind(str, Enum):
    """How a group's layers use their blocks. The value is also the word in configuration, wire and events."""

    FULL = "full_attention"
    MLA = "mla_attention"  # full attention over a compressed latent; blocks behave as FULL
    SINK_FULL = "sink_full_attention"  # full attention with sinks; blocks behave as FULL
    RSWA = "rswa"  # full prompt, sliding window over what was generated
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    CHUNKED_LOCAL = "chunked_local_attention"
    MAMBA = "mamba"  # any linear or state-space layer: the state at a boundary matters, not the tokens before it
    RING = "circular_buffer"  # one scratch block per sequence
    KPOOL_TAIL = "kpool_tail"  # one scratch block per sequence
    CROSS_ATTENTION = "cross_attention"


class MambaMode(str, Enum):
    """What of a state layer's history is kept for later sequences."""

    NONE = "none"  # nothing: the last state only
    ALIGN = "align"  # states at block boundaries and at chosen hash units
    ALL = "all"  # every block


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Layers that share one block table. Fields that a kind does not use must keep their default."""

    kind: GroupKind
    block_size_tokens: int
    window_tokens: int = 0  # SLIDING_WINDOW*, RSWA, KPOOL_TAIL: attention reach, the current token included
    extra_retained_tokens: int = 0  # SLIDING_WINDOW*: kept behind the window for a drafter
    chunk_tokens: int = 0  # CHUNKED_LOCAL
    mamba_mode: MambaMode = MambaMode.NONE
    num_speculative_blocks: int = 0  # MAMBA: states for drafted tokens
    num_checkpoint_blocks: int = 0  # MAMBA: states that a kernel can export in the middle of a chunk
    checkpoint_alignment_tokens: int = 0  # MAMBA: where it can
    is_eagle: bool = False  # a drafter reads this group: its last matched unit is always computed again

    @property
    def prefix_cacheable(self) -> bool:
        """Whether blocks of this group can serve other sequences; scratch and encoder blocks cannot."""
        return self.kind not in (GroupKind.RING, GroupKind.KPOOL_TAIL, GroupKind.CROSS_ATTENTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Everything that decides what a pool does with its blocks. All token counts are positions in one sequence."""

    groups: tuple[GroupConfig, ...]
    num_blocks: int  # block 0, the null block, included
    hash_unit_tokens: int  # tokens per hash; divides every cacheable block size
    scheduler_block_tokens: int  # lcm of the block sizes: hits of several groups end at its multiples
    max_model_len: int  # tables never cover more tokens
    max_in_flight_tokens: int | None = None  # batches in flight times their tokens; None = max_model_len
    enable_caching: bool = True
    use_eagle: bool = False  # True and no group flagged: all groups are eagle groups
    num_prefill_lookahead_tokens: int = 0  # of a multi-module drafter
    retention_interval_tokens: int | None = None  # None: windows and states keep everything; 0: reachable ends only
    num_retained_boundary_units: int = 1  # with a retention interval: hit ends kept below each reachable one
    keep_shared_prefix_checkpoints: bool = False  # states at junctions are registered when they are not block aligned
    num_reserved_low_blocks: int = 0  # ids 1..n are never allocated: an engine's warm-up writes to them
    needs_zeroing: bool = False  # report new blocks for zeroing (always done where there are state groups)
    report_events: bool = True  # collect stored/removed/cleared in replies
    report_completed: bool = False  # list the blocks that a completed step proved, for recovery records
    num_ghost_hashes: int = 65_536  # evicted hashes remembered, to tell "evicted" from "never seen"
    max_open_steps: int = 1_024  # steps of one session that are begun and not yet completed
    max_remembered_refusals: int = 1_024  # sequences per session whose hashes are kept until they are asked for again
    residency_sample_every: int = 0  # every k-th block handed out is timed; 0 = none

    def __post_init__(self) -> None:
        _check("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        _check("groups", len(self.groups), 0, MAX_GROUPS)
        _check("hash_unit_tokens", self.hash_unit_tokens, 1, MAX_TOKENS)
        _check("scheduler_block_tokens", self.scheduler_block_tokens, 1, MAX_TOKENS)
        _check("max_model_len", self.max_model_len, 1, MAX_TOKENS)
        _check("num_reserved_low_blocks", self.num_reserved_low_blocks, 0, self.num_blocks - 1)
        for i, group in enumerate(self.groups):
            _check_group(f"groups[{i}]", group)
            if self.enable_caching and group.prefix_cacheable and group.block_size_tokens % self.hash_unit_tokens:
                raise InvalidField(
                    f"groups[{i}].block_size_tokens",
                    group.block_size_tokens,
                    f"must be a multiple of hash_unit_tokens, {self.hash_unit_tokens}",
                )
            if self.enable_caching and group.kind is GroupKind.CROSS_ATTENTION:
                raise InvalidField(f"groups[{i}].kind", str(group.kind), "needs enable_caching = false")
        self._check_drafter()

    def _check_drafter(self) -> None:
        if self.enable_caching and self.use_eagle and self.scheduler_block_tokens < self.num_prefill_lookahead_tokens:
            raise InvalidField(
                "num_prefill_lookahead_tokens",
                self.num_prefill_lookahead_tokens,
                f"must not exceed scheduler_block_tokens, {self.scheduler_block_tokens}",
            )
        interval = self.retention_interval_tokens
        if interval is not None and (interval < 0 or interval % self.scheduler_block_tokens):
            raise InvalidField(
                "retention_interval_tokens", interval, f"must be a multiple of {self.scheduler_block_tokens}"
            )


def resolve_block_sizes(
    groups: tuple[GroupConfig, ...],
    *,
    prefix_match_unit_tokens: int | None = None,
    enable_caching: bool = True,
    hashes_needed: bool = True,
) -> tuple[int, int]:
    """Returns (scheduler block, hash unit) in tokens for these groups; raises InvalidField for a unit that fits none.

    One group: both are its block. Several: the scheduler block is the least common multiple; the hash unit the greatest
    common divisor of the cacheable sizes (or the configured unit), unless nobody needs hashes or a state group keeps
    states elsewhere than at chosen boundaries.
    """
    sizes = [group.block_size_tokens for group in groups]
    if len(sizes) == 1:
        return sizes[0], sizes[0]
    scheduler_block = lcm(*sizes)
    wants_hashes = enable_caching and hashes_needed
    coarse_state = any(g.kind is GroupKind.MAMBA and g.mamba_mode is not MambaMode.ALIGN for g in groups)
    if not wants_hashes or coarse_state:
        return scheduler_block, scheduler_block
    cacheable = [group.block_size_tokens for group in groups if group.prefix_cacheable]
    unit = prefix_match_unit_tokens or gcd(*cacheable)
    if any(size % unit for size in cacheable):
        raise InvalidField("prefix_match_unit_tokens", unit, f"must divide every cacheable block size, {cacheable}")
    return scheduler_block, unit


def _check(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidField(field, value, f"must be {low}..{high}")


def _check_group(path: str, group: GroupConfig) -> None:
    _check(f"{path}.block_size_tokens", group.block_size_tokens, 1, MAX_TOKENS)
    _check(f"{path}.extra_retained_tokens", group.extra_retained_tokens, 0, MAX_TOKENS)
    _check(f"{path}.num_speculative_blocks", group.num_speculative_blocks, 0, MAX_TOKENS)
    _check(f"{path}.num_checkpoint_blocks", group.num_checkpoint_blocks, 0, MAX_TOKENS)
    if group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA, GroupKind.RSWA):
        _check(f"{path}.window_tokens", group.window_tokens, 1, MAX_TOKENS)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        _check(f"{path}.chunk_tokens", group.chunk_tokens, 1, MAX_TOKENS)
