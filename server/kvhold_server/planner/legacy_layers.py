"""Layers as the planner of vLLM 0.11 sees them: fewer kinds and fields, other costs, memory checked by the sum."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kvhold_server.domain.errors import Unsupported
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds.attention import AttentionSpec
from kvhold_server.domain.kinds.chunked_local import ChunkedLocalSpec
from kvhold_server.domain.kinds.cross_attention import CrossAttentionSpec
from kvhold_server.domain.kinds.encoder_only import EncoderOnlySpec
from kvhold_server.domain.kinds.full import FullSpec
from kvhold_server.domain.kinds.mamba import MambaSpec
from kvhold_server.domain.kinds.mla import MlaSpec
from kvhold_server.domain.kinds.sliding_window import SlidingWindowSpec
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv, count_specs
from kvhold_server.domain.plan import LayerCost
from kvhold_server.planner.capacity import longest_fitting
from kvhold_server.planner.errors import InsufficientMemory, NoMemory
from kvhold_server.planner.request import PlanRequest, SpecMap

_KINDS = frozenset(
    kind.kind
    for kind in (
        FullSpec,
        MlaSpec,
        SlidingWindowSpec,
        ChunkedLocalSpec,
        MambaSpec,
        CrossAttentionSpec,
        EncoderOnlySpec,
    )
)
_DS_MLA_ROW_BYTES = 656  # 512 latent bytes, 16 of scales, 128 of rotary keys


@dataclass(eq=False)
class NotLegacy(Unsupported):
    """The legacy strategy does not know this."""

    template = "layer {layer_name}: the legacy strategy does not know {field} = {value}: use the modern strategy"
    layer_name: str
    field: str
    value: object


def rank_map(request: PlanRequest, rank: int) -> SpecMap:
    """One rank's layers, translated. Raises NotLegacy."""
    translated: dict[int, LayerSpec] = {}
    for name, spec in request.ranks[rank].layers:
        if id(spec) not in translated:
            translated[id(spec)] = legacy_spec(name, spec)
    return {name: translated[id(spec)] for name, spec in request.ranks[rank].layers}


def legacy_spec(layer_name: LayerName, spec: LayerSpec) -> LayerSpec:
    """The spec as this strategy understands it. Raises NotLegacy for kinds and fields that it does not know."""
    if spec.kind not in _KINDS:
        raise NotLegacy(layer_name=layer_name, field="kind", value=spec.kind)
    if not isinstance(spec, AttentionSpec):
        return spec
    value_size = 0 if spec.family & Family.MLA else spec.head_size_elems
    for field, known in (
        ("head_size_v_elems", value_size),
        ("page_size_padded_bytes", None),
        ("num_head_slots", None),
        ("state_content_bytes", None),
        ("tokens_per_state", 1),
        ("alignment_bytes", None),
    ):
        if getattr(spec, field, known) != known:
            raise NotLegacy(layer_name=layer_name, field=field, value=getattr(spec, field))
    if isinstance(spec, MlaSpec) and spec.cache_dtype_str == "fp8_ds_mla":
        return dataclasses.replace(spec, num_head_slots=1, state_content_bytes=_DS_MLA_ROW_BYTES)
    return spec


def request_blocks_of(spec: LayerSpec, limits: Limits) -> int:
    """Most blocks of one request: as in the other strategies, but a recurrent state is always one."""
    return max(1 if s.family & Family.STATE else s.max_request_blocks(limits) for s in spec.each())


def request_bytes(specs: SpecMap, limits: Limits) -> int:
    """Bytes of one request, layer by layer."""
    return sum(
        entry.count * request_blocks_of(entry.spec, limits) * entry.spec.page_size_bytes
        for entry in count_specs(specs.values())
    )


def check_rank(rank: int, specs: SpecMap, memory: int, limits: Limits) -> None:
    """Raises NoMemory, InsufficientMemory, and what a spec has against itself."""
    if not specs:
        return
    needed = request_bytes(specs, limits)
    block = sum(spec.page_size_bytes for spec in specs.values())
    common = {
        "rank": rank,
        "available_bytes": memory,
        "block_bytes": block,
        "needed_bytes": needed,
        "min_blocks": cdiv(needed, block),
        "max_model_len_tokens": limits.max_model_len_tokens,
    }
    if memory <= 0:
        raise NoMemory(**common)
    for name, spec in specs.items():
        spec.check(name, limits)
    if needed > memory:
        raise InsufficientMemory(**common, estimated_max_model_len_tokens=_longest(specs, memory, limits))


def _longest(specs: SpecMap, memory: int, limits: Limits) -> int:
    return longest_fitting(
        lambda length: request_bytes(specs, limits.with_len(length)) <= memory, limits.max_model_len_tokens
    )


def longest_on_all(request: PlanRequest, maps: Sequence[SpecMap], limits: Limits) -> int:
    """The longest request that fits on every rank, at least 1."""
    lengths = [_longest(s, r.available_memory_bytes, limits) for s, r in zip(maps, request.ranks, strict=True) if s]
    return max(1, min(lengths, default=limits.max_model_len_tokens))


def legacy_costs(request: PlanRequest) -> tuple[LayerCost, ...]:
    """What each requested spec costs by itself."""
    limits = dataclasses.replace(request.config.limits, max_in_flight_tokens=request.config.max_num_batched_tokens)
    costs = []
    for spec in request.layer_specs:
        own = legacy_spec(LayerName("-"), spec)
        costs.append(
            LayerCost(
                kind=own.kind,
                page_size_bytes=own.page_size_bytes,
                unpadded_page_size_bytes=own.unpadded_page_size_bytes,
                max_request_blocks=request_blocks_of(own, limits),
                table_row_blocks=request_blocks_of(own, limits),
                num_states=own.num_states,
                prefix_cacheable=own.prefix_cacheable,
            )
        )
    return tuple(costs)
