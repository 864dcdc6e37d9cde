"""The identity of a plan: exactly what must agree for a process to attach to a pool made from it.

What decides where bytes lie and what they mean goes in; what only reports (capacities, lengths, warnings, the memory
that was available) does not. The canonical form is a tree of JSON values; its compact encoding with sorted keys is
hashed. It depends on names and numbers only, so it is the same in every process and, while CANONICAL_VERSION stands,
in every version.
"""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec
from kvhold_server.domain.layer_spec import LayerSpec
from kvhold_server.domain.plan import Group, Plan, RankPlan, TensorPlacement

CANONICAL_VERSION = 1  # raise it when the form below changes its meaning

Json = None | bool | int | str | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where two canonical forms disagree. An absent value is None."""

    path: str  # e.g. "ranks[0].groups[1].spec.block_size_tokens"
    first: Json
    second: Json


def fingerprint_of(plan: Plan) -> str:
    """SHA-256 of the canonical form, 64 hex digits."""
    encoded = json.dumps(canonical(plan), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(encoded.encode("ascii")).hexdigest()


def canonical(plan: Plan) -> Mapping[str, Json]:
    """What must agree, as JSON values. Equal ranks are written once and referred to."""
    specs: dict[int, Json] = {}
    forms: dict[int, int] = {}
    layouts: list[Json] = []
    for rank in plan.ranks:
        if id(rank) not in forms:
            form = _rank(rank, specs)
            if form not in layouts:
                layouts.append(form)
            forms[id(rank)] = layouts.index(form)
    return {
        "version": CANONICAL_VERSION,
        "layout": plan.layout.value,
        "rank_layouts": layouts,
        "ranks": [forms[id(rank)] for rank in plan.ranks],
        "scheduler_block_size_tokens": plan.scheduler_block_size_tokens,
        "hash_block_size_tokens": plan.hash_block_size_tokens,
    }


def first_difference(first: Plan, second: Plan) -> Difference | None:
    """Where the canonical forms of two plans first disagree, in reading order; None if they agree."""
    return _difference("", canonical(first), canonical(second))


def _rank(rank: RankPlan, specs: dict[int, Json]) -> Json:
    return {  # what a person wants to hear first comes first
        "groups": [_group(group, specs) for group in rank.groups],
        "num_blocks": rank.num_blocks,
        "bytes_per_block": rank.bytes_per_block,
        "region_size_bytes": rank.region_size_bytes,
        "draft_num_blocks": rank.draft_num_blocks,
        "draft_layer_names": list(rank.draft_layer_names),
        "host_num_blocks": rank.host_num_blocks,
        "host_block_stride_bytes": rank.host_block_stride_bytes,
        "host_region_size_bytes": rank.host_region_size_bytes,
        "needs_zeroing": rank.needs_zeroing,
        "tensors": [_tensor(tensor) for tensor in rank.tensors],
    }


def _group(group: Group, specs: dict[int, Json]) -> Json:
    members: Json = None
    if isinstance(group.spec, UniformTypeSpec):
        each = [_spec(spec, specs) for spec in group.spec.each()]
        index = {id(spec): position for position, spec in enumerate(group.spec.each())}
        by_value = {spec: position for position, spec in enumerate(group.spec.each())}
        own = group.spec.layer_specs
        members = {"specs": each, "of_layers": [index.get(id(s), -1) if id(s) in index else by_value[s] for s in own]}
    return {
        "layer_names": list(group.layer_names),
        "kind": group.kind,
        "block_size_tokens": group.block_size_tokens,
        "page_size_bytes": group.page_size_bytes,
        "spec": None if members is not None else _spec(group.spec, specs),
        "members": members,
        "is_eagle_group": group.is_eagle_group,
        "host_resident": group.host_resident,
        "role": group.role.value,
        "uses_draft_pool": group.uses_draft_pool,
    }


def _spec(spec: LayerSpec, known: dict[int, Json]) -> Json:
    if id(spec) not in known:
        fields: dict[str, Json] = {"kind": spec.kind}
        for field in dataclasses.fields(spec):
            fields[field.name] = _value(getattr(spec, field.name))
        known[id(spec)] = fields
    return known[id(spec)]


def _value(value: object) -> Json:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, (tuple, list)):
        return [_value(item) for item in value]
    assert dataclasses.is_dataclass(value), type(value)
    return {field.name: _value(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _tensor(tensor: TensorPlacement) -> Json:
    return {field.name: _value(getattr(tensor, field.name)) for field in dataclasses.fields(tensor)}


def _difference(path: str, first: Json, second: Json) -> Difference | None:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in [*first, *(key for key in second if key not in first)]:
            below = _difference(f"{path}.{key}" if path else key, first.get(key), second.get(key))
            if below is not None:
                return below
        return None
    if isinstance(first, list) and isinstance(second, list):
        for index, (one, other) in enumerate(zip(first, second, strict=False)):
            below = _difference(f"{path}[{index}]", one, other)
            if below is not None:
                return below
        if len(first) == len(second):
            return None
        return Difference(path=f"len({path})", first=len(first), second=len(second))
    return None if first == second else Difference(path=path, first=first, second=second)
