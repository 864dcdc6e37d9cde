"""Grouping for models of compressed MLA with an indexer and recurrent layers (GLM-5-Next).

Recurrent states lie in the bytes of MLA pages, and pooled-key tails in those of indexer pages, because a block id is
used by one group at a time. So there are as many recurrent groups as it takes for each state layer to find an MLA
layer.

    block 7 as an attention block:   │ mla 0 │ mla 1 │ mla 2 │ idx 0 │ idx 1 │
    block 7 as a block of states:    │ st 0  │ st 3  │ st 6  │       │       │        first of the groups of states
    block 7 as a tail block:         │       │       │       │ tail 0│ tail 1│

Drafter layers have a block pool of their own (arrangement_glm.py). A model of another shape is left to ordinary
grouping.
"""

import dataclasses
from dataclasses import dataclass

from kvhold_server.domain.errors import InvalidRequest, Unsupported
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds.draft_sliding_window import draft_window_of
from kvhold_server.domain.kinds.full import FullSpec
from kvhold_server.domain.kinds.mla import MlaSpec
from kvhold_server.domain.kinds.sliding_window import SlidingWindowSpec
from kvhold_server.domain.layer_spec import Family, LayerSpec, count_specs
from kvhold_server.planner.groups import Grouping, LayerGroup
from kvhold_server.planner.pipeline import num_state_groups
from kvhold_server.planner.request import DraftPool, PlannerConfig, SpecMap
from kvhold_server.planner.uniform import uniform_type
from kvhold_server.planner.uniform_pages import bucket_by_equality

_DRAFT_BLOCK_TOKENS = 256  # fits the kernels of known drafters


@dataclass(eq=False)
class StatePageTooLarge(InvalidRequest):
    """A recurrent state must fit the page of the MLA layer whose bytes it shares."""

    template = (
        "layer {layer_name}: its state of {state_bytes} bytes does not fit the MLA page of {page_bytes} bytes: use "
        "more "
        "tensor parallelism, larger blocks or a wider cache type"
    )
    layer_name: str
    state_bytes: int
    page_bytes: int


@dataclass(eq=False)
class DraftBlockSizeInvalid(InvalidRequest):
    """The drafter's block must divide the target's."""

    template = (
        "draft_pool.block_size_tokens {block_size_tokens} must be a positive multiple of 64 that divides the target's "
        "block of {target_block_size_tokens}"
    )
    block_size_tokens: int
    target_block_size_tokens: int


@dataclass(eq=False)
class DrafterNotPlaceable(Unsupported):
    """A drafter layer does not fit beside the target's layers."""

    template = "drafter layer {layer_name}: {field} {value} {constraint}"
    layer_name: str
    field: str
    value: object
    constraint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmShape:
    """The layers of such a model by the part that they play."""

    attention: SpecMap  # MLA rows and indexer rows, all exactly MLA
    states: SpecMap
    tails: SpecMap
    drafts: SpecMap
    mla_page_bytes: int
    mla_names: tuple[LayerName, ...]
    index_page_bytes: int


def glm_groups(specs: SpecMap, config: PlannerConfig) -> Grouping | None:
    """The groups, or None if the model does not have the shape.

    Raises StatePageTooLarge, StageWithoutMla, PartitionInvalid, LayerIndexUnclear, DrafterNotPlaceable,
    DraftBlockSizeInvalid.
    """
    shape = glm_shape(specs)
    attention = uniform_type(shape.attention) if shape is not None else None
    if shape is None or attention is None:
        return None
    tails = _tail_group(shape)
    if shape.tails and tails is None:
        return None
    groups = [LayerGroup(layer_names=attention.layer_names, spec=attention)]
    groups += [tails] if tails is not None else []
    groups += _state_groups(shape, config)
    groups += draft_groups(shape.drafts, attention.block_size_tokens, config.draft_pool)
    return Grouping(groups=tuple(groups))


