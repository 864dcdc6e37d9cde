"""Plans on the wire: PlanRequest → domain, domain → Plan. All checks of ranges are here; the planner assumes them.

A layer kind is one arm of LayerSpec.kind, one file in domain/kinds, and one line in KIND_CODECS. Fields of arms have the
names of the domain's fields, so that a codec only says what differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Any

from kvhold.v1 import plan_pb2 as pb
from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds import (
    ChunkedLocalSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    DraftSlidingWindowSpec,
    EncoderOnlySpec,
    FullSpec,
    HiddenStateSpec,
    HisparseHotSpec,
    HisparseResidentSpec,
    KpoolTailSpec,
    MambaSpec,
    MlaSpec,
    RswaSpec,
    SinkFullSpec,
    SlidingWindowMlaSpec,
    SlidingWindowSpec,
)
from kvhold_server.domain.kinds.attention import AttentionSpec
from kvhold_server.domain.kinds.mamba import StateArray
from kvhold_server.domain.kinds.mla import CacheRole
from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec
from kvhold_server.domain.layer_spec import LayerSpec, StateCacheMode
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import (
    Group,
    GroupRole,
    LayerCost,
    Plan,
    PlanWarning,
    RankPlan,
    Strategy,
    TensorPlacement,
    WarningType,
)
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.planner.errors import PlanTooLarge
from kvhold_server.planner.plan import STRATEGIES
from kvhold_server.planner.request import DraftPool, Hisparse, Layer, PlannerConfig, PlanRequest, Rank, Speculation

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_PAGE_BYTES = 2**40
MAX_TEXT_BYTES = 64
MAX_LAYER_NAME_BYTES = 512
MAX_STAGES = 1024
MAX_STATE_ARRAYS = 16
MAX_STATE_DIMENSIONS = 8
DEFAULT_CACHE_BLOCK_TOKENS = 16


def _numbers(domain: type[Enum], prefix: str) -> dict[int, Any]:
    """Wire number → domain value, by name: the wire's names are PREFIX_NAME."""
    return {int(getattr(pb, f"{prefix}_{value.name}")): value for value in domain}


_DTYPES: dict[int, Dtype] = _numbers(Dtype, "DTYPE")
_LAYOUTS: dict[int, Layout] = _numbers(Layout, "LAYOUT")
_STRATEGIES: dict[int, Strategy] = _numbers(Strategy, "STRATEGY") | {pb.STRATEGY_UNSPECIFIED: Strategy.MODERN}
_MODES: dict[int, StateCacheMode] = _numbers(StateCacheMode, "STATE_CACHE_MODE") | {0: StateCacheMode.NONE}
_CACHE_ROLES: dict[int, CacheRole] = _numbers(CacheRole, "CACHE_ROLE") | {0: CacheRole.SPARSE}
_GROUP_ROLES: dict[int, GroupRole] = _numbers(GroupRole, "GROUP_ROLE")
_WARNINGS: dict[int, WarningType] = _numbers(WarningType, "WARNING_TYPE")
_ENUM_FIELDS: Mapping[str, Mapping[int, Enum]] = {"cache_role": _CACHE_ROLES, "state_cache_mode": _MODES}
_WIRE_NUMBERS: dict[Enum, int] = {
    value: number
    for table in (_DTYPES, _LAYOUTS, _STRATEGIES, _MODES, _CACHE_ROLES, _GROUP_ROLES, _WARNINGS)
    for number, value in table.items()
    if number
}


def wire(value: Enum) -> Any:
    """The wire's number of a domain value."""
    return _WIRE_NUMBERS[value]


# ------------------------------------------------------------------------------------------------------- layer specs

