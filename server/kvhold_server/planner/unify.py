"""Making pages equal: smaller pages grow with their block, or are padded, to the largest one.

full, block 16, page 8192      ┐                 block 32, page 16384     per-token pages grow with the block
sliding, block 16, page 16384  ├── largest ──▶   block 16, page 16384
state, page 12000              ┘                 page 16384 (padded)      a state's page does not depend on the block
"""

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import Family, LayerSpec
from kvhold_server.planner.errors import PageDoesNotScale, PageNotUnifiable
from kvhold_server.planner.request import SpecMap


def unify_pages(specs: SpecMap) -> SpecMap | PageNotUnifiable:
    """All layers with the largest page, or the reason why not. Raises PageDoesNotScale if a block cannot be
    multiplied.
    """
    largest = max((spec.page_size_bytes for spec in specs.values()), default=0)
    unified: dict[int, LayerSpec] = {}  # by object
    answer: dict[LayerName, LayerSpec] = {}
    for name, spec in specs.items():
        if id(spec) not in unified:
            grown = with_page(name, spec, largest)
            if grown is None:
                return PageNotUnifiable(
                    layer_name=name, kind=spec.kind, page_bytes=spec.page_size_bytes, largest_page_bytes=largest
                )
            unified[id(spec)] = grown
        answer[name] = unified[id(spec)]
    return answer


def with_page(name: LayerName, spec: LayerSpec, page_size_bytes: int) -> LayerSpec | None:
    """The spec with that page, which is at least its own; None where it can be neither scaled nor padded."""
    page = spec.page_size_bytes
    if page == page_size_bytes:
        return spec
    if spec.family & Family.STATE:
        return spec.padded_to(page_size_bytes)
    if page_size_bytes % page == 0:
        return scaled_exactly(name, spec, page_size_bytes // page)
    return None if spec.family & Family.MLA else spec.padded_to(page_size_bytes)


def scaled_exactly(name: LayerName, spec: LayerSpec, factor: int) -> LayerSpec:
    """The spec with `factor` times the block and exactly `factor` times the page. Raises PageDoesNotScale."""
    scaled = spec.scaled(factor)
    if scaled.page_size_bytes != factor * spec.page_size_bytes:
        raise PageDoesNotScale(
            layer_name=name,
            kind=spec.kind,
            factor=factor,
            block_size_tokens=spec.block_size_tokens,
            page_bytes=scaled.page_size_bytes,
            wanted_page_bytes=factor * spec.page_size_bytes,
        )
    return scaled
