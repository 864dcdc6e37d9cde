"""The planner of vLLM 0.11, for engines that expect its layout: separate tensors, each shared by one layer of every group.

    group 0   f0 f1 f2        tensor 0: f0, s0     tensor 1: f1, s1     tensor 2: f2, s2        block b of tensor i is a
    group 1   s0 s1 s2                                                                          page at b × page bytes

Only equal pages can be grouped; there is no null-block reserve, and memory is checked per rank by the sum over its layers.
Uneven ranks keep their larger tensors and only share the smaller number of blocks.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kvhold_server.domain.fingerprint import fingerprint_of
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds.attention import AttentionSpec
from kvhold_server.domain.kinds.chunked_local import ChunkedLocalSpec
from kvhold_server.domain.kinds.cross_attention import CrossAttentionSpec
from kvhold_server.domain.kinds.encoder_only import EncoderOnlySpec
from kvhold_server.domain.kinds.full import FullSpec
from kvhold_server.domain.kinds.mamba import MambaSpec
from kvhold_server.domain.kinds.mla import MlaSpec
from kvhold_server.domain.kinds.sliding_window import SlidingWindowSpec
from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec, uniform_type_of
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv, count_specs, first_mismatch
from kvhold_server.domain.plan import Group, LayerCost, Plan, PlanWarning, RankPlan, TensorPlacement
from kvhold_server.planner.capacity import longest_fitting
from kvhold_server.planner.errors import (
    InsufficientMemory,
    LayerSpecMismatch,
    NoCommonGrouping,
    NoMemory,
    NothingCached,
    NotLegacy,
    RankWithoutLayers,
    UnequalPages,
)
from kvhold_server.planner.groups import Grouping, LayerGroup
from kvhold_server.planner.promotion import hybrid_disabled_warning, promote_local_layers, promotion_refusal
from kvhold_server.planner.request import PlanRequest, SpecMap
from kvhold_server.planner.uniform import uniform_spec
from kvhold_server.planner.uniform_pages import bucket_by_equality, deal_buckets

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


def plan_legacy(request: PlanRequest) -> Plan:
    """The plan. Raises the typed refusals of planner/errors.py; changes nothing."""
    maps = [_rank_map(request, rank) for rank in range(len(request.ranks))]
    limits = dataclasses.replace(request.config.limits, max_in_flight_tokens=request.config.max_num_batched_tokens)
    if request.config.auto_fit_max_model_len:
        limits = limits.with_len(_longest_on_all(request, maps, limits))
    for rank, specs in enumerate(maps):
        _check_rank(rank, specs, request.ranks[rank].available_memory_bytes, limits)
    model = _merge_ranks(maps)
    for rank, specs in enumerate(maps):
        if model and not specs:
            raise RankWithoutLayers(rank=rank)
    grouping = _plan_groups(model, request.config.disable_hybrid_kv_cache)
    ranks = _rank_plans(request, maps, grouping.groups, limits)
    return _report(request, ranks, grouping, limits)


# ------------------------------------------------------------------------------------------------------- layers, memory


def _rank_map(request: PlanRequest, rank: int) -> SpecMap:
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


def _request_bytes(specs: SpecMap, limits: Limits) -> int:
    return sum(
        entry.count * request_blocks_of(entry.spec, limits) * entry.spec.page_size_bytes
        for entry in count_specs(specs.values())
    )


def _check_rank(rank: int, specs: SpecMap, memory: int, limits: Limits) -> None:
    if not specs:
        return
    needed = _request_bytes(specs, limits)
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
        lambda length: _request_bytes(specs, limits.with_len(length)) <= memory, limits.max_model_len_tokens
    )


def _longest_on_all(request: PlanRequest, maps: Sequence[SpecMap], limits: Limits) -> int:
    lengths = [_longest(s, r.available_memory_bytes, limits) for s, r in zip(maps, request.ranks, strict=True) if s]
    return max(1, min(lengths, default=limits.max_model_len_tokens))


def _merge_ranks(maps: Sequence[SpecMap]) -> SpecMap:
    merged: dict[LayerName, LayerSpec] = {}
    first_rank: dict[LayerName, int] = {}
    for rank, specs in enumerate(maps):
        for name, spec in specs.items():
            known = merged.setdefault(name, spec)
            first_rank.setdefault(name, rank)
            if known is not spec and known != spec:
                different = first_mismatch(known, spec)
                raise LayerSpecMismatch(
                    layer_name=name,
                    rank=rank,
                    first_rank=first_rank[name],
                    field=different.field,
                    value=different.second,
                    first_value=different.first,
                )
    return merged


# ------------------------------------------------------------------------------------------------------------- grouping


def _plan_groups(specs: SpecMap, disable_hybrid: bool) -> Grouping:
    warnings: tuple[PlanWarning, ...] = ()
    if not specs:
        return Grouping(groups=())
    if disable_hybrid and _simple_group(specs) is None:
        specs = promote_local_layers(specs, keep_blocks=True)
        if _simple_group(specs) is None:
            raise promotion_refusal(specs)
        warnings = (hybrid_disabled_warning(),)
    simple = _simple_group(specs)
    if simple is not None:
        return Grouping(groups=(simple,), warnings=warnings)
    _check_equal_pages(specs)
    buckets = bucket_by_equality(specs)
    return deal_buckets(specs, buckets, group_size=min(len(bucket.names) for bucket in buckets))


def _simple_group(specs: SpecMap) -> LayerGroup | None:
    """All layers in one group, or None."""
    merged = _merged_mla(specs) or uniform_spec(specs)
    if merged is not None:
        return LayerGroup(layer_names=tuple(specs), spec=merged)
    first_name, first = next(iter(specs.items()))
    different = [entry.spec for entry in count_specs(specs.values())]
    if any(spec.block_size_tokens != first.block_size_tokens for spec in different):
        return None
    if first.kind == EncoderOnlySpec.kind:
        raise _no_grouping(specs, first_name, next(name for name, spec in specs.items() if spec != first))
    if all(_joins(first, spec) for spec in different):
        return LayerGroup(layer_names=tuple(specs), spec=uniform_type_of(list(specs), list(specs.values())))
    return None


def _joins(first: LayerSpec, spec: LayerSpec) -> bool:
    if isinstance(first, MambaSpec):  # the page is not compared here
        return isinstance(spec, MambaSpec) and spec.num_speculative_blocks == first.num_speculative_blocks
    return first.uniform_with(spec)


def _merged_mla(specs: SpecMap) -> LayerSpec | None:
    """MLA layers count as one if their cache type is one; whether their pages are is seen when tensors are made."""
    different = [entry.spec for entry in count_specs(specs.values())]
    formats = {getattr(spec, "cache_dtype_str", None) for spec in different}
    if all(isinstance(spec, MlaSpec) for spec in different) and len(formats) == 1:
        return different[0]
    return None


def _check_equal_pages(specs: SpecMap) -> None:
    first_name, first = next(iter(specs.items()))
    for name, spec in specs.items():
        if spec.page_size_bytes != first.page_size_bytes:
            raise _no_grouping(specs, first_name, name)


def _no_grouping(specs: SpecMap, first_name: LayerName, name: LayerName) -> NoCommonGrouping:
    first, other = specs[first_name], specs[name]
    return NoCommonGrouping(
        layer_name=name,
        kind=other.kind,
        page_bytes=other.page_size_bytes,
        other_layer_name=first_name,
        other_kind=first.kind,
        other_page_bytes=first.page_size_bytes,
    )


# ------------------------------------------------------------------------------------------------------- tensors, report


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """One allocation: the layers that use it, and bytes per block."""

    layer_names: tuple[LayerName, ...]
    page_size_bytes: int


def _rank_plans(
    request: PlanRequest, maps: Sequence[SpecMap], groups: Sequence[LayerGroup], limits: Limits
) -> tuple[RankPlan, ...]:
    projected = [_project(groups, specs) for specs in maps]
    override = request.config.num_blocks_override
    shared: list[list[SharedTensor]] = []
    counts: list[int] = []
    for specs, own, rank in zip(maps, projected, request.ranks, strict=True):
        if not own:
            shared.append([])
            counts.append(1)
            continue
        _check_cached(own, limits)
        shared.append(_shared_tensors(specs, own))
        counts.append(_num_blocks(specs, own, rank.available_memory_bytes) if override is None else override)
    num_blocks = min(counts)
    return tuple(
        _rank_plan(specs, own, tensors, count, num_blocks, limits)
        for specs, own, tensors, count in zip(maps, projected, shared, counts, strict=True)
    )


def _project(groups: Sequence[LayerGroup], specs: SpecMap) -> tuple[LayerGroup, ...]:
    return tuple(
        dataclasses.replace(group, layer_names=tuple(name for name in group.layer_names if name in specs))
        for group in groups
    )


def _is_wrapped(groups: Sequence[LayerGroup]) -> bool:
    return len(groups) == 1 and isinstance(groups[0].spec, UniformTypeSpec)


def _num_blocks(specs: SpecMap, groups: Sequence[LayerGroup], memory: int) -> int:
    if _is_wrapped(groups):  # a stage divides by the pages of the whole model
        return memory // groups[0].spec.page_size_bytes
    page = _common_page(specs)
    return max(0, memory // page // max(len(group.layer_names) for group in groups))


def _common_page(specs: SpecMap) -> int:
    first_name, first = next(iter(specs.items()))
    for name, spec in specs.items():
        if spec.page_size_bytes != first.page_size_bytes:
            raise UnequalPages(
                layer_name=name,
                page_bytes=spec.page_size_bytes,
                other_layer_name=first_name,
                other_page_bytes=first.page_size_bytes,
            )
    return first.page_size_bytes


def _shared_tensors(specs: SpecMap, groups: Sequence[LayerGroup]) -> list[SharedTensor]:
    if _is_wrapped(groups):
        return [
            SharedTensor(layer_names=(name,), page_size_bytes=spec.page_size_bytes) for name, spec in groups[0].layers()
        ]
    page = _common_page(specs)
    longest = max(len(group.layer_names) for group in groups)
    return [
        SharedTensor(
            layer_names=tuple(group.layer_names[i] for group in groups if i < len(group.layer_names)),
            page_size_bytes=page,
        )
        for i in range(longest)
    ]


def _rank_plan(
    specs: SpecMap,
    groups: Sequence[LayerGroup],
    shared: Sequence[SharedTensor],
    own_blocks: int,
    num_blocks: int,
    limits: Limits,
) -> RankPlan:
    tensors: list[TensorPlacement] = []
    offset = 0
    for tensor in shared:
        size = tensor.page_size_bytes * own_blocks  # not shrunk to the common number of blocks
        tensors.append(
            TensorPlacement(
                layer_names=tensor.layer_names,
                size_bytes=size,
                offset_bytes=offset,
                layer_stride_bytes=0,
                block_stride_bytes=tensor.page_size_bytes,
                page_size_bytes=tensor.page_size_bytes,
                num_blocks=num_blocks,
            )
        )
        offset += size
    return RankPlan(
        num_blocks=num_blocks,
        bytes_per_block=sum(tensor.page_size_bytes for tensor in shared),
        needed_bytes=_request_bytes(specs, limits),
        groups=tuple(_group(group, limits) for group in groups),
        tensors=tuple(tensors),
        region_size_bytes=offset,
        needs_zeroing=any(spec.needs_zeroing for group in groups for spec in group.spec.each()),
    )


def _group(group: LayerGroup, limits: Limits) -> Group:
    return Group(
        layer_names=group.layer_names, spec=group.spec, max_request_blocks=request_blocks_of(group.spec, limits)
    )


def _check_cached(groups: Sequence[LayerGroup], limits: Limits) -> None:
    if not any(request_blocks_of(group.spec, limits) for group in groups):
        raise NothingCached(kinds=tuple(sorted({spec.kind for group in groups for spec in group.spec.each()})))


def _report(request: PlanRequest, ranks: tuple[RankPlan, ...], grouping: Grouping, limits: Limits) -> Plan:
    config = request.config
    num_blocks = ranks[0].num_blocks
    reduced = [
        dataclasses.replace(own, spec=group.first_layer_spec)
        for own, group in zip(ranks[0].groups, grouping.groups, strict=True)
    ]
    scheduler = tuple(
        dataclasses.replace(group, max_request_blocks=request_blocks_of(group.spec, limits)) for group in reduced
    )
    capacity = concurrency = None
    if scheduler:
        needed = sum(group.max_request_bytes for group in scheduler)
        if needed == 0:
            raise NothingCached(kinds=tuple(group.kind for group in scheduler))
        smallest = min(group.block_size_tokens for group in scheduler)
        capacity = num_blocks // len(scheduler) * smallest * config.decode_context_parallel_size
        concurrency = num_blocks / cdiv(needed, scheduler[0].page_size_bytes)
    plan = Plan(
        strategy=config.strategy,
        layout=config.layout,
        ranks=ranks,
        scheduler_groups=scheduler,
        max_model_len_tokens=limits.max_model_len_tokens,
        cache_block_size_tokens=None,
        scheduler_block_size_tokens=None,
        hash_block_size_tokens=None,
        capacity_tokens=capacity,
        max_concurrency=concurrency,
        max_in_flight_tokens=limits.max_in_flight_tokens,
        num_prefill_lookahead_tokens=0,
        min_request_blocks=sum(group.spec.min_request_blocks(limits) for group in scheduler),
        layer_costs=_layer_costs(request),
        warnings=grouping.warnings,
        fingerprint="",
    )
    return dataclasses.replace(plan, fingerprint=fingerprint_of(plan))


def _layer_costs(request: PlanRequest) -> tuple[LayerCost, ...]:
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