_MAY_BE_ZERO = frozenset(
    {"extra_retained_tokens", "num_speculative_blocks", "num_prefill_checkpoint_blocks", "sink_len_tokens"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCodec:
    """How one arm of LayerSpec.kind maps to a domain kind."""

    spec: type[LayerSpec]
    renamed: Mapping[str, str] = field(
        default_factory=dict
    )  # field of the arm → field of the domain, where they differ

    @property
    def has_geometry(self) -> bool:
        """Attention kinds carry AttentionGeometry."""
        return issubclass(self.spec, AttentionSpec)


_ROW_PAGE = {"page_size_bytes": "row_page_size_bytes"}

KIND_CODECS: Mapping[str, KindCodec] = {
    "full_attention": KindCodec(spec=FullSpec),
    "mla_attention": KindCodec(spec=MlaSpec),
    "hidden_state": KindCodec(spec=HiddenStateSpec),
    "rswa": KindCodec(spec=RswaSpec),
    "sink_full": KindCodec(spec=SinkFullSpec),
    "sliding_window": KindCodec(spec=SlidingWindowSpec),
    "sliding_window_mla": KindCodec(spec=SlidingWindowMlaSpec),
    "draft_sliding_window": KindCodec(spec=DraftSlidingWindowSpec),
    "kpool_tail": KindCodec(spec=KpoolTailSpec),
    "circular_buffer": KindCodec(spec=CircularBufferSpec),
    "chunked_local": KindCodec(spec=ChunkedLocalSpec),
    "mamba": KindCodec(spec=MambaSpec),
    "cross_attention": KindCodec(spec=CrossAttentionSpec),
    "encoder_only": KindCodec(spec=EncoderOnlySpec),
    "hisparse_hot": KindCodec(spec=HisparseHotSpec, renamed=_ROW_PAGE),
    "hisparse_resident": KindCodec(spec=HisparseResidentSpec, renamed=_ROW_PAGE),
}

REQUEST_KINDS: tuple[str, ...] = tuple(kind for kind, codec in KIND_CODECS.items() if not codec.spec.planner_made)
STRATEGIES_BUILT: tuple[Any, ...] = tuple(wire(strategy) for strategy in STRATEGIES)
LAYOUTS: tuple[Any, ...] = tuple(wire(layout) for layout in Layout)
DTYPES: tuple[Any, ...] = tuple(wire(dtype) for dtype in Dtype)


def decode_layer_spec(message: pb.LayerSpec, path: str) -> LayerSpec:
    """The domain's spec. Raises InvalidField naming the field below `path`."""
    kind = message.WhichOneof("kind")
    if kind is None or kind not in REQUEST_KINDS:
        raise InvalidField(
            field=f"{path}.kind", value=kind or "unset", constraint=f"must be one of {', '.join(REQUEST_KINDS)}"
        )
    codec = KIND_CODECS[kind]
    values = _decode_arm(getattr(message, kind), codec, f"{path}.{kind}")
    values["block_size_tokens"] = _positive(message.block_size_tokens, f"{path}.block_size_tokens")
    if message.HasField("dcp_sharded"):
        values["dcp_sharded"] = message.dcp_sharded
    if message.HasField("block_stride_alignment_bytes"):
        where = f"{path}.block_stride_alignment_bytes"
        values["block_stride_alignment_bytes"] = _positive(message.block_stride_alignment_bytes, where)
    if message.HasField("geometry") != codec.has_geometry:
        rule = "is required for attention kinds and not allowed for others"
        raise InvalidField(
            field=f"{path}.geometry", value="set" if not codec.has_geometry else "unset", constraint=rule
        )
    if codec.has_geometry:
        values |= _decode_geometry(message.geometry, f"{path}.geometry", codec)
    spec = codec.spec(**values)
    if not 1 <= spec.page_size_bytes <= MAX_PAGE_BYTES:
        raise InvalidField(
            field=path,
            value=f"page of {spec.page_size_bytes} bytes",
            constraint=f"a page has 1..{MAX_PAGE_BYTES} bytes",
        )
    return spec


def _decode_arm(arm: Any, codec: KindCodec, path: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for descriptor in arm.DESCRIPTOR.fields:
        name = descriptor.name
        where, target = f"{path}.{name}", codec.renamed.get(name, name)
        if name == "states":
            values[name] = _decode_states(arm.states, where)
        elif not descriptor.has_presence or arm.HasField(name):
            values[target] = _decode_scalar(getattr(arm, name), descriptor, where)
    return values


def _decode_scalar(value: Any, descriptor: Any, path: str) -> Any:
    if descriptor.name in _ENUM_FIELDS:
        return _from_table(_ENUM_FIELDS[descriptor.name], value, path)
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, bool):
        return value
    return _at_least(value, 0 if descriptor.name in _MAY_BE_ZERO else 1, path)


def _decode_states(states: Sequence[pb.StateArray], path: str) -> tuple[StateArray, ...]:
    if not 1 <= len(states) <= MAX_STATE_ARRAYS:
        raise InvalidField(field=path, value=len(states), constraint=f"must have 1..{MAX_STATE_ARRAYS} arrays")
    arrays = []
    for index, state in enumerate(states):
        where = f"{path}[{index}]"
        if not 1 <= len(state.shape) <= MAX_STATE_DIMENSIONS:
            rule = f"must have 1..{MAX_STATE_DIMENSIONS} extents"
            raise InvalidField(field=f"{where}.shape", value=len(state.shape), constraint=rule)
        shape = tuple(_positive(extent, f"{where}.shape") for extent in state.shape)
        arrays.append(StateArray(shape=shape, dtype=_from_table(_DTYPES, state.dtype, f"{where}.dtype")))
    return tuple(arrays)


def _decode_geometry(message: pb.AttentionGeometry, path: str, codec: KindCodec) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_kv_heads": _positive(message.num_kv_heads, f"{path}.num_kv_heads"),
        "head_size_elems": _positive(message.head_size_elems, f"{path}.head_size_elems"),
        "dtype": _from_table(_DTYPES, message.dtype, f"{path}.dtype"),
        "kv_quant_mode": _text(message.kv_quant_mode, f"{path}.kv_quant_mode"),
        "tokens_per_state": _ratio(message, path),
    }
    if message.HasField("head_size_v_elems"):
        values["head_size_v_elems"] = _at_least(message.head_size_v_elems, 0, f"{path}.head_size_v_elems")
    elif not issubclass(codec.spec, (MlaSpec, SlidingWindowMlaSpec)):
        values["head_size_v_elems"] = message.head_size_elems
    for name in ("page_size_padded_bytes", "num_head_slots", "state_content_bytes", "max_tp_shards"):
        if message.HasField(name):
            values[name] = _positive(getattr(message, name), f"{path}.{name}")
    return values


def _ratio(message: pb.AttentionGeometry, path: str) -> int | Fraction:
    numerator = _at_least(message.tokens_per_state_num, 0, f"{path}.tokens_per_state_num") or 1
    denominator = _at_least(message.tokens_per_state_den, 0, f"{path}.tokens_per_state_den") or 1
    ratio = Fraction(numerator, denominator)
    return ratio.numerator if ratio.denominator == 1 else ratio


def encode_layer_spec(spec: LayerSpec, message: pb.LayerSpec) -> None:
    """Writes a spec of any kind, planner-made ones included."""
    message.block_size_tokens = spec.block_size_tokens
    message.dcp_sharded = spec.dcp_sharded
    if spec.block_stride_alignment_bytes is not None:
        message.block_stride_alignment_bytes = spec.block_stride_alignment_bytes
    codec = KIND_CODECS[spec.kind]
    arm = getattr(message, spec.kind)
    arm.SetInParent()
    for descriptor in arm.DESCRIPTOR.fields:
        if descriptor.name == "states":
            for state in getattr(spec, "states"):
                arm.states.add(shape=state.shape, dtype=wire(state.dtype))
            continue
        _encode_scalar(arm, descriptor.name, getattr(spec, codec.renamed.get(descriptor.name, descriptor.name)))
    if isinstance(spec, AttentionSpec):
        _encode_geometry(spec, message.geometry)


def _encode_scalar(message: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(message, name, wire(value) if isinstance(value, Enum) else value)


def _encode_geometry(spec: AttentionSpec, message: pb.AttentionGeometry) -> None:
    ratio = Fraction(spec.tokens_per_state)
    message.tokens_per_state_num, message.tokens_per_state_den = ratio.numerator, ratio.denominator
    # The padding in force, so that a reader need not know how alignments work.
    _encode_scalar(message, "page_size_padded_bytes", spec.padded_page_size_bytes)
    for name in (
        "num_kv_heads",
        "head_size_elems",
        "head_size_v_elems",
        "dtype",
        "kv_quant_mode",
        "num_head_slots",
        "state_content_bytes",
        "max_tp_shards",
    ):
        _encode_scalar(message, name, getattr(spec, name))


# ---------------------------------------------------------------------------------------------------------- requests


def decode_plan_request(message: pb.PlanRequest, limits: ServiceLimits | None = None) -> PlanRequest:
    """The domain's request. Raises InvalidField naming the field and its bound."""
    limits = limits or ServiceLimits()
    if not message.HasField("config"):
        raise InvalidField(field="config", value="unset", constraint="is required")
    if not 1 <= len(message.ranks) <= limits.max_ranks:
        raise InvalidField(
            field="ranks", value=len(message.ranks), constraint=f"must have 1..{limits.max_ranks} entries"
        )
    if len(message.layer_specs) > limits.max_layer_specs:
        rule = f"must have at most {limits.max_layer_specs} entries"
        raise InvalidField(field="layer_specs", value=len(message.layer_specs), constraint=rule)
    config = _decode_config(message.config)
    known: dict[LayerSpec, LayerSpec] = {}
    specs = []
    for index, wire_spec in enumerate(message.layer_specs):
        spec = decode_layer_spec(wire_spec, f"layer_specs[{index}]")
        specs.append(known.setdefault(spec, spec))  # equal specs are one object
    return PlanRequest(config=config, layer_specs=tuple(specs), ranks=_decode_ranks(message.ranks, specs, limits))


def _decode_ranks(ranks: Sequence[pb.Rank], specs: Sequence[LayerSpec], limits: ServiceLimits) -> tuple[Rank, ...]:
    decoded: list[Rank] = []
    total = 0
    for index, rank in enumerate(ranks):
        path = f"ranks[{index}]"
        layers = _layers_of(rank, path, specs, decoded)
        total += len(layers)
        if total > limits.max_layers:
            rule = f"all ranks together have at most {limits.max_layers} layers"
            raise InvalidField(field=f"{path}.layers", value=total, constraint=rule)
        same = next((other.layers for other in decoded[-1:] if other.layers == layers), layers)
        decoded.append(Rank(layers=same, available_memory_bytes=rank.available_memory_bytes))
    return tuple(decoded)


def _layers_of(rank: pb.Rank, path: str, specs: Sequence[LayerSpec], earlier: Sequence[Rank]) -> tuple[Layer, ...]:
    if not rank.HasField("layers_of_rank"):
        return _decode_layers(rank.layers, f"{path}.layers", specs)
    if not 0 <= rank.layers_of_rank < len(earlier):
        rule = f"must be the number of an earlier rank, below {len(earlier)}"
        raise InvalidField(field=f"{path}.layers_of_rank", value=rank.layers_of_rank, constraint=rule)
    if rank.layers:
        raise InvalidField(
            field=f"{path}.layers", value=len(rank.layers), constraint="must be empty where layers_of_rank is set"
        )
    return earlier[rank.layers_of_rank].layers


def _decode_layers(layers: Sequence[pb.Layer], path: str, specs: Sequence[LayerSpec]) -> tuple[Layer, ...]:
    decoded = []
    seen: set[str] = set()
    for index, layer in enumerate(layers):
        name, position = layer.layer_name, layer.layer_spec_index
        if not name or len(name.encode()) > MAX_LAYER_NAME_BYTES:
            rule = f"must have 1..{MAX_LAYER_NAME_BYTES} bytes"
            raise InvalidField(field=f"{path}[{index}].layer_name", value=name[:80], constraint=rule)
        if name in seen:
            raise InvalidField(field=f"{path}[{index}].layer_name", value=name, constraint="must be unique on its rank")
        if not 0 <= position < len(specs):
            rule = f"must be a position in layer_specs, 0..{len(specs) - 1}"
            raise InvalidField(field=f"{path}[{index}].layer_spec_index", value=position, constraint=rule)
        seen.add(name)
        decoded.append(Layer(LayerName(name), specs[position]))
    return tuple(decoded)


def _decode_config(message: pb.PlannerConfig) -> PlannerConfig:
    strategy = _from_table(_STRATEGIES, message.strategy, "config.strategy")
    if strategy not in STRATEGIES:
        built = ", ".join(known.value for known in STRATEGIES)
        raise InvalidField(field="config.strategy", value=strategy.value, constraint=f"must be one of {built}")
    layout = Layout.LBNHC
    if strategy is not Strategy.LEGACY or message.layout:
        layout = _from_table(_LAYOUTS, message.layout, "config.layout")
    return PlannerConfig(
        strategy=strategy,
        layout=layout,
        max_model_len_tokens=_positive(message.max_model_len_tokens, "config.max_model_len_tokens"),
        max_num_batched_tokens=_positive(message.max_num_batched_tokens, "config.max_num_batched_tokens"),
        max_num_seqs=_at_least(message.max_num_seqs, 0, "config.max_num_seqs"),
        max_num_encoder_input_tokens=_at_least(
            message.max_num_encoder_input_tokens, 0, "config.max_num_encoder_input_tokens"
        ),
        cache_block_size_tokens=_at_least(message.cache_block_size_tokens, 0, "config.cache_block_size_tokens")
        or DEFAULT_CACHE_BLOCK_TOKENS,
        num_blocks_override=_optional(message, "num_blocks_override", 0, "config"),
        prefix_match_unit_tokens=_optional(message, "prefix_match_unit_tokens", 1, "config"),
        auto_fit_max_model_len=message.auto_fit_max_model_len,
        async_scheduling=message.async_scheduling,
        use_v2_model_runner=message.use_v2_model_runner,
        enable_prefix_caching=message.enable_prefix_caching,
        kv_connector_enabled=message.kv_connector_enabled,
        disable_hybrid_kv_cache=message.disable_hybrid_kv_cache,
        state_cache_mode=_from_table(_MODES, message.state_cache_mode, "config.state_cache_mode"),
        pipeline_parallel_size=_stages(message.pipeline_parallel_size),
        decode_context_parallel_size=_at_least(
            message.decode_context_parallel_size, 0, "config.decode_context_parallel_size"
        )
        or 1,
        total_hidden_layers=_at_least(message.total_hidden_layers, 0, "config.total_hidden_layers"),
        pp_layer_partition=_partition(message.pp_layer_partition),
        model_type=_text(message.model_type, "config.model_type"),
        speculation=_decode_speculation(message.speculative) if message.HasField("speculative") else None,
        hisparse=_decode_hisparse(message.hisparse) if message.HasField("hisparse") else None,
        draft_pool=_decode_draft_pool(message.draft_pool),
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
    return tuple(_at_least(length, 0, "config.pp_layer_partition") for length in lengths)


def _decode_speculation(message: pb.SpeculativeConfig) -> Speculation:
    path = "config.speculative"
    modules = _optional(message, "num_mtp_modules", 1, path)
    return Speculation(
        method=_text(message.method, f"{path}.method"),
        num_speculative_tokens=_at_least(message.num_speculative_tokens, 0, f"{path}.num_speculative_tokens"),
        num_mtp_modules=1 if modules is None else modules,
        disable_block_drop=message.disable_eagle_block_drop,
    )


def _decode_hisparse(message: pb.HisparseConfig) -> Hisparse:
    path = "config.hisparse"
    if not 0 <= message.host_pool_bytes <= MAX_INT64 // 2:
        rule = f"must be 0..{MAX_INT64 // 2}"
        raise InvalidField(field=f"{path}.host_pool_bytes", value=message.host_pool_bytes, constraint=rule)
    return Hisparse(
        index_topk=_positive(message.index_topk, f"{path}.index_topk"),
        host_pool_bytes=message.host_pool_bytes,
        device_buffer_rows=_optional(message, "device_buffer_rows", 1, path),
        shared_host_pool=message.shared_host_pool,
    )


def _decode_draft_pool(message: pb.DraftPoolConfig) -> DraftPool:
    path = "config.draft_pool"
    return DraftPool(
        enabled=message.enabled if message.HasField("enabled") else True,
        num_blocks=_optional(message, "num_blocks", 1, path),
        block_size_tokens=_optional(message, "block_size_tokens", 0, path),  # the planner knows what it must divide
    )


# ------------------------------------------------------------------------------------------------------------- plans


def encode_plan_response(plan: Plan, *, fold_identical_ranks: bool = False) -> pb.PlanResponse:
    """The whole answer. Raises PlanTooLarge."""
    return pb.PlanResponse(
        plan=encode_plan(plan, fold_identical_ranks=fold_identical_ranks),
        layer_costs=[_encode_cost(cost) for cost in plan.layer_costs],
    )


def encode_plan(plan: Plan, *, fold_identical_ranks: bool = False) -> pb.Plan:
    """The plan. Raises PlanTooLarge if a number does not fit the wire."""
    _check_sizes(plan)
    table = _SpecTable()
    message = pb.Plan(
        fingerprint=plan.fingerprint,
        strategy=wire(plan.strategy),
        layout=pb.LAYOUT_UNSPECIFIED if plan.strategy is Strategy.LEGACY else wire(plan.layout),
        num_blocks=plan.num_blocks,
        max_model_len_tokens=plan.max_model_len_tokens,
        cache_block_size_tokens=plan.cache_block_size_tokens,
        scheduler_block_size_tokens=plan.scheduler_block_size_tokens,
        hash_block_size_tokens=plan.hash_block_size_tokens,
        capacity_tokens=plan.capacity_tokens,
        max_concurrency=plan.max_concurrency,
        max_in_flight_tokens=plan.max_in_flight_tokens,
        num_prefill_lookahead_tokens=plan.num_prefill_lookahead_tokens,
        min_request_blocks=plan.min_request_blocks,
        warnings=[_encode_warning(warning) for warning in plan.warnings],
        scheduler_groups=[_encode_group(group, table) for group in plan.scheduler_groups],
    )
    first_of: dict[int, int] = {}  # by object: equal ranks share one
    for number, rank in enumerate(plan.ranks):
        first = first_of.setdefault(id(rank), number)
        if first == number:
            message.ranks.append(_encode_rank(rank, table))
        elif fold_identical_ranks:
            message.ranks.add(same_as_rank=first)
        else:
            message.ranks.append(message.ranks[first])
    for spec in table.specs:
        encode_layer_spec(spec, message.layer_specs.add())
    return message


class _SpecTable:
    """The different specs that groups refer to, by first reference."""

    def __init__(self) -> None:
        self.specs: list[LayerSpec] = []
        self._by_object: dict[int, int] = {}
        self._by_value: dict[LayerSpec, int] = {}

    def index_of(self, spec: LayerSpec) -> int:
        position = self._by_object.get(id(spec))
        if position is None:
            position = self._by_value.setdefault(spec, len(self.specs))
            if position == len(self.specs):
                self.specs.append(spec)
            self._by_object[id(spec)] = position
        return position


def _check_sizes(plan: Plan) -> None:
    for number, rank in enumerate({id(rank): rank for rank in plan.ranks}.values()):
        largest = (
            max(
                rank.region_size_bytes,
                rank.needed_bytes,
                rank.host_region_size_bytes,
                *(group.max_request_bytes for group in rank.groups),
                *(cost.max_request_bytes for cost in plan.layer_costs),
            )
            if rank.groups
            else 0
        )
        if largest > MAX_INT64:
            raise PlanTooLarge(rank=number, size_bytes=largest, max_bytes=MAX_INT64)


def _encode_rank(rank: RankPlan, table: _SpecTable) -> pb.RankPlan:
    return pb.RankPlan(
        num_blocks=rank.num_blocks,
        bytes_per_block=rank.bytes_per_block,
        needed_bytes=rank.needed_bytes,
        groups=[_encode_group(group, table) for group in rank.groups],
        tensors=[_encode_tensor(tensor) for tensor in rank.tensors],
        region_size_bytes=rank.region_size_bytes,
        needs_zeroing=rank.needs_zeroing,
        draft_num_blocks=rank.draft_num_blocks,
        draft_layer_names=rank.draft_layer_names,
        host_num_blocks=rank.host_num_blocks,
        host_block_stride_bytes=rank.host_block_stride_bytes,
        host_region_size_bytes=rank.host_region_size_bytes,
        shared_host_pool=rank.shared_host_pool,
    )


def _encode_group(group: Group, table: _SpecTable) -> pb.Group:
    message = pb.Group(
        layer_names=group.layer_names,
        kind=group.kind,
        block_size_tokens=group.block_size_tokens,
        page_size_bytes=group.page_size_bytes,
        max_request_blocks=group.max_request_blocks,
        max_request_bytes=group.max_request_bytes,
        prefix_cacheable=group.prefix_cacheable,
        is_eagle_group=group.is_eagle_group,
        host_resident=group.host_resident,
        enable_kv_transfer=group.enable_kv_transfer,
        role=wire(group.role),
    )
    if isinstance(group.spec, UniformTypeSpec):
        pages = {id(spec): spec.page_size_bytes for spec in group.spec.layer_specs}
        message.member_spec_indexes.extend(table.index_of(spec) for spec in group.spec.layer_specs)
        message.member_page_size_bytes.extend(pages[id(spec)] for spec in group.spec.layer_specs)
    else:
        message.layer_spec_index = table.index_of(group.spec)
    return message


def _encode_tensor(tensor: TensorPlacement) -> pb.TensorPlacement:
    return pb.TensorPlacement(
        layer_names=tensor.layer_names,
        size_bytes=tensor.size_bytes,
        offset_bytes=tensor.offset_bytes,
        layer_stride_bytes=tensor.layer_stride_bytes,
        block_stride_bytes=tensor.block_stride_bytes,
        page_size_bytes=tensor.page_size_bytes,
        num_blocks=tensor.num_blocks,
        num_heads=tensor.num_heads,
        head_stride_bytes=tensor.head_stride_bytes,
        num_states=tensor.num_states,
        state_stride_bytes=tensor.state_stride_bytes,
        content_size_bytes=tensor.content_size_bytes,
        host_resident=tensor.host_resident,
    )


def _encode_cost(cost: LayerCost) -> pb.LayerCost:
    return pb.LayerCost(
        kind=cost.kind,
        page_size_bytes=cost.page_size_bytes,
        unpadded_page_size_bytes=cost.unpadded_page_size_bytes,
        max_request_blocks=cost.max_request_blocks,
        max_request_bytes=cost.max_request_bytes,
        table_row_blocks=cost.table_row_blocks,
        num_states=cost.num_states,
        prefix_cacheable=cost.prefix_cacheable,
    )


def _encode_warning(warning: PlanWarning) -> pb.PlanWarning:
    return pb.PlanWarning(type=wire(warning.type), message=warning.message, args=dict(warning.args))


# ------------------------------------------------------------------------------------------------------------ checks


def _positive(value: int, path: str) -> int:
    return _at_least(value, 1, path)


def _at_least(value: int, lowest: int, path: str) -> int:
    if not lowest <= value <= MAX_INT32:
        raise InvalidField(field=path, value=value, constraint=f"must be {lowest}..{MAX_INT32}")
    return value


def _optional(message: Any, name: str, lowest: int, path: str) -> int | None:
    if not message.HasField(name):
        return None
    return _at_least(getattr(message, name), lowest, f"{path}.{name}")


def _text(value: str, path: str) -> str:
    if len(value.encode()) > MAX_TEXT_BYTES:
        raise InvalidField(field=path, value=value[:80], constraint=f"must have at most {MAX_TEXT_BYTES} bytes")
    return value


def _from_table(table: Mapping[int, Any], number: int, path: str) -> Any:
    if number not in table:
        allowed = ", ".join(sorted({str(value.value) for value in table.values()}))
        raise InvalidField(field=path, value=number, constraint=f"must be one of {allowed}")
    return table[number]
