"""Allocating local attention like full attention: one block table for everything, at the price of memory."""

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import Family, LayerSpec
from kvhold_server.domain.plan import PlanWarning, WarningType
from kvhold_server.planner.errors import PromotionFailed
from kvhold_server.planner.groups import Grouping, LayerGroup
from kvhold_server.planner.request import SpecMap
from kvhold_server.planner.uniform import joins, uniform_spec, uniform_type


def promote_local_layers(specs: SpecMap, *, keep_blocks: bool = False) -> dict[LayerName, LayerSpec]:
    """Local layers as full ones, if there are full ones beside them.

    They take the full layers' block if that is one size, unless told to keep their own.
    """
    families = [spec.family for spec in specs.values()]
    has_full = any(family & Family.FULL for family in families)
    has_local = any(family & (Family.SLIDING | Family.CHUNKED) for family in families)
    if not (has_full and has_local):
        return dict(specs)
    full_blocks = {spec.block_size_tokens for spec in specs.values() if spec.family & Family.FULL}
    common = full_blocks.pop() if len(full_blocks) == 1 and not keep_blocks else None
    promoted: dict[int, LayerSpec] = {}  # by object: equal objects stay shared
    for spec in specs.values():
        if id(spec) not in promoted:
            promoted[id(spec)] = spec.promoted(common or spec.block_size_tokens) or spec
    return {name: promoted[id(spec)] for name, spec in specs.items()}


def without_hybrid(specs: SpecMap) -> tuple[SpecMap, tuple[PlanWarning, ...]]:
    """The layers as `disable_hybrid_kv_cache` wants them. Raises PromotionFailed, ConflictingWindows."""
    if uniform_spec(specs) is not None or uniform_type(specs) is not None:
        return specs, ()
    promoted = promote_local_layers(specs)
    if uniform_spec(promoted) is None and uniform_type(promoted) is None:
        raise promotion_refusal(promoted)
    return promoted, (hybrid_disabled_warning(),)


def hybrid_disabled_warning() -> PlanWarning:
    """Said where local layers were promoted."""
    message = "disable_hybrid_kv_cache: local layers are allocated like full ones and take memory for every token"
    return PlanWarning(type=WarningType.HYBRID_DISABLED, message=message)


def full_allocation(specs: SpecMap) -> Grouping | None:
    """One group of everything as full attention, for pages that no other grouping unifies; None where it is not
    possible.
    """
    families = [spec.family for spec in specs.values()]
    if any(family & (Family.HIDDEN | Family.SLIDING_MLA | Family.CHUNKED) for family in families):
        return None
    if not (any(family & Family.MLA for family in families) and any(family & Family.SLIDING for family in families)):
        return None
    wrapper = uniform_type(promote_local_layers(specs))
    if wrapper is None:
        return None
    message = "page sizes cannot be unified: sliding-window layers are allocated like full ones"
    return Grouping(
        groups=(LayerGroup(layer_names=wrapper.layer_names, spec=wrapper),),
        warnings=(PlanWarning(type=WarningType.PAGES_NOT_UNIFIABLE, message=message),),
    )


def promotion_refusal(specs: SpecMap) -> PromotionFailed:
    first_name, first = next(iter(specs.items()))
    for name, spec in specs.items():
        if not joins(first, spec):
            return PromotionFailed(layer_name=name, kind=spec.kind, other_layer_name=first_name, other_kind=first.kind)
    last_name, last = next(reversed(list(specs.items())))
    return PromotionFailed(layer_name=last_name, kind=last.kind, other_layer_name=first_name, other_kind=first.kind)
