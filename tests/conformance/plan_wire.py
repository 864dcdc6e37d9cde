"""The planner's values to and from the wire, in the direction that the daemon does not need: requests out, plans in.

Descriptor fields are `Any` here: the two protobuf backends have classes of their own.

The wire mirrors the domain field by field, so most of this walks the message's own descriptor; what is said by hand is
where the two differ (`RENAMED`, geometry and kinds of layer specs, groups that refer to specs by position).
"""

import dataclasses
import enum
from fractions import Fraction
from typing import Any

from google.protobuf.message import Message

from kvhold.v1 import plan_pb2
from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds import KINDS
from kvhold_server.domain.kinds.mamba import StateArray
from kvhold_server.domain.kinds.mla import CacheRole
from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec
from kvhold_server.domain.layer_spec import LayerSpec, StateCacheMode, count_specs
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import (
    Group,
    GroupRole,
    LayerCost,
    Plan,
    PlanWarning,
    RankPlan,
    Strategy,
    TensorPlacement,
    WarningType,
)
from kvhold_server.planner.request import PlanRequest

KIND_CLASSES = {kind.kind: kind for kind in KINDS}
ENUMS: dict[str, type[enum.Enum]] = {
    kind.__name__: kind for kind in (Dtype, Layout, Strategy, StateCacheMode, CacheRole, GroupRole, WarningType)
}
RENAMED = {"speculative": "speculation", "disable_eagle_block_drop": "disable_block_drop"}  # wire → domain
RENAMED_IN_ARM = {"hisparse_hot": {"page_size_bytes": "row_page_size_bytes"}}
RENAMED_IN_ARM["hisparse_resident"] = RENAMED_IN_ARM["hisparse_hot"]
SPEC_FIELDS = ("block_size_tokens", "dcp_sharded", "block_stride_alignment_bytes")


# ---- requests out --------------------------------------------------------------------------------------------------


def enum_number(field: Any, value: enum.Enum) -> int:
    """Number of a domain value: the wire's names are PREFIX_NAME."""
    suffix = f"_{value.name}"
    [number] = [entry.number for entry in field.enum_type.values if entry.name.endswith(suffix) and entry.number]
    return int(number)


def fill(message: Message, value: object, renamed: dict[str, str] = RENAMED) -> None:
    """Set every field of `message` from the attribute of `value` that has its name; None leaves it absent."""
    for field in message.DESCRIPTOR.fields:
        given = getattr(value, renamed.get(field.name, field.name))
        if given is None:
            continue
        if field.is_repeated and field.message_type is not None:
            for item in given:
                fill(getattr(message, field.name).add(), item, renamed)
        elif field.is_repeated:
            getattr(message, field.name).extend(given)
        elif field.message_type is not None:
            child = getattr(message, field.name)
            child.SetInParent()
            fill(child, given, renamed)
        else:
            setattr(message, field.name, enum_number(field, given) if field.enum_type is not None else given)


def fill_spec(message: plan_pb2.LayerSpec, spec: Any) -> None:
    """One layer spec: what all have, the geometry that attention kinds have, and the arm of its kind."""
    for name in SPEC_FIELDS:
        if getattr(spec, name) is not None:
            setattr(message, name, getattr(spec, name))
    if hasattr(spec, "num_kv_heads"):
        ratio = Fraction(spec.tokens_per_state)
        geometry = message.geometry
        geometry.tokens_per_state_num, geometry.tokens_per_state_den = ratio.numerator, ratio.denominator
        for field in geometry.DESCRIPTOR.fields:
            value = getattr(spec, field.name, None)
            if value is not None:
                setattr(geometry, field.name, enum_number(field, value) if field.enum_type is not None else value)
    arm = getattr(message, spec.kind)
    arm.SetInParent()
    fill(arm, spec, RENAMED_IN_ARM.get(spec.kind, {}))


def encode_request(request: PlanRequest) -> plan_pb2.PlanRequest:
    """The wire's request. Every rank lists its layers; equal specs of layers share one entry."""
    message = plan_pb2.PlanRequest()
    fill(message.config, request.config)
    specs: list[LayerSpec] = list(request.layer_specs)
    positions = {id(spec): place for place, spec in enumerate(specs)}
    for rank in request.ranks:
        wire_rank = message.ranks.add(available_memory_bytes=rank.available_memory_bytes)
        for layer in rank.layers:
            if id(layer.spec) not in positions:
                positions[id(layer.spec)] = specs.index(layer.spec) if layer.spec in specs else len(specs)
                if positions[id(layer.spec)] == len(specs):
                    specs.append(layer.spec)
            wire_rank.layers.add(layer_name=layer.name, layer_spec_index=positions[id(layer.spec)])
    for spec in specs:
        fill_spec(message.layer_specs.add(), spec)
    return message


