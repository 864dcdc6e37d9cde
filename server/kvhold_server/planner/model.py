"""One model from the layers of all ranks."""

from collections.abc import Iterable, Sequence

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import LayerSpec, first_mismatch
from kvhold_server.planner.errors import KindNotPlannable, LayerSpecMismatch, RankWithoutLayers
from kvhold_server.planner.request import Layer, PlanRequest, SpecMap


def model_of(request: PlanRequest) -> SpecMap:
    """All layers of all ranks, windows widened for drafts. Raises LayerSpecMismatch, KindNotPlannable,
    RankWithoutLayers.
    """
    merged = merge_layers([(rank, request.ranks[rank].layers) for rank in distinct_ranks(request)])
    for name, spec in merged.items():
        if not spec.plannable:
            raise KindNotPlannable(layer_name=name, kind=spec.kind)
    for rank, its in enumerate(request.ranks):
        if merged and not its.layers:
            raise RankWithoutLayers(rank=rank)
    return _retaining(merged, max(0, request.config.prefill_lookahead_tokens - 1))


def merge_layers(maps: Sequence[tuple[int, Iterable[tuple[LayerName, LayerSpec]]]]) -> dict[LayerName, LayerSpec]:
    """All layers of ranks (number, layers), by first sight. Raises LayerSpecMismatch."""
    merged: dict[LayerName, LayerSpec] = {}
    first_rank: dict[LayerName, int] = {}
    for rank, layers in maps:
        for name, spec in layers:
            known = merged.setdefault(name, spec)
            first_rank.setdefault(name, rank)
            if known is not spec and known != spec:
                raise _mismatch(name, rank, first_rank[name], spec, known)
    return merged


def distinct_ranks(request: PlanRequest) -> list[int]:
    """The first rank of each different list of layers."""
    seen: list[tuple[Layer, ...]] = []
    ranks = []
    for index, rank in enumerate(request.ranks):
        if not any(layers is rank.layers or layers == rank.layers for layers in seen):
            seen.append(rank.layers)
            ranks.append(index)
    return ranks


def _retaining(specs: SpecMap, extra_tokens: int) -> SpecMap:
    widened: dict[int, LayerSpec] = {}
    for spec in specs.values():
        if id(spec) not in widened:
            widened[id(spec)] = spec.retaining(extra_tokens)
    return {name: widened[id(spec)] for name, spec in specs.items()}


def _mismatch(name: LayerName, rank: int, first_rank: int, spec: LayerSpec, known: LayerSpec) -> LayerSpecMismatch:
    difference = first_mismatch(known, spec)
    return LayerSpecMismatch(
        layer_name=name,
        rank=rank,
        first_rank=first_rank,
        field=difference.field,
        value=difference.second,
        first_value=difference.first,
    )
