"""The options of the compact strategy, each with what it costs by formula. Nothing is laid out here.

Memory that one longest request takes = bytes of a block × Σ over groups of its blocks, because every block id costs
what the widest group's costs. So an option is a target width, and for every pile the cheapest deal that is not wider:

    width 6p   full    1 layer, block × 6   │      6p       │        none wider than 6p, none much narrower
               window  6 groups of 6        │p │p │p │p │p │p │
               states  3 groups of 1        │     5.5p    │.│

Packed options need pages side by side in a block (block-outermost layouts). Uniform options make all pages equal and
then look for the group size; they work in every layout.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv, round_up
from kvhold_server.domain.layouts import Layout
from kvhold_server.planner.compact_piles import Deal, Pile, can_scale, piles_of
from kvhold_server.planner.eagle import annotate_eagle
from kvhold_server.planner.groups import Grouping, LayerGroup
from kvhold_server.planner.hidden import add_hidden_groups
from kvhold_server.planner.packed import distinct_specs
from kvhold_server.planner.request import PlannerConfig, SpecMap
from kvhold_server.planner.uniform import uniform_spec, uniform_type
from kvhold_server.planner.uniform_pages import MergedBucket, bucket_by_merging, deal_buckets

_WIDTH_MULTIPLES = (1, 2, 3, 4)
_GROWN_AT_MOST = 4  # a common page is at most that many times the largest
_MOST_WIDTHS = 160
_MOST_DEALS = 20_000  # compared for one request, whatever it has
_MOST_PAGES = 6
_MANY_SPECS = 256  # beyond that, only the largest page is tried
SWAPPED = {Layout.LBHNC: Layout.BLHNC, Layout.LBNHC: Layout.BLNHC}
DEFAULT_MAX_GROUPS = 12


def bound_of(config: PlannerConfig) -> int:
    """The bound on block tables per request that options keep."""
    bound = config.compact.max_num_groups
    return DEFAULT_MAX_GROUPS if bound is None else bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """The layers that may be grouped freely, and the settings that decide their cost."""

    layers: SpecMap  # all, windows widened
    config: PlannerConfig
    drafters: frozenset[LayerName]

    @property
    def hidden(self) -> dict[LayerName, LayerSpec]:
        """Hidden-state layers, which have a group each."""
        return {name: spec for name, spec in self.layers.items() if spec.hidden_token_bytes is not None}

    @property
    def rest(self) -> dict[LayerName, LayerSpec]:
        """All others."""
        return {name: spec for name, spec in self.layers.items() if spec.hidden_token_bytes is None}

    @property
    def largest_block_tokens(self) -> int:
        """No block needs to be larger than a request."""
        bound = self.config.compact.max_block_size_tokens
        return self.config.max_model_len_tokens if bound is None else min(bound, self.config.max_model_len_tokens)

    @property
    def max_groups(self) -> int:
        """The bound on block tables per request."""
        return bound_of(self.config)

    @property
    def packing_layout(self) -> Layout | None:
        """The layout in which pages of any size lie side by side: the one asked for, or with L and B exchanged."""
        asked = self.config.layout
        if asked.block_outermost:
            return asked if asked.block_compact else None
        return None if self.config.compact.keep_layout else SWAPPED.get(asked)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option(ABC):
    """Base of the two ways to group."""

    model: Model
    layout: Layout
    num_groups: int
    grid_tokens: int
    request_bytes: int  # by formula, on a rank that has all layers

    @property
    @abstractmethod
    def description(self) -> str:
        """In words."""

    @property
    @abstractmethod
    def key(self) -> tuple[object, ...]:
        """Options of equal keys are the same."""

    @abstractmethod
    def build(self) -> Grouping:
        """The groups. Raises typed refusals."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedOption(Option):
    """Pages side by side, each pile with its own block."""

    piles: tuple[Pile, ...]
    deals: tuple[Deal, ...]

    @property
    def description(self) -> str:
        """E.g. "packed: 36 sliding_window in 6 groups, 1 full_attention in 1 group with block 96"."""
        parts = []
        for pile, deal in zip(self.piles, self.deals, strict=True):
            groups = "1 group" if deal.num_groups == 1 else f"{deal.num_groups} groups"
            block = f" with block {pile.block_size_tokens * deal.multiple}" if deal.multiple > 1 else ""
            parts.append(f"{len(pile.bucket.names)} {pile.bucket.first.kind} in {groups}{block}")
        return "packed: " + ", ".join(parts)

    @property
    def key(self) -> tuple[object, ...]:
        """Layout and deals."""
        return (self.layout, *((deal.num_groups, deal.multiple) for deal in self.deals))

    def build(self) -> Grouping:
        """One group after the other, hidden states behind them."""
        model = self.model
        groups: list[LayerGroup] = []
        for pile, deal in zip(self.piles, self.deals, strict=True):
            groups += pile.groups(model.layers, deal)
        annotated = annotate_eagle(Grouping(groups=tuple(groups)), model.rest, model.config, model.drafters)
        own = [LayerGroup(layer_names=(name,), spec=spec) for name, spec in model.hidden.items()]
        return Grouping(groups=(*annotated.groups, *own), warnings=annotated.warnings)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UniformOption(Option):
    """Equal pages, groups of at most `group_size` layers."""

    unified: Mapping[LayerName, LayerSpec]
    page_size_bytes: int
    group_size: int
    buckets: tuple[MergedBucket, ...]
    drafts: tuple[LayerGroup, ...]

    @property
    def description(self) -> str:
        """E.g. "equal pages of 8192 bytes, groups of 10"."""
        return f"equal pages of {self.page_size_bytes} bytes, groups of {self.group_size}"

    @property
    def key(self) -> tuple[object, ...]:
        """Layout, blocks, group size."""
        blocks = tuple(bucket.spec.block_size_tokens for bucket in self.buckets)
        return (self.layout, "uniform", self.page_size_bytes, self.group_size, blocks)

    def build(self) -> Grouping:
        """Dealt, with the drafter's groups and those of hidden states behind. Raises PageDoesNotScale."""
        model = self.model
        dealt = deal_buckets(self.unified, self.buckets, self.group_size)
        groups = add_hidden_groups((*dealt.groups, *self.drafts), model.hidden)
        grouping = Grouping(groups=groups, warnings=dealt.warnings)
        return annotate_eagle(grouping, model.layers, model.config, model.drafters)