# ---- plans in ------------------------------------------------------------------------------------------------------


def value_of(message: Message, field: Any) -> Any:
    """A scalar field as the domain has it: None if absent, enums by name, repeated ones as tuples."""
    if field.is_repeated:
        return tuple(getattr(message, field.name))
    if field.has_presence and not message.HasField(field.name):
        return None
    number = getattr(message, field.name)
    if field.enum_type is None:
        return number
    names = ENUMS[field.enum_type.name]
    if number == 0:
        return None
    full = field.enum_type.values_by_number[number].name
    return next(entry for entry in names if full.endswith(f"_{entry.name}"))


def scalars(message: Message, target: type, renamed: dict[str, str] | None = None) -> dict[str, Any]:
    """Arguments for `target` from the message's scalar fields that it takes. Absent ones are left out: its defaults."""
    takes = {field.name for field in dataclasses.fields(target) if field.init}
    values = {}
    for field in message.DESCRIPTOR.fields:
        name = (renamed or {}).get(field.name, field.name)
        if field.message_type is None and name in takes and (value := value_of(message, field)) is not None:
            values[name] = value
    return values


def decode_spec(message: plan_pb2.LayerSpec) -> LayerSpec:
    """A layer spec of any kind, planner-made ones included."""
    kind = message.WhichOneof("kind")
    assert kind is not None, "a spec without a kind"
    target, arm = KIND_CLASSES[kind], getattr(message, kind)
    values = scalars(message, target)
    if message.HasField("geometry"):
        values |= scalars(message.geometry, target)
        ratio = Fraction(message.geometry.tokens_per_state_num or 1, message.geometry.tokens_per_state_den or 1)
        values["tokens_per_state"] = ratio.numerator if ratio.denominator == 1 else ratio
    values |= scalars(arm, target, RENAMED_IN_ARM.get(kind))
    if kind == "mamba":
        values["states"] = tuple(StateArray(**scalars(state, StateArray)) for state in arm.states)
    return target(**values)


def decode_group(message: plan_pb2.Group, specs: list[LayerSpec]) -> Group:
    names = tuple(LayerName(name) for name in message.layer_names)
    if message.HasField("layer_spec_index"):
        spec = specs[message.layer_spec_index]
    else:
        members = tuple(specs[index] for index in message.member_spec_indexes)
        # LEGACY lists the whole model's members on every stage; the names of those elsewhere do not travel.
        unnamed = tuple(LayerName(f"member {place}") for place in range(len(members)))
        member_names = names if len(names) == len(members) else unnamed
        spec = UniformTypeSpec(
            block_size_tokens=message.block_size_tokens,
            layer_names=member_names,
            layer_specs=members,
            counts=tuple(count_specs(members)),
        )
    group = Group(spec=spec, **(scalars(message, Group) | {"layer_names": names}))
    derived = {name: (getattr(message, name), getattr(group, name)) for name in DERIVED_OF_GROUP}
    wrong = {name: pair for name, pair in derived.items() if pair[0] != pair[1]}
    assert not wrong, f"a group contradicts its spec (wire, domain): {wrong}"
    return group


MAY_BE_ABSENT = {
    "cache_block_size_tokens",
    "scheduler_block_size_tokens",
    "hash_block_size_tokens",
    "capacity_tokens",
    "max_concurrency",
}
DERIVED_OF_GROUP = ("kind", "block_size_tokens", "page_size_bytes", "max_request_bytes", "prefix_cacheable")


def decode_rank(message: plan_pb2.RankPlan, specs: list[LayerSpec], earlier: list[RankPlan]) -> RankPlan:
    if message.HasField("same_as_rank"):
        return earlier[message.same_as_rank]
    return RankPlan(
        groups=tuple(decode_group(group, specs) for group in message.groups),
        tensors=tuple(TensorPlacement(**scalars(tensor, TensorPlacement)) for tensor in message.tensors),
        **scalars(message, RankPlan),
    )


def decode_plan(response: plan_pb2.PlanResponse) -> Plan:
    """The plan that a daemon answered with."""
    plan = response.plan
    specs = [decode_spec(spec) for spec in plan.layer_specs]
    ranks: list[RankPlan] = []
    for rank in plan.ranks:
        ranks.append(decode_rank(rank, specs, ranks))
    absent: dict[str, Any] = dict.fromkeys(MAY_BE_ABSENT)
    warnings = (
        PlanWarning(**scalars(warning, PlanWarning), args=tuple(warning.args.items())) for warning in plan.warnings
    )
    return Plan(
        ranks=tuple(ranks),
        scheduler_groups=tuple(decode_group(group, specs) for group in plan.scheduler_groups),
        layer_costs=tuple(LayerCost(**scalars(cost, LayerCost)) for cost in response.layer_costs),
        warnings=tuple(warnings),
        **(absent | scalars(plan, Plan)),
    )
