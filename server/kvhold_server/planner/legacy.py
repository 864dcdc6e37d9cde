"""The planner of vLLM 0.11: separate tensors, each shared by one layer of every group.

    group 0   f0 f1 f2        tensor 0: f0, s0     tensor 1: f1, s1     tensor 2: f2, s2        block b of tensor i is a
    group 1   s0 s1 s2                                                                          page at b × page bytes

Only equal pages can be grouped; there is no null-block reserve, and memory is checked per rank by the sum over its
layers. Uneven ranks keep their larger tensors and only share the smaller number of blocks.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kvhold_server.domain.errors import PreconditionFailed, Unsupported
from kvhold_server.domain.fingerprint import fingerprint_of
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds.encoder_only import EncoderOnlySpec
from kvhold_server.domain.kinds.mla import MlaSpec
from kvhold_server.domain.kinds.sliding_window import same
from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec, uniform_type_of
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv, count_specs
from kvhold_server.domain.plan import Group, Plan, PlanWarning, RankPlan, TensorPlacement
from kvhold_server.planner.errors import RankWithoutLayers
from kvhold_server.planner.groups import Grouping, LayerGroup
from kvhold_server.planner.legacy_layers import (
    check_rank,
    legacy_costs,
    longest_on_all,
    rank_map,
    request_blocks_of,
    request_bytes,
)
from kvhold_server.planner.model import merge_layers
from kvhold_server.planner.promotion import hybrid_disabled_warning, promote_local_layers, promotion_refusal
from kvhold_server.planner.request import PlanRequest, SpecMap
from kvhold_server.planner.uniform import uniform_spec
from kvhold_server.planner.uniform_pages import bucket_by_equality, deal_buckets


@dataclass(eq=False)
class NoCommonGrouping(Unsupported):
    """The legacy strategy groups layers of equal pages only."""

    template = (
        "the legacy strategy cannot group layer {layer_name} ({kind}, page {page_bytes} bytes) with layer "
        "{other_layer_name} ({other_kind}, page {other_page_bytes} bytes): use the modern strategy"
    )
    layer_name: str
    kind: str
    page_bytes: int
    other_layer_name: str
    other_kind: str
    other_page_bytes: int


@dataclass(eq=False)
class NothingCached(PreconditionFailed):
    """No layer of the request holds a block for any request."""

    template = "no group needs a block for a request (kinds: {kinds}): there is nothing to plan; leave the layers out"
    kinds: tuple[str, ...]


@dataclass(eq=False)
class UnequalPages(PreconditionFailed):
    """Layers of one legacy tensor must have one page size."""

    template = (
        "layer {layer_name} has a page of {page_bytes} bytes and layer {other_layer_name} one of "
        "{other_page_bytes}, though "
        "their specs count as one: give them the same geometry or use the modern strategy"
    )
    layer_name: str
    page_bytes: int
    other_layer_name: str
    other_page_bytes: int


def plan_legacy(request: PlanRequest) -> Plan:
    """The plan. Raises the typed refusals of planner/errors.py; changes nothing."""
    maps = [rank_map(request, rank) for rank in range(len(request.ranks))]
    limits = dataclasses.replace(request.config.limits, max_in_flight_tokens=request.config.max_num_batched_tokens)
    if request.config.auto_fit_max_model_len:
        limits = limits.with_len(longest_on_all(request, maps, limits))
    for rank, specs in enumerate(maps):
        check_rank(rank, specs, request.ranks[rank].available_memory_bytes, limits)
    model = merge_layers([(rank, specs.items()) for rank, specs in enumerate(maps)])
    for rank, specs in enumerate(maps):
        if model and not specs:
            raise RankWithoutLayers(rank=rank)
    grouping = _plan_groups(model, request.config.disable_hybrid_kv_cache)
    ranks = _rank_plans(request, maps, grouping.groups, limits)
    return _report(request, ranks, grouping, limits)


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
    if first.family & Family.STATE:  # the page is not compared here
        return same(first, spec, "num_speculative_blocks")
    return first.uniform_with(spec)


def _merged_mla(specs: SpecMap) -> LayerSpec | None:
    """MLA layers count as one if their cache type is one; whether their pages are is seen when tensors are made."""
    different = [entry.spec for entry in count_specs(specs.values())]
    formats = {getattr(spec, "cache_dtype_str", None) for spec in different}
    if all(spec.kind == MlaSpec.kind for spec in different) and len(formats) == 1:
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


# ------------------------------------------------------------------------------------------------------------ tensors


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
        needed_bytes=request_bytes(specs, limits),
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
        layer_costs=legacy_costs(request),
        warnings=grouping.warnings,
        fingerprint="",
    )
    return dataclasses.replace(plan, fingerprint=fingerprint_of(plan))
