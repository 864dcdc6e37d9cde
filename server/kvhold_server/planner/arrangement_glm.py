"""The aliasing arrangement of compressed MLA with recurrent layers, and the drafter's own pool behind it.

    │ mla 0, states i=0 of every group │ mla 1, states i=1 │ … │ idx 0, tail 0 │ idx 1, tail 1 │ … │ draft 0 │ draft 1 │
    └─ num_blocks pages of P bytes ────┴───────────────────┴───┴─ num_blocks pages of I bytes ─┴───┴─ draft pages ────┘

Each layer is one run of pages, so `layout` orders only heads and states inside a page. The drafter's pool has its own
block ids, with a null block of its own, and is sized for its window times the requests that may run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds.kpool_tail import KpoolTailSpec
from kvhold_server.domain.kinds.mla import MlaSpec
from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv
from kvhold_server.domain.plan import TensorPlacement
from kvhold_server.planner.arrangement import Arrangement, Placed
from kvhold_server.planner.groups import LayerGroup
from kvhold_server.planner.placement import place_layer
from kvhold_server.planner.request import PlannerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmParts:
    """One rank's groups by the part that they play. Row and index layers are those present on the rank."""

    attention: LayerGroup
    tails: LayerGroup | None
    states: tuple[LayerGroup, ...]
    drafts: tuple[LayerGroup, ...]
    draft_indexes: frozenset[int]
    rows: tuple[tuple[LayerName, LayerSpec], ...]
    indexers: tuple[tuple[LayerName, LayerSpec], ...]
    row_page_bytes: int
    index_page_bytes: int


def recognise(groups: Sequence[LayerGroup]) -> GlmParts | str:
    """The parts, or why these groups are not arranged so ("" if they are nothing like it)."""
    wrappers = [group for group in groups if isinstance(group.spec, UniformTypeSpec)]
    states = tuple(group for group in groups if group.spec.family & Family.STATE)
    drafts = {index: group for index, group in enumerate(groups) if group.spec.family & Family.ATTENTION}
    attention = next((group for group in reversed(wrappers) if _all_of(group, MlaSpec.kind)), None)
    tails = next((group for group in reversed(wrappers) if _all_of(group, KpoolTailSpec.kind)), None)
    if attention is None or not states:
        return ""
    if len(wrappers) != 1 + (tails is not None) or len(wrappers) + len(states) + len(drafts) != len(groups):
        return ""
    if any(spec.padded_page_size_bytes is not None for spec in attention.spec.each()):
        return ""
    layers = list(attention.layers())
    rows = tuple((name, spec) for name, spec in layers if spec.state_tokens == 1)
    indexers = tuple((name, spec) for name, spec in layers if spec.state_tokens > 1)
    row_pages = {spec.page_size_bytes for _, spec in rows}
    index_pages = {spec.page_size_bytes for _, spec in indexers}
    if len(row_pages) != 1 or len(index_pages) != 1:
        return f"its {len(rows)} MLA and {len(indexers)} indexer layers do not have one page size each"
    row_page, index_page = row_pages.pop(), index_pages.pop()
    if any(group.spec.page_size_bytes != row_page for group in states):
        return "its recurrent states do not have the page of the MLA layers"
    if any(len(group.layer_names) > len(rows) for group in states):
        return f"a group has more recurrent layers than the rank's {len(rows)} MLA layers"
    if tails is not None:
        unpadded = {spec.unpadded_page_size_bytes for spec in tails.spec.each()}
        if len(tails.layer_names) != len(indexers) or len(unpadded) != 1 or max(unpadded) > index_page:
            return f"its {len(tails.layer_names)} tails do not match its {len(indexers)} indexer layers"
    return GlmParts(
        attention=attention,
        tails=tails,
        states=states,
        drafts=tuple(drafts.values()),
        draft_indexes=frozenset(drafts),
        rows=rows,
        indexers=indexers,
        row_page_bytes=row_page,
        index_page_bytes=index_page,
    )


