"""The grid of the scheduler and that of the hash chain.

group A, block 32    │       │       │       │       scheduler block 96: all groups' blocks end together
group B, block 48    │           │           │       hash block 16: divides them all, so that one chain of hashes
hash blocks          │   │   │   │   │   │   │       serves both
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvhold_server.domain.layer_spec import Family, LayerSpec, StateCacheMode
from kvhold_server.planner.errors import MatchUnitDoesNotDivide


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Tokens of the two grids."""

    scheduler_tokens: int
    hash_tokens: int


def resolve_block_sizes(
    specs: Sequence[LayerSpec],
    *,
    cache_block_size_tokens: int,
    context_parallel_size: int = 1,
    needs_hashes: bool = True,
    prefix_match_unit_tokens: int | None = None,
) -> BlockSizes:
    """The grids for groups of those specs (a uniform_type counts as all its members). Raises MatchUnitDoesNotDivide."""
    if len(specs) <= 1:
        only = cache_block_size_tokens * context_parallel_size
        return BlockSizes(scheduler_tokens=only, hash_tokens=only)
    sizes = [_sharded_block(spec, context_parallel_size) for spec in specs]
    scheduler = math.lcm(*sizes)
    members = [member for spec in specs for member in spec.each()]
    if not needs_hashes or any(member.own_state_mode not in (None, StateCacheMode.ALIGN) for member in members):
        return BlockSizes(scheduler_tokens=scheduler, hash_tokens=scheduler)
    cached = [size for spec, size in zip(specs, sizes, strict=True) if spec.prefix_cacheable] or sizes
    unit = math.gcd(*cached) if prefix_match_unit_tokens is None else prefix_match_unit_tokens
    _check_multiples("block of a group", cached, [unit])
    # States may end inside a coarser block, at any multiple of the unit; wider states must end there, too.
    partial = any(
        member.own_state_mode is StateCacheMode.ALIGN and (size > unit if context_parallel_size == 1 else size >= unit)
        for spec, size in zip(specs, sizes, strict=True)
        for member in spec.each()
    )
    grid = unit if partial else scheduler
    _check_multiples("grid of hits", [grid], _state_strides(members))
    return BlockSizes(scheduler_tokens=scheduler, hash_tokens=unit)


def _sharded_block(spec: LayerSpec, context_parallel_size: int) -> int:
    sharded = all(member.family & Family.ATTENTION for member in spec.each())
    return spec.block_size_tokens * (context_parallel_size if sharded else 1)


def _state_strides(members: Iterable[LayerSpec]) -> list[int]:
    strides = {member.state_tokens for member in members if member.prefix_cacheable}
    return sorted(stride for stride in strides if isinstance(stride, int) and stride > 1)


def _check_multiples(what: str, sizes: Sequence[int], units: Sequence[int]) -> None:
    for size in sizes:
        for unit in units:
            if size % unit:
                raise MatchUnitDoesNotDivide(unit_tokens=unit, what=what, tokens=size)