def glm_shape(specs: SpecMap) -> GlmShape | None:
    """The parts, or None if a layer plays none of them or their pages do not agree."""
    states = {name: spec for name, spec in specs.items() if spec.family & Family.STATE}
    tails = {name: spec for name, spec in specs.items() if spec.family & Family.TAIL}
    drafts = {name: spec for name, spec in specs.items() if spec.kind in (SlidingWindowSpec.kind, FullSpec.kind)}
    attention = {n: s for n, s in specs.items() if n not in states and n not in tails and n not in drafts}
    if not states or not attention or any(spec.kind != MlaSpec.kind for spec in attention.values()):
        return None
    if any(spec.padded_page_size_bytes is not None for spec in attention.values()):
        return None
    rows = {name: spec for name, spec in attention.items() if spec.state_tokens == 1}
    index = [spec for spec in attention.values() if spec.state_tokens > 1]
    row_pages = {spec.page_size_bytes for spec in rows.values()}
    index_pages = {spec.page_size_bytes for spec in index}
    if len(row_pages) != 1 or len(index_pages) != 1 or len(rows) + len(index) != len(attention):
        return None
    if len(count_specs(states.values())) != 1:
        return None
    return GlmShape(
        attention=attention,
        states=states,
        tails=tails,
        drafts=drafts,
        mla_page_bytes=row_pages.pop(),
        mla_names=tuple(rows),
        index_page_bytes=index_pages.pop(),
    )


def _tail_group(shape: GlmShape) -> LayerGroup | None:
    """The tails, padded to the indexer pages whose bytes they use; None if there are none or they do not fit."""
    padded: dict[LayerName, LayerSpec] = {}
    for name, spec in shape.tails.items():
        if spec.unpadded_page_size_bytes > shape.index_page_bytes:
            return None
        padded[name] = spec.padded_to(shape.index_page_bytes) or spec
    wrapper = uniform_type(padded) if padded else None
    return LayerGroup(layer_names=wrapper.layer_names, spec=wrapper) if wrapper is not None else None


def _state_groups(shape: GlmShape, config: PlannerConfig) -> list[LayerGroup]:
    names = list(shape.states)
    spec = shape.states[names[0]]
    if spec.unpadded_page_size_bytes > shape.mla_page_bytes:
        raise StatePageTooLarge(
            layer_name=names[0], state_bytes=spec.unpadded_page_size_bytes, page_bytes=shape.mla_page_bytes
        )
    padded = spec.padded_to(shape.mla_page_bytes)
    assert padded is not None
    count = num_state_groups(names, shape.mla_names, config)
    return [LayerGroup(layer_names=tuple(names[first::count]), spec=padded) for first in range(count)]


def draft_groups(drafts: SpecMap, target_block_tokens: int, pool: DraftPool) -> list[LayerGroup]:
    """The drafter's groups, one per different spec. Raises DrafterNotPlaceable, DraftBlockSizeInvalid."""
    placed = {name: _draft_spec(name, spec, target_block_tokens, pool) for name, spec in drafts.items()}
    return [LayerGroup(layer_names=bucket.names, spec=bucket.spec) for bucket in bucket_by_equality(placed)]


def _draft_spec(name: LayerName, spec: LayerSpec, target_block_tokens: int, pool: DraftPool) -> LayerSpec:
    padded = spec.padded_page_size_bytes
    if padded is not None:
        raise DrafterNotPlaceable(
            layer_name=name, field="page_size_padded_bytes", value=padded, constraint="must be left out"
        )
    if spec.family & Family.SLIDING:
        return draft_window_of(spec, draft_block_tokens(target_block_tokens, pool))
    if target_block_tokens % spec.block_size_tokens:
        raise DrafterNotPlaceable(
            layer_name=name,
            field="block_size_tokens",
            value=spec.block_size_tokens,
            constraint=f"must divide the target's block of {target_block_tokens} tokens",
        )
    return dataclasses.replace(spec, block_size_tokens=target_block_tokens)


def draft_block_tokens(target_block_tokens: int, pool: DraftPool) -> int:
    """Tokens of a drafter's block. Raises DraftBlockSizeInvalid."""
    asked = pool.block_size_tokens
    if asked is not None:
        if asked <= 0 or asked % 64 or target_block_tokens % asked:
            raise DraftBlockSizeInvalid(block_size_tokens=asked, target_block_size_tokens=target_block_tokens)
        return asked
    fits = pool.enabled and target_block_tokens % _DRAFT_BLOCK_TOKENS == 0
    return _DRAFT_BLOCK_TOKENS if fits else target_block_tokens
