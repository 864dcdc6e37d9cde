"""Groups of equal pages: each kind of layer is dealt into groups of about one size, so that groups can share memory.

4 full + 5 sliding, size 5:   [f0 f1 f2 f3 ··] [s0 s1 s2 s3 s4]                ·· a dummy layer: padding
4 full + 6 sliding, size 4:   [f0 f1 f2 f3] [s0 s2 s4 ··] [s1 s3 s5 ··]        dealt in turn, not cut
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds.attention import GEOMETRY_FIELDS
from kvhold_server.domain.layer_spec import LayerSpec, Mismatch, cdiv, merge_specs
from kvhold_server.domain.plan import PlanWarning, WarningType
from kvhold_server.planner.groups import Grouping, LayerGroup
from kvhold_server.planner.request import SpecMap


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedBucket:
    """Layers that merge into one spec; names are in the order of merging, equal specs together."""

    spec: LayerSpec
    names: tuple[LayerName, ...]


def bucket_by_equality(specs: SpecMap) -> list[MergedBucket]:
    """Layers of equal specs, by first occurrence."""
    names_of: dict[int, list[LayerName]] = {}
    for name, spec in specs.items():
        names_of.setdefault(id(spec), []).append(name)
    by_value: dict[LayerSpec, list[LayerName]] = {}
    objects = {id(spec): spec for spec in specs.values()}
    for key, spec in objects.items():
        by_value.setdefault(spec, []).extend(names_of[key])
    if len(by_value) == len(objects):
        return [MergedBucket(spec=spec, names=tuple(names)) for spec, names in by_value.items()]
    order = {name: index for index, name in enumerate(specs)}
    return [MergedBucket(spec=s, names=tuple(sorted(names, key=order.__getitem__))) for s, names in by_value.items()]


def bucket_by_merging(specs: SpecMap) -> list[MergedBucket]:
    """Each different spec joins the first bucket that it merges with."""
    buckets: list[MergedBucket] = []
    alike: dict[object, list[int]] = {}  # buckets by what all that merge agree in: most pairs need not be tried
    for entry in bucket_by_equality(specs):
        candidates = alike.setdefault(_merge_key(entry.spec), [])
        for index in candidates if _merges_with_others(entry.spec) else ():
            bucket = buckets[index]
            merged = merge_specs([bucket.spec, entry.spec])
            if not isinstance(merged, Mismatch):
                buckets[index] = MergedBucket(spec=merged, names=bucket.names + entry.names)
                break
        else:
            alone = merge_specs([entry.spec])
            candidates.append(len(buckets))
            buckets.append(MergedBucket(spec=entry.spec if isinstance(alone, Mismatch) else alone, names=entry.names))
    return buckets


def _merges_with_others(spec: LayerSpec) -> bool:
    """Kinds without a rule of their own merge with their equals only, and those are one entry already."""
    return type(spec).merge is not LayerSpec.merge


def _merge_key(spec: LayerSpec) -> object:
    """Every rule of merging wants an equal geometry."""
    if not _merges_with_others(spec):
        return None
    return tuple(getattr(spec, field) for field in GEOMETRY_FIELDS)


def group_size_of(lengths: Sequence[int]) -> int:
    """The largest bucket if it is less than half again the smallest (a little padding), otherwise the smallest."""
    smallest, largest = min(lengths), max(lengths)
    return largest if 2 * largest < 3 * smallest else smallest


def uniform_page_groups(specs: SpecMap) -> Grouping:
    """Groups for layers of equal pages. `specs` is not empty."""
    return deal_buckets(specs, bucket_by_merging(specs))


def deal_buckets(specs: SpecMap, buckets: Sequence[MergedBucket], group_size: int | None = None) -> Grouping:
    """Each bucket dealt into as many groups as its layers fill; with the dummy layers that remain as warnings."""
    size = group_size_of([len(bucket.names) for bucket in buckets]) if group_size is None else group_size
    groups: list[LayerGroup] = []
    warnings: list[PlanWarning] = []
    for bucket in buckets:
        count = len(bucket.names)
        padding = -count % size
        if padding:
            warnings.append(_padding_warning(padding, count))
        num_groups = cdiv(count, size)
        groups += [_group(specs, bucket, bucket.names[first::num_groups]) for first in range(num_groups)]
    return Grouping(groups=tuple(groups), warnings=tuple(warnings))


def _group(specs: SpecMap, bucket: MergedBucket, names: tuple[LayerName, ...]) -> LayerGroup:
    # Some of a bucket's layers may not merge in their own order; the spec of the whole bucket stands for any of them.
    different = list({id(specs[name]): specs[name] for name in names}.values())
    merged = merge_specs(different)
    return LayerGroup(layer_names=names, spec=bucket.spec if isinstance(merged, Mismatch) else merged)


def _padding_warning(padding: int, count: int) -> PlanWarning:
    percent = f"{100 * padding / count:.2f}"
    return PlanWarning(
        type=WarningType.PADDING_LAYERS,
        message=f"{padding} dummy layers fill up the groups of {count} layers: at most {percent}% of theirs is wasted",
        args=(("num_padding_layers", str(padding)), ("wasted_percent", percent)),
    )