class GlmArrangement(Arrangement):
    """Regions per layer, states in MLA pages, tails in indexer pages."""

    def __init__(self, groups: Sequence[LayerGroup], config: PlannerConfig, parts: GlmParts) -> None:
        super().__init__(groups, config)
        self._parts = parts
        self._draft_bytes = sum(group.block_width_bytes for group in parts.drafts)
        self._has_pool = bool(parts.drafts) and config.draft_pool.enabled

    @property
    def block_bytes(self) -> int:
        """Rows and indexers; the drafter only if it has no pool of its own."""
        parts = self._parts
        target = len(parts.rows) * parts.row_page_bytes + len(parts.indexers) * parts.index_page_bytes
        return target if self._has_pool else target + self._draft_bytes

    def need_bytes(self, limits: Limits) -> int:
        """The target's blocks, and the drafter's pool in full."""
        parts = self._parts
        blocks = parts.attention.spec.max_request_blocks(limits)
        blocks += sum(group.spec.max_request_blocks(limits) for group in parts.states)
        blocks += 1 if parts.tails is not None and parts.tails.layer_names else 0
        if not self._has_pool:
            blocks += sum(group.spec.max_request_blocks(limits) for group in parts.drafts if group.layer_names)
        return blocks * self.block_bytes + self.pool_bytes(limits)

    def draft_num_blocks(self, limits: Limits) -> int | None:
        """Blocks of the drafter's pool; the same on all stages, with or without drafter layers."""
        if not self._has_pool:
            return None
        asked = self.config.draft_pool.num_blocks
        return asked if asked is not None else max(self._draft_blocks(group, limits) for group in self._parts.drafts)

    def _draft_blocks(self, group: LayerGroup, limits: Limits) -> int:
        # Without a window the drafter keeps whole requests.
        kept = group.spec.window_tokens or limits.max_model_len_tokens
        block = group.spec.block_size_tokens
        per_sequence = cdiv(kept, block) + 2
        return max(1, self.config.max_num_seqs * per_sequence + cdiv(self.config.max_num_batched_tokens, block) + 1)

    def pool_bytes(self, limits: Limits) -> int:
        """The drafter's pool."""
        return (self.draft_num_blocks(limits) or 0) * self._draft_bytes

    def pooled_groups(self) -> frozenset[int]:
        """The drafter's groups, if they have a pool."""
        return self._parts.draft_indexes if self._has_pool else frozenset()

    def place(self, num_blocks: int, limits: Limits, host_num_blocks: int | None) -> Placed:
        """Never refuses: the shape has been recognised."""
        draft_blocks = self.draft_num_blocks(limits)
        size = num_blocks * self.block_bytes + self.pool_bytes(limits)
        tensors = self._target_tensors(num_blocks, size)
        names = tuple(name for group in self._parts.drafts for name in group.layer_names)
        tensors += self._draft_tensors(num_blocks if draft_blocks is None else draft_blocks, num_blocks, size)
        return Placed(
            groups=self.groups,
            tensors=tuple(tensors),
            region_size_bytes=size,
            draft_num_blocks=draft_blocks,
            draft_layer_names=names if draft_blocks is not None else (),
        )

    def _target_tensors(self, num_blocks: int, size: int) -> list[TensorPlacement]:
        parts, layout = self._parts, self.config.layout
        tensors = []
        for index, (name, spec) in enumerate(parts.rows):
            offset = index * parts.row_page_bytes * num_blocks
            tensors.append(place_layer(name, spec, offset, num_blocks, size, layout))
            for group in parts.states:
                if index < len(group.layer_names):
                    tensors.append(place_layer(group.layer_names[index], group.spec, offset, num_blocks, size, layout))
        begin = len(parts.rows) * parts.row_page_bytes * num_blocks
        tails = list(parts.tails.layers()) if parts.tails is not None else []
        for index, (name, spec) in enumerate(parts.indexers):
            offset = begin + index * parts.index_page_bytes * num_blocks
            tensors.append(place_layer(name, spec, offset, num_blocks, size, layout))
            if tails:
                tensors.append(place_layer(*tails[index], offset, num_blocks, size, layout))
        return tensors

    def _draft_tensors(self, draft_blocks: int, num_blocks: int, size: int) -> list[TensorPlacement]:
        parts, layout = self._parts, self.config.layout
        offset = num_blocks * (len(parts.rows) * parts.row_page_bytes + len(parts.indexers) * parts.index_page_bytes)
        tensors = []
        for group in parts.drafts:
            for name, spec in group.layers():
                tensors.append(place_layer(name, spec, offset, draft_blocks, size, layout))
                offset += spec.page_size_bytes * draft_blocks
        return tensors


def _all_of(group: LayerGroup, kind: str) -> bool:
    return all(spec.kind == kind for spec in group.spec.each())
