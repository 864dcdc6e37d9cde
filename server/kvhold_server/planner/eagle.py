"""Which groups belong to a drafter: their hits lose the last block, because the drafter reads one token further."""

import dataclasses
from collections.abc import Sequence

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import Family
from kvhold_server.domain.plan import PlanWarning, WarningType
from kvhold_server.planner.groups import Grouping, LayerGroup
from kvhold_server.planner.request import PlannerConfig, SpecMap

_TRAILING_DRAFT_MODELS = frozenset({"deepseek_v4", "deepseek_v41"})  # their drafter is registered last


def annotate_eagle(
    grouping: Grouping, specs: SpecMap, config: PlannerConfig, drafters: frozenset[LayerName] = frozenset()
) -> Grouping:
    """The grouping with drafter groups flagged, and a warning where a drafter was expected and none was found."""
    if drafters:  # known, so that nothing is to be guessed
        return flag_drafters(grouping, drafters, config)
    if not config.drops_eagle_block:
        return _with_warning(grouping, config)
    flagged = {index for index, group in enumerate(grouping.groups) if _decodes_without_order(group)}
    flagged |= _trailing_draft_group(grouping.groups, specs, config)
    groups = tuple(
        dataclasses.replace(group, is_eagle_group=True) if index in flagged else group
        for index, group in enumerate(grouping.groups)
    )
    return _with_warning(dataclasses.replace(grouping, groups=groups), config)


def flag_drafters(grouping: Grouping, drafters: frozenset[LayerName], config: PlannerConfig) -> Grouping:
    """The groups that hold layers marked as a drafter's flagged, and no others."""
    if not drafters or not config.drops_eagle_block:
        return grouping
    groups = tuple(
        dataclasses.replace(group, is_eagle_group=not drafters.isdisjoint(group.layer_names))
        for group in grouping.groups
    )
    return dataclasses.replace(grouping, groups=groups)


def _decodes_without_order(group: LayerGroup) -> bool:
    return any(spec.decodes_without_order for spec in group.spec.each())


def _trailing_draft_group(groups: Sequence[LayerGroup], specs: SpecMap, config: PlannerConfig) -> set[int]:
    assert config.speculation is not None
    if config.speculation.method != "mtp" and config.model_type not in _TRAILING_DRAFT_MODELS:
        return set()
    grouped = [name for group in groups for name in group.layer_names]
    if len(grouped) != len(specs) or set(grouped) != set(specs):
        return set()
    last = next(reversed(list(specs)))
    return {next(index for index, group in enumerate(groups) if last in group.layer_names)}


def _with_warning(grouping: Grouping, config: PlannerConfig) -> Grouping:
    has_state = any(spec.family & Family.STATE for group in grouping.groups for spec in group.spec.each())
    flagged = any(group.is_eagle_group for group in grouping.groups)
    if config.speculation is None or not config.is_eagle_family or flagged or not has_state:
        return grouping
    message = (
        f"speculation with {config.speculation.method} and recurrent layers, but no group is known to be the "
        f"drafter's: "
        "hits are not shortened for it"
    )
    warning = PlanWarning(type=WarningType.NO_EAGLE_GROUP, message=message)
    return dataclasses.replace(grouping, warnings=(*grouping.warnings, warning))
