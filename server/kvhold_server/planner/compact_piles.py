"""Piles: layers that may share a block table, with what they cost however dealt and however large the block.

    pile of 8 full layers, page p      dealt into 2 groups, block × 1    │ p │ p │ p │ p │            width 4p
                                       dealt into 4 groups, block × 2    │  2p   │  2p   │            width 4p
                                       dealt into 1 group,  block × 1    │ p │ p │ p │ p │ p │ p │ p │ p │

A larger block holds more tokens, so that fewer are needed: bytes can be moved between groups, layers and tokens. A
state's page is what it is; its pile can only be dealt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv, count_specs
from kvhold_server.planner.groups import LayerGroup, uniform_type_group
from kvhold_server.planner.packed import Bucket, bucket_layers
from kvhold_server.planner.request import SpecMap

_FIXED = Family.STATE | Family.RING | Family.TAIL | Family.CROSS | Family.HIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How one pile is laid out: groups, and the multiple of its block."""

    num_groups: int
    multiple: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pile:
    """Layers of one bucket. `whole`: a drafter's, which must not be dealt."""

    bucket: Bucket
    specs: tuple[LayerSpec, ...]  # the different ones
    max_multiple: int
    whole: bool
    _blocks: dict[int, int] = field(default_factory=dict)  # by multiple; remembered, since asking a spec is slow
    _pages: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def block_size_tokens(self) -> int:
        """The block asked for."""
        return self.bucket.first.block_size_tokens

    @property
    def max_groups(self) -> int:
        """Into how many groups it can be dealt."""
        return 1 if self.whole else self.bucket.rows

    def width_bytes(self, deal: Deal) -> int:
        """Bytes of one block of its widest group."""
        pages = self._pages.get(deal.multiple)
        if pages is None:
            pages = self._pages.setdefault(deal.multiple, self._pages_of(deal.multiple))
        return sum(cdiv(len(names), deal.num_groups) * pages[page] for page, names in self.bucket.by_page.items())

    def request_blocks(self, multiple: int, limits: Limits) -> int:
        """Blocks of a longest request in each group."""
        blocks = self._blocks.get(multiple)
        if blocks is None:
            blocks = max(scaled(spec, multiple).max_request_blocks(limits) for spec in self.specs)
            self._blocks[multiple] = blocks
        return blocks

    def groups(self, layers: SpecMap, deal: Deal) -> list[LayerGroup]:
        """The groups themselves."""
        larger = {id(spec): scaled(spec, deal.multiple) for spec in self.specs}
        by_value = {spec: larger[id(spec)] for spec in self.specs}
        chosen = {name: larger.get(id(layers[name])) or by_value[layers[name]] for name in self.bucket.names}
        return [uniform_type_group(chosen, names) for names in self.bucket.deal(deal.num_groups)]

    def _pages_of(self, multiple: int) -> dict[int, int]:
        pages: dict[int, int] = {}
        for spec in self.specs:
            page = spec.page_size_bytes
            pages[page] = max(pages.get(page, 0), scaled(spec, multiple).page_size_bytes)
        return pages


def scaled(spec: LayerSpec, multiple: int) -> LayerSpec:
    """The spec with that multiple of its block."""
    return spec if multiple == 1 else spec.scaled(multiple)


def can_scale(spec: LayerSpec) -> bool:
    """Does a larger block hold more tokens of a request? Not in states, rings, and what an encoder decides."""
    return bool(spec.family & Family.ATTENTION) and not spec.family & _FIXED


def piles_of(layers: SpecMap, drafters: frozenset[LayerName], largest_block: int) -> list[Pile]:
    """The piles of a model; `drafters` in their own. No block grows beyond `largest_block` tokens."""
    targets = {name: spec for name, spec in layers.items() if name not in drafters}
    drafts = {name: spec for name, spec in layers.items() if name in drafters}
    piles = [_pile(layers, bucket, largest_block, whole=False) for bucket in bucket_layers(targets)]
    return piles + [_pile(layers, bucket, largest_block, whole=True) for bucket in bucket_layers(drafts)]


def _pile(layers: SpecMap, bucket: Bucket, largest_block: int, *, whole: bool) -> Pile:
    specs = tuple(entry.spec for entry in count_specs(layers[name] for name in bucket.names))
    multiple = max(1, largest_block // bucket.first.block_size_tokens) if _all_scale(specs) else 1
    return Pile(bucket=bucket, specs=specs, max_multiple=multiple, whole=whole)


def _all_scale(specs: Sequence[LayerSpec]) -> bool:
    return all(can_scale(spec) for spec in specs)