def options_of(model: Model) -> Iterator[Option]:
    """Every option worth comparing, in an order that depends on the request only."""
    limits = model.config.limits
    yield from _uniform_options(model, model.config.layout, limits)
    if model.packing_layout is not None:
        yield from _packed_options(model, model.packing_layout, limits)


# ------------------------------------------------------------------------------------------------------------- packed


def _packed_options(model: Model, layout: Layout, limits: Limits) -> Iterator[Option]:
    piles = piles_of(model.rest, model.drafters, model.largest_block_tokens)
    hidden = list(model.hidden.values())
    most_groups = model.max_groups - len(hidden) - len(piles) + 1  # of one pile, with a group for each other
    if most_groups < 1:
        return
    least = max((spec.page_size_bytes for spec in hidden), default=1)
    hidden_blocks = sum(spec.max_request_blocks(limits) for spec in hidden)
    alignment = math.lcm(*(spec.block_stride_alignment_bytes or 1 for spec in distinct_specs(model.layers)))
    seen: set[tuple[object, ...]] = set()
    for most_multiple in (1, model.largest_block_tokens):
        for width in _widths(piles, least, most_groups):
            deals = [_cheapest(pile, width, most_multiple, most_groups, limits) for pile in piles]
            if any(deal is None for deal in deals):
                continue
            chosen = tuple(deal for deal in deals if deal is not None)
            if chosen in seen:
                continue
            seen.add(chosen)
            option = _packed(model, layout, limits, tuple(piles), chosen, (least, hidden_blocks, alignment))
            if option.num_groups <= model.max_groups:
                yield option


def _packed(
    model: Model,
    layout: Layout,
    limits: Limits,
    piles: tuple[Pile, ...],
    deals: tuple[Deal, ...],
    others: tuple[int, int, int],
) -> PackedOption:
    least, hidden_blocks, alignment = others
    pairs = list(zip(piles, deals, strict=True))
    width = max(least, *(pile.width_bytes(deal) for pile, deal in pairs))
    blocks = hidden_blocks + sum(deal.num_groups * pile.request_blocks(deal.multiple, limits) for pile, deal in pairs)
    return PackedOption(
        model=model,
        layout=layout,
        piles=piles,
        deals=deals,
        num_groups=sum(deal.num_groups for deal in deals) + len(model.hidden),
        grid_tokens=math.lcm(*(pile.block_size_tokens * deal.multiple for pile, deal in pairs)),
        request_bytes=round_up(width, alignment) * blocks,
    )


