"""Packed groups: in block-outermost layouts, layers of different pages lie side by side in a block.

    block 7:  │ full a │ full b │ full c │ ......... │    group 0     each row is one group's use of the same bytes;
              │ state d              │ state e      │    group 1     the widest decides the bytes of a block (anchor),
              │ window f │ window g │ window h │ .. │    group 2     the others are dealt so as not to exceed it

Layers that may share a block table form a bucket. A bucket is dealt into ng groups, row by row, a row having one
layer of each page size. Recurrent states and rings need few blocks, so they may be spread over as many groups as it
takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import Family, LayerSpec, cdiv
from kvhold_server.planner.agcd import approximate_gcd
from kvhold_server.planner.groups import LayerGroup, uniform_type_group
from kvhold_server.planner.request import SpecMap
from kvhold_server.planner.uniform import joins


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Layers that may share a block table, by page size in order of first sight."""

    first: LayerSpec
    names: tuple[LayerName, ...]
    by_page: dict[int, list[LayerName]]

    @property
    def rows(self) -> int:
        """The largest number of layers of one page size."""
        return max(len(names) for names in self.by_page.values())

    @property
    def balanced(self) -> bool:
        """Every page size has as many layers."""
        return len({len(names) for names in self.by_page.values()}) == 1

    def width_bytes(self, num_groups: int) -> int:
        """Bytes of a block if dealt into that many groups."""
        return sum(cdiv(len(names), num_groups) * page for page, names in self.by_page.items())

    def deal(self, num_groups: int) -> list[list[LayerName]]:
        """The rows, dealt in turn; no layer is lost where page sizes have different numbers of layers."""
        if num_groups == 1:
            return [list(self.names)]
        hands: list[list[LayerName]] = [[] for _ in range(num_groups)]
        for index, row in enumerate(zip_longest(*self.by_page.values())):
            hands[index % num_groups].extend(name for name in row if name is not None)
        return hands


def bucket_layers(specs: SpecMap) -> list[Bucket]:
    """Each layer goes into the first bucket that it may join."""
    firsts: list[LayerSpec] = []
    members: list[list[LayerName]] = []
    chosen: dict[int, int] = {}  # by object: the answer depends on the spec and on earlier firsts only
    for name, spec in specs.items():
        index = chosen.get(id(spec))
        if index is None:
            index = next((i for i, first in enumerate(firsts) if joins(first, spec)), len(firsts))
            if index == len(firsts):
                firsts.append(spec)
                members.append([])
            chosen[id(spec)] = index
        members[index].append(name)
    return [_bucket(specs, first, names) for first, names in zip(firsts, members, strict=True)]


def pages_differ(specs: SpecMap) -> bool:
    """Are there layers of different pages? Where all are equal, simpler rules do better."""
    return len({spec.page_size_bytes for spec in distinct_specs(specs)}) > 1


def packed_groups(specs: SpecMap) -> tuple[LayerGroup, ...]:
    """Groups for a block-outermost layout. `specs` is not empty."""
    buckets = bucket_layers(specs)
    groups = []
    for bucket, num_groups in zip(buckets, num_groups_of(buckets), strict=True):
        groups += [uniform_type_group(specs, names) for names in bucket.deal(num_groups)]
    return tuple(groups)


def num_groups_of(buckets: Sequence[Bucket]) -> list[int]:
    """Into how many groups each bucket is dealt."""
    floor = max((b.rows for b in buckets if b.balanced and len(b.by_page) > 1), default=0)
    row_size = approximate_gcd([b.rows for b in buckets if b.balanced], floor) if floor else None

    def wanted(bucket: Bucket) -> int:
        return cdiv(bucket.rows, row_size) if row_size is not None and bucket.balanced else 1

    def spreads(bucket: Bucket) -> bool:
        spreading = Family.STATE | Family.RING | (Family.NONE if row_size is not None else Family.SLIDING)
        return bool(bucket.first.family & spreading)

    anchor = max(b.width_bytes(len(b.names) if spreads(b) else wanted(b)) for b in buckets)
    counts = []
    for bucket in buckets:
        count = wanted(bucket)
        if anchor > 0 and spreads(bucket):
            count = max(count, cdiv(len(bucket.names), max(anchor // bucket.first.page_size_bytes, 1)))
        counts.append(min(count, bucket.rows))  # a group needs at least one row
    return counts


def distinct_specs(specs: SpecMap) -> list[LayerSpec]:
    """Without repeated objects."""
    return list({id(spec): spec for spec in specs.values()}.values())


def _bucket(specs: SpecMap, first: LayerSpec, names: list[LayerName]) -> Bucket:
    by_page: dict[int, list[LayerName]] = {}
    for name in names:
        by_page.setdefault(specs[name].page_size_bytes, []).append(name)
    return Bucket(first=first, names=tuple(names), by_page=by_page)
