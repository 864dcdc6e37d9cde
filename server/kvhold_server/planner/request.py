"""Everything a plan depends on, as one frozen request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import LayerSpec, Limits, StateCacheMode
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import Strategy

SpecMap = Mapping[LayerName, LayerSpec]
"""Layer name → spec. The order of insertion is the order of registration and decides that of groups, tensors.
"""

EAGLE_METHODS = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark"})


class Layer(NamedTuple):
    """One layer of one rank. A tuple, because large models have hundreds of thousands of them."""

    name: LayerName
    spec: LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One worker: its layers in order of registration, and its memory."""

    layers: tuple[Layer, ...]
    available_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The drafter."""

    method: str
    num_speculative_tokens: int
    num_mtp_modules: int = 1
    disable_block_drop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hisparse:
    """Host-resident rows with a device buffer."""

    index_topk: int
    host_pool_bytes: int
    device_buffer_rows: int | None = None
    shared_host_pool: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPool:
    """The drafter's own block pool, in the layout that has one."""

    enabled: bool = True
    num_blocks: int | None = None
    block_size_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactBounds:
    """What the compact strategy may do to waste less."""

    max_num_groups: int | None = None  # block tables per request; None: 12, or modern's where only that holds as much
    max_block_size_tokens: int | None = None  # no block is made larger than that; None: no bound but a request
    keep_layout: bool = False  # L and B stay in the order asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """The engine's settings. Units and meanings of zero are those of the wire's PlannerConfig."""

    max_model_len_tokens: int
    max_num_batched_tokens: int
    strategy: Strategy = Strategy.MODERN
    layout: Layout = Layout.LBNHC
    auto_fit_max_model_len: bool = False
    max_num_seqs: int = 0
    max_num_encoder_input_tokens: int = 0
    async_scheduling: bool = False
    use_v2_model_runner: bool = False
    cache_block_size_tokens: int = 16
    num_blocks_override: int | None = None
    enable_prefix_caching: bool = False
    kv_connector_enabled: bool = False
    prefix_match_unit_tokens: int | None = None
    state_cache_mode: StateCacheMode = StateCacheMode.NONE
    disable_hybrid_kv_cache: bool = False
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    total_hidden_layers: int = 0
    pp_layer_partition: tuple[int, ...] = ()
    model_type: str = ""
    speculation: Speculation | None = None
    hisparse: Hisparse | None = None
    draft_pool: DraftPool = field(default_factory=DraftPool)
    compact: CompactBounds = field(default_factory=CompactBounds)

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens scheduled but not finished at most: one step's, times the steps that overlap."""
        stages = self.pipeline_parallel_size
        if self.async_scheduling and self.use_v2_model_runner:
            return (stages + 1) * self.max_num_batched_tokens
        if self.async_scheduling and stages <= 1:
            return 2 * self.max_num_batched_tokens
        return stages * self.max_num_batched_tokens

    @property
    def is_eagle_family(self) -> bool:
        """The drafter reads the target's cache or has layers of its own."""
        return self.speculation is not None and self.speculation.method in EAGLE_METHODS

    @property
    def drops_eagle_block(self) -> bool:
        """Hits of drafter groups lose their last block."""
        return self.is_eagle_family and self.speculation is not None and not self.speculation.disable_block_drop

    @property
    def prefill_lookahead_tokens(self) -> int:
        """Tokens that drafting reads ahead of prefill."""
        if self.speculation is None or not self.is_eagle_family:
            return 0
        spec = self.speculation
        if spec.method == "mtp" and min(spec.num_mtp_modules, spec.num_speculative_tokens) > 1:
            return spec.num_speculative_tokens
        return 1

    @property
    def decode_query_tokens(self) -> int:
        """Tokens of one decode query: the last one and its drafts."""
        return 1 if self.speculation is None else 1 + self.speculation.num_speculative_tokens

    @property
    def limits(self) -> Limits:
        """What the layer specs need to know."""
        return Limits(
            max_model_len_tokens=self.max_model_len_tokens,
            max_in_flight_tokens=self.max_in_flight_tokens,
            max_num_encoder_input_tokens=self.max_num_encoder_input_tokens,
            decode_context_parallel_size=self.decode_context_parallel_size,
            state_cache_mode=self.state_cache_mode,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """One model on its ranks. `layer_specs` are those whose costs are reported, whether or not a layer has them.

    `drafter_layers` are known to be a drafter's; without any, the drafter's group is guessed.
    """

    config: PlannerConfig
    ranks: tuple[Rank, ...]
    layer_specs: tuple[LayerSpec, ...] = ()
    drafter_layers: frozenset[LayerName] = frozenset()