def _widths(piles: list[Pile], least: int, max_groups: int) -> list[int]:
    """Widths that some pile fills exactly, from a few groups and small multiples."""
    widths = set()
    for pile in piles:
        for num_groups in range(1, min(pile.max_groups, max_groups) + 1):
            for multiple in _WIDTH_MULTIPLES:
                if multiple <= pile.max_multiple:
                    widths.add(pile.width_bytes(Deal(num_groups=num_groups, multiple=multiple)))
    floor = max(
        least, *(pile.width_bytes(Deal(num_groups=min(pile.max_groups, max_groups), multiple=1)) for pile in piles)
    )
    wide_enough = sorted(width for width in widths if width >= floor)
    step = cdiv(len(wide_enough), min(_MOST_WIDTHS, max(8, _MOST_DEALS // (len(piles) * max_groups))))
    return wide_enough[::step] if step > 1 else wide_enough


def _cheapest(pile: Pile, width: int, most_multiple: int, max_groups: int, limits: Limits) -> Deal | None:
    """The deal not wider than `width` that takes fewest blocks; of equals the one with fewer groups, smaller blocks."""
    best: tuple[int, int, int] | None = None
    for num_groups in range(1, min(pile.max_groups, max_groups) + 1):
        single = pile.width_bytes(Deal(num_groups=num_groups, multiple=1))
        largest = min(width // single, pile.max_multiple, most_multiple)
        for multiple in {largest, 1 << largest.bit_length() - 1} if largest else ():
            if pile.width_bytes(Deal(num_groups=num_groups, multiple=multiple)) <= width:
                blocks = num_groups * pile.request_blocks(multiple, limits)
                candidate = (blocks, num_groups, multiple)
                best = candidate if best is None else min(best, candidate)
        if largest and pile.max_multiple == 1:
            break  # more groups only cost more
    return None if best is None else Deal(num_groups=best[1], multiple=best[2])


# ------------------------------------------------------------------------------------------------------ uniform pages


def _uniform_options(model: Model, layout: Layout, limits: Limits) -> Iterator[Option]:
    seen: set[tuple[object, ...]] = set()
    for page in _common_pages(model.rest):
        unified = _unified(model, page)
        if unified is None:
            continue
        targets = {name: spec for name, spec in unified.items() if name not in model.drafters}
        drafts = _draft_groups({name: spec for name, spec in unified.items() if name in model.drafters})
        if drafts is None or not targets:
            continue
        buckets = tuple(bucket_by_merging(targets))
        most = model.max_groups - len(drafts) - len(model.hidden)
        for size in _group_sizes(buckets, drafts, most):
            option = _uniform(model, layout, limits, unified, page, size, buckets, drafts)
            if option.key not in seen:
                seen.add(option.key)
                yield option


def _uniform(
    model: Model,
    layout: Layout,
    limits: Limits,
    unified: SpecMap,
    page: int,
    size: int,
    buckets: tuple[MergedBucket, ...],
    drafts: tuple[LayerGroup, ...],
) -> UniformOption:
    blocks = sum(cdiv(len(bucket.names), size) * bucket.spec.max_request_blocks(limits) for bucket in buckets)
    blocks += sum(group.spec.max_request_blocks(limits) for group in drafts)
    blocks += sum(spec.max_request_blocks(limits) for spec in model.hidden.values())
    return UniformOption(
        model=model,
        layout=layout,
        unified=unified,
        page_size_bytes=page,
        group_size=size,
        buckets=buckets,
        drafts=drafts,
        num_groups=sum(cdiv(len(bucket.names), size) for bucket in buckets) + len(drafts) + len(model.hidden),
        grid_tokens=math.lcm(*(bucket.spec.block_size_tokens for bucket in buckets)),
        request_bytes=size * page * blocks,
    )


def _common_pages(layers: SpecMap) -> list[int]:
    """Sizes that all pages may be brought to: the largest, and multiples of the others just above it."""
    specs = distinct_specs(layers)
    largest = max(spec.page_size_bytes for spec in specs)
    growing = sorted({spec.page_size_bytes for spec in specs if can_scale(spec)})
    pages = {largest, *(round_up(largest, page) for page in growing)}
    if growing:
        pages.add(round_up(largest, math.lcm(*growing)))
    if len(specs) > _MANY_SPECS:
        return [largest]
    return sorted(page for page in pages if page <= _GROWN_AT_MOST * largest)[:_MOST_PAGES]


def _unified(model: Model, page: int) -> dict[LayerName, LayerSpec] | None:
    """All layers with that page: as many tokens as fit into it, then padding; None where a page cannot be padded."""
    grown: dict[int, LayerSpec] = {}
    for spec in distinct_specs(model.rest):
        larger = _filled(spec, page, model.largest_block_tokens)
        if larger is None or larger.page_size_bytes != page:
            return None
        grown[id(spec)] = larger
    return {name: grown[id(spec)] for name, spec in model.rest.items()}


def _filled(spec: LayerSpec, page: int, largest_block: int) -> LayerSpec | None:
    if spec.page_size_bytes == page:
        return spec
    factor = (
        min(page // spec.page_size_bytes, max(1, largest_block // spec.block_size_tokens)) if can_scale(spec) else 1
    )
    larger = spec.scaled(factor) if factor > 1 else spec
    if larger.page_size_bytes == page:
        return larger
    padded = None if spec.family & Family.MLA or larger.page_size_bytes > page else larger.padded_to(page)
    return padded


def _draft_groups(drafts: SpecMap) -> tuple[LayerGroup, ...] | None:
    """A drafter's one group; None where its layers cannot share a block table."""
    if not drafts:
        return ()
    spec = uniform_spec(drafts) or uniform_type(drafts)
    return None if spec is None else (LayerGroup(layer_names=tuple(drafts), spec=spec),)


def _group_sizes(buckets: tuple[MergedBucket, ...], drafts: tuple[LayerGroup, ...], most_groups: int) -> list[int]:
    """Sizes at which some bucket needs a group less, as far as the number of groups allows."""
    lengths = [len(bucket.names) for bucket in buckets]
    sizes = {cdiv(length, count) for length in lengths for count in range(1, min(length, most_groups) + 1)}
    sizes |= {len(group.layer_names) for group in drafts}
    least = max((len(group.layer_names) for group in drafts), default=1)
    allowed = [size for size in sizes if size >= least]
    return sorted(size for size in allowed if sum(cdiv(length, size) for length in lengths) <= most_groups)
