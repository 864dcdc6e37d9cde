"""Layers → groups that share a block table. The first rule that applies decides:

1  nothing to group                                          no groups
2  host-resident rows are asked for, and the model has them  its groups (hisparse_groups)
3  all layers merge into one spec                            one group
4  all hold the same number of blocks                        one group, a page each (uniform_type)
5  compressed MLA with recurrent layers                      its groups (glm_groups)
6  block-outermost layout and different pages                packed groups; a group per hidden-state layer
7  otherwise make pages equal                                groups of equal pages; hidden-state groups behind them
   and where that is impossible                              everything as full attention, or refuse
"""

import dataclasses
from collections.abc import Callable

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import Family
from kvhold_server.domain.plan import PlanWarning
from kvhold_server.planner.eagle import annotate_eagle, flag_drafters
from kvhold_server.planner.errors import HisparseInvalid, NoGroupForHiddenStates, PageNotUnifiable
from kvhold_server.planner.glm_groups import glm_groups
from kvhold_server.planner.groups import Grouping, LayerGroup
from kvhold_server.planner.hidden import add_hidden_groups
from kvhold_server.planner.packed import packed_groups, pages_differ
from kvhold_server.planner.promotion import full_allocation, without_hybrid
from kvhold_server.planner.request import PlannerConfig, SpecMap
from kvhold_server.planner.uniform import uniform_spec, uniform_type
from kvhold_server.planner.uniform_pages import uniform_page_groups
from kvhold_server.planner.unify import unify_pages


def plan_groups(specs: SpecMap, config: PlannerConfig, drafters: frozenset[LayerName] = frozenset()) -> Grouping:
    """Groups for the whole model; `drafters` are marked as a drafter's. Raises the refusals of planner/errors.py."""
    if not specs:
        return Grouping(groups=())
    promoted: tuple[PlanWarning, ...] = ()
    if config.disable_hybrid_kv_cache:
        specs, promoted = without_hybrid(specs)
    if config.hisparse is not None and any(spec.family & Family.MLA for spec in specs.values()):
        grouping = _hisparse_groups(specs, config, drafters)
    else:
        grouping = _simple_groups(specs) or glm_groups(specs, config) or _hybrid_groups(specs, config, drafters)
    grouping = flag_drafters(grouping, drafters, config)
    return dataclasses.replace(grouping, warnings=(*promoted, *grouping.warnings))


def _hisparse_groups(specs: SpecMap, config: PlannerConfig, drafters: frozenset[LayerName]) -> Grouping:
    """All MLA layers in one group, which is laid out between host and device later; the others as usual."""
    mla = {name: spec for name, spec in specs.items() if spec.family & Family.MLA}
    others = {name: spec for name, spec in specs.items() if name not in mla}
    wrapper = uniform_type(mla)
    if wrapper is None:
        blocks = sorted({spec.block_size_tokens for spec in mla.values()})
        raise HisparseInvalid(field="block_size_tokens", value=blocks, constraint="must be the same in all MLA layers")
    rest = plan_groups(others, dataclasses.replace(config, hisparse=None), drafters)
    first = LayerGroup(layer_names=wrapper.layer_names, spec=wrapper)
    return Grouping(groups=(first, *rest.groups), warnings=rest.warnings)


def _simple_groups(specs: SpecMap) -> Grouping | None:
    """One group of everything, or None."""
    spec = uniform_spec(specs) or uniform_type(specs)
    return None if spec is None else Grouping(groups=(LayerGroup(layer_names=tuple(specs), spec=spec),))


def _hybrid_groups(specs: SpecMap, config: PlannerConfig, drafters: frozenset[LayerName]) -> Grouping:
    """Groups for layers that hold different numbers of blocks."""
    hidden = {name: spec for name, spec in specs.items() if spec.hidden_token_bytes is not None}
    rest = {name: spec for name, spec in specs.items() if name not in hidden}
    if not rest:
        raise NoGroupForHiddenStates(layer_names=tuple(hidden))
    if config.layout.block_outermost and pages_differ(rest):
        own = [LayerGroup(layer_names=(name,), spec=spec) for name, spec in hidden.items()]
        annotated = annotate_eagle(_dealt_apart(rest, drafters, _packed), rest, config, drafters)
        return dataclasses.replace(annotated, groups=(*annotated.groups, *own))
    unified = unify_pages(rest)
    if isinstance(unified, PageNotUnifiable):
        everything_full = full_allocation(specs)
        if everything_full is None:
            raise unified
        return everything_full
    grouping = _dealt_apart(unified, drafters, uniform_page_groups)
    grouping = dataclasses.replace(grouping, groups=add_hidden_groups(grouping.groups, hidden))
    return annotate_eagle(grouping, specs, config, drafters)


def _packed(specs: SpecMap) -> Grouping:
    return Grouping(groups=packed_groups(specs))


def _dealt_apart(specs: SpecMap, drafters: frozenset[LayerName], deal: Callable[[SpecMap], Grouping]) -> Grouping:
    """Layers dealt into groups; those of a drafter apart, in one group for each kind of them."""
    targets = {name: spec for name, spec in specs.items() if name not in drafters}
    drafts = {name: spec for name, spec in specs.items() if name in drafters}
    if not targets or not drafts:
        return deal(specs)
    together = _simple_groups(drafts)
    draft_groups = together.groups if together is not None else deal(drafts).groups
    grouping = deal(targets)
    return dataclasses.replace(grouping, groups=(*grouping.groups, *draft_groups))
