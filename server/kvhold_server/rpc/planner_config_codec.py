"""The engine's settings on the wire → the planner's. Ranges are checked here; the planner assumes them."""

from collections.abc import Sequence

from kvhold.v1 import plan_pb2 as pb
from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import Strategy
from kvhold_server.planner.plan import STRATEGIES
from kvhold_server.planner.request import CompactBounds, DraftPool, Hisparse, PlannerConfig, Speculation
from kvhold_server.rpc.wire_values import (
    DEFAULT_CACHE_BLOCK_TOKENS,
    LAYOUTS_BY_NUMBER,
    MAX_GROUPS,
    MAX_INT64,
    MAX_STAGES,
    MODES_BY_NUMBER,
    STRATEGIES_BY_NUMBER,
    at_least,
    from_table,
    optional,
    positive,
    text,
)


def decode_config(message: pb.PlannerConfig) -> PlannerConfig:
    """The settings. Raises InvalidField naming the field and its bound."""
    strategy = from_table(STRATEGIES_BY_NUMBER, message.strategy, "config.strategy")
    if strategy not in STRATEGIES:
        built = ", ".join(known.value for known in STRATEGIES)
        raise InvalidField(field="config.strategy", value=strategy.value, constraint=f"must be one of {built}")
    layout = Layout.LBNHC
    if strategy is not Strategy.LEGACY or message.layout:
        layout = from_table(LAYOUTS_BY_NUMBER, message.layout, "config.layout")
    return PlannerConfig(
        strategy=strategy,
        layout=layout,
        max_model_len_tokens=positive(message.max_model_len_tokens, "config.max_model_len_tokens"),
        max_num_batched_tokens=positive(message.max_num_batched_tokens, "config.max_num_batched_tokens"),
        max_num_seqs=at_least(message.max_num_seqs, 0, "config.max_num_seqs"),
        max_num_encoder_input_tokens=at_least(
            message.max_num_encoder_input_tokens, 0, "config.max_num_encoder_input_tokens"
        ),
        cache_block_size_tokens=at_least(message.cache_block_size_tokens, 0, "config.cache_block_size_tokens")
        or DEFAULT_CACHE_BLOCK_TOKENS,
        num_blocks_override=optional(message, "num_blocks_override", 0, "config"),
        prefix_match_unit_tokens=optional(message, "prefix_match_unit_tokens", 1, "config"),
        auto_fit_max_model_len=message.auto_fit_max_model_len,
        async_scheduling=message.async_scheduling,
        use_v2_model_runner=message.use_v2_model_runner,
        enable_prefix_caching=message.enable_prefix_caching,
        kv_connector_enabled=message.kv_connector_enabled,
        disable_hybrid_kv_cache=message.disable_hybrid_kv_cache,
        state_cache_mode=from_table(MODES_BY_NUMBER, message.state_cache_mode, "config.state_cache_mode"),
        pipeline_parallel_size=_stages(message.pipeline_parallel_size),
        decode_context_parallel_size=at_least(
            message.decode_context_parallel_size, 0, "config.decode_context_parallel_size"
        )
        or 1,
        total_hidden_layers=at_least(message.total_hidden_layers, 0, "config.total_hidden_layers"),
        pp_layer_partition=_partition(message.pp_layer_partition),
        model_type=text(message.model_type, "config.model_type"),
        speculation=_decode_speculation(message.speculative) if message.HasField("speculative") else None,
        hisparse=_decode_hisparse(message.hisparse) if message.HasField("hisparse") else None,
        draft_pool=_decode_draft_pool(message.draft_pool),
        compact=_decode_compact(message.compact),
    )


def _decode_compact(message: pb.CompactConfig) -> CompactBounds:
    path = "config.compact"
    groups = optional(message, "max_num_groups", 1, path)
    if groups is not None and groups > MAX_GROUPS:
        rule = f"must be 1..{MAX_GROUPS}"
        raise InvalidField(field=f"{path}.max_num_groups", value=groups, constraint=rule)
    return CompactBounds(
        max_num_groups=groups,
        max_block_size_tokens=optional(message, "max_block_size_tokens", 1, path),
        keep_layout=message.keep_layout,
    )


def _stages(value: int) -> int:
    if not 0 <= value <= MAX_STAGES:
        raise InvalidField(
            field="config.pipeline_parallel_size", value=value, constraint=f"must be 0..{MAX_STAGES}, 0 meaning 1"
        )
    return value or 1


def _partition(lengths: Sequence[int]) -> tuple[int, ...]:
    if len(lengths) > MAX_STAGES:
        rule = f"must have at most {MAX_STAGES} entries"
        raise InvalidField(field="config.pp_layer_partition", value=len(lengths), constraint=rule)
    return tuple(at_least(length, 0, "config.pp_layer_partition") for length in lengths)


def _decode_speculation(message: pb.SpeculativeConfig) -> Speculation:
    path = "config.speculative"
    modules = optional(message, "num_mtp_modules", 1, path)
    return Speculation(
        method=text(message.method, f"{path}.method"),
        num_speculative_tokens=at_least(message.num_speculative_tokens, 0, f"{path}.num_speculative_tokens"),
        num_mtp_modules=1 if modules is None else modules,
        disable_block_drop=message.disable_eagle_block_drop,
    )


def _decode_hisparse(message: pb.HisparseConfig) -> Hisparse:
    path = "config.hisparse"
    if not 0 <= message.host_pool_bytes <= MAX_INT64 // 2:
        rule = f"must be 0..{MAX_INT64 // 2}"
        raise InvalidField(field=f"{path}.host_pool_bytes", value=message.host_pool_bytes, constraint=rule)
    return Hisparse(
        index_topk=positive(message.index_topk, f"{path}.index_topk"),
        host_pool_bytes=message.host_pool_bytes,
        device_buffer_rows=optional(message, "device_buffer_rows", 1, path),
        shared_host_pool=message.shared_host_pool,
    )


def _decode_draft_pool(message: pb.DraftPoolConfig) -> DraftPool:
    path = "config.draft_pool"
    return DraftPool(
        enabled=message.enabled if message.HasField("enabled") else True,
        num_blocks=optional(message, "num_blocks", 1, path),
        block_size_tokens=optional(message, "block_size_tokens", 0, path),  # the planner knows what it must divide
    )
