"""Plans on the wire: PlanRequest → domain, domain → Plan. Ranges are checked here; the planner assumes them."""

from collections.abc import Sequence
from typing import Any

from kvhold.v1 import plan_pb2 as pb
from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec
from kvhold_server.domain.layer_spec import LayerSpec
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import (
    Group,
    LayerCost,
    Plan,
    PlanWarning,
    RankPlan,
    Strategy,
    TensorPlacement,
)
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.planner.errors import PlanTooLarge
from kvhold_server.planner.plan import STRATEGIES
from kvhold_server.planner.request import (
    Layer,
    PlanRequest,
    Rank,
)
from kvhold_server.rpc.explanation_codec import encode_choice
from kvhold_server.rpc.planner_config_codec import decode_config
from kvhold_server.rpc.spec_codec import REQUEST_KINDS, decode_layer_spec, encode_layer_spec
from kvhold_server.rpc.wire_values import (
    MAX_INT64,
    MAX_LAYER_NAME_BYTES,
    wire,
)

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "REQUEST_KINDS",
    "STRATEGIES_BUILT",
    "decode_plan_request",
    "encode_plan",
    "encode_plan_response",
]

STRATEGIES_BUILT: tuple[Any, ...] = tuple(wire(strategy) for strategy in STRATEGIES)
LAYOUTS: tuple[Any, ...] = tuple(wire(layout) for layout in Layout)
DTYPES: tuple[Any, ...] = tuple(wire(dtype) for dtype in Dtype)

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
    config = decode_config(message.config)
    known: dict[LayerSpec, LayerSpec] = {}
    specs = []
    for index, wire_spec in enumerate(message.layer_specs):
        spec = decode_layer_spec(wire_spec, f"layer_specs[{index}]")
        specs.append(known.setdefault(spec, spec))  # equal specs are one object
    drafters = frozenset(LayerName(layer.layer_name) for r in message.ranks for layer in r.layers if layer.is_drafter)
    return PlanRequest(
        config=config,
        layer_specs=tuple(specs),
        ranks=_decode_ranks(message.ranks, specs, limits),
        drafter_layers=drafters,
    )


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


# ------------------------------------------------------------------------------------------------------------- plans


def encode_plan_response(plan: Plan, *, fold_identical_ranks: bool = False) -> pb.PlanResponse:
    """The whole answer. Raises PlanTooLarge."""
    return pb.PlanResponse(
        plan=encode_plan(plan, fold_identical_ranks=fold_identical_ranks),
        layer_costs=[_encode_cost(cost) for cost in plan.layer_costs],
        choice=None if plan.choice is None else encode_choice(plan.choice),
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
        uses_draft_pool=group.uses_draft_pool,
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
