"""Hidden-state layers get a group each, with a block that divides all others' and a page as large as theirs."""

import dataclasses
import math
from collections.abc import Sequence

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import LayerSpec, cdiv
from kvhold_server.planner.errors import PageDoesNotScale
from kvhold_server.planner.groups import LayerGroup, with_spec
from kvhold_server.planner.request import SpecMap


def add_hidden_groups(groups: Sequence[LayerGroup], hidden: SpecMap) -> tuple[LayerGroup, ...]:
    """The groups, enlarged until one token's hidden state fits a page, and one group per hidden layer behind them.

    `groups` is not empty and all its pages are equal. Raises PageDoesNotScale.
    """
    if not hidden:
        return tuple(groups)
    page = groups[0].spec.page_size_bytes
    assert all(group.spec.page_size_bytes == page for group in groups)
    factor = max(1, cdiv(max(_token_bytes(spec) for spec in hidden.values()), page))
    page *= factor
    enlarged = [with_spec(group, enlarge(group.layer_names[0], group.spec, factor)) for group in groups]
    grid = math.gcd(*(group.spec.block_size_tokens for group in enlarged))
    return (*enlarged, *(_hidden_group(name, spec, page, grid) for name, spec in hidden.items()))


def enlarge(name: LayerName, spec: LayerSpec, factor: int) -> LayerSpec:
    """A copy with `factor` times the block and the page; a state's page grows by padding. Raises PageDoesNotScale."""
    if factor == 1:
        return spec
    wanted = factor * spec.page_size_bytes
    scaled = spec.scaled(factor)
    if scaled.page_size_bytes < wanted:
        scaled = scaled.padded_to(wanted) or scaled
    if scaled.page_size_bytes != wanted:
        raise PageDoesNotScale(
            layer_name=name,
            kind=spec.kind,
            factor=factor,
            block_size_tokens=spec.block_size_tokens,
            page_bytes=scaled.page_size_bytes,
            wanted_page_bytes=wanted,
        )
    return scaled


def _hidden_group(name: LayerName, spec: LayerSpec, page: int, grid: int) -> LayerGroup:
    fitting = max(page // _token_bytes(spec), 1)
    block = largest_divisor(grid, fitting)
    own = dataclasses.replace(spec, block_size_tokens=block).padded_to(page)
    assert own is not None
    return LayerGroup(layer_names=(name,), spec=own)


def _token_bytes(spec: LayerSpec) -> int:
    assert spec.hidden_token_bytes is not None
    return spec.hidden_token_bytes


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`; both are positive."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return max(d for d in (*small, *(number // d for d in small)) if d <= limit)
