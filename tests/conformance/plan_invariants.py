"""What every plan must satisfy, whatever its strategy or layers: nothing lost, nothing outside, nothing overlapping.

Works on the wire's messages. Each rule gives a text per violation.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvhold.v1 import plan_pb2 as pb


def broken_invariants(request: pb.PlanRequest, reply: pb.PlanResponse) -> list[str]:
    """Every violated invariant of the reply, shortly."""
    plan = reply.plan
    found = list(_about_plan(request, plan))
    for number, rank in enumerate(plan.ranks):
        found += [f"rank {number}: {text}" for text in _about_rank(request, plan, number, rank)]
    return found


def names_of_rank(request: pb.PlanRequest, number: int) -> list[str]:
    """The layers that a rank was asked to hold."""
    rank = request.ranks[number]
    if rank.HasField("layers_of_rank"):
        return names_of_rank(request, rank.layers_of_rank)
    return [layer.layer_name for layer in rank.layers]


def _about_plan(request: pb.PlanRequest, plan: pb.Plan) -> Iterator[str]:
    if len(plan.ranks) != len(request.ranks):
        yield f"{len(plan.ranks)} ranks planned of {len(request.ranks)}"
    if len({rank.num_blocks for rank in plan.ranks}) != 1:
        yield "ranks have different numbers of blocks"
    if len({tuple((g.kind, g.block_size_tokens) for g in rank.groups) for rank in plan.ranks}) != 1:
        yield "ranks have different groups"
    if len(plan.fingerprint) != 64:
        yield "no fingerprint"
    if plan.max_model_len_tokens > request.config.max_model_len_tokens:
        yield "planned for longer requests than asked"
    if plan.scheduler_block_size_tokens and plan.hash_block_size_tokens:
        if len(plan.scheduler_groups) > 1 and plan.strategy != pb.STRATEGY_LEGACY:
            for group in plan.scheduler_groups:
                if plan.scheduler_block_size_tokens % group.block_size_tokens:
                    yield "a group's block does not divide the scheduler's"
        if plan.scheduler_block_size_tokens % plan.hash_block_size_tokens:
            yield "the hash block does not divide the scheduler's"
    needed = sum(
        g.max_request_blocks
        for g in plan.scheduler_groups
        if not g.host_resident and not (set(g.layer_names) & set(_draft_names(plan)))
    )
    if plan.HasField("max_concurrency") and plan.strategy != pb.STRATEGY_LEGACY and needed:
        if plan.max_concurrency > plan.num_blocks / needed + 1e-9 and not _draft_names(plan):
            yield f"concurrency {plan.max_concurrency} of {plan.num_blocks} blocks, {needed} per request"
        if plan.max_concurrency < 1:
            yield f"not one request of {plan.max_model_len_tokens} tokens fits (concurrency {plan.max_concurrency})"


def _draft_names(plan: pb.Plan) -> list[str]:
    return [name for rank in plan.ranks for name in rank.draft_layer_names]


def _about_rank(request: pb.PlanRequest, plan: pb.Plan, number: int, rank: pb.RankPlan) -> Iterator[str]:
    asked = names_of_rank(request, number)
    yield from _coverage(asked, rank)
    if not rank.groups:
        return
    legacy = plan.strategy == pb.STRATEGY_LEGACY
    budget = request.ranks[number].available_memory_bytes
    if not request.config.HasField("num_blocks_override") and rank.region_size_bytes > max(budget, 0):
        yield f"{rank.region_size_bytes} bytes planned of {budget}"
    for tensor in rank.tensors:
        limit = rank.host_region_size_bytes if tensor.host_resident else rank.region_size_bytes
        low, high = _extent(tensor)
        if low < 0 or high > limit:
            yield f"tensor of {tensor.layer_names[0]} reaches {low}..{high} of 0..{limit}"
    if not legacy:
        yield from _alignment(request, number, rank)
        yield from _widths(rank)
        yield from _overlaps(rank)


def _coverage(asked: Sequence[str], rank: pb.RankPlan) -> Iterator[str]:
    suffixes = (".hisparse_resident", ".hisparse_hot")
    grouped = [n for g in rank.groups for n in g.layer_names if not n.endswith(suffixes)]
    placed = [n for t in rank.tensors for n in t.layer_names if not n.endswith(suffixes)]
    if sorted(grouped) != sorted(asked):
        yield f"grouped layers differ from those asked for: {sorted(set(grouped) ^ set(asked))[:4]}"
    if sorted(placed) != sorted(asked):
        yield f"placed layers differ from those asked for: {sorted(set(placed) ^ set(asked))[:4]}"


def _alignment(request: pb.PlanRequest, number: int, rank: pb.RankPlan) -> Iterator[str]:
    own = request.ranks[number]
    while own.HasField("layers_of_rank"):
        own = request.ranks[own.layers_of_rank]
    asked = {request.layer_specs[layer.layer_spec_index].block_stride_alignment_bytes for layer in own.layers}
    step = math.lcm(*(value for value in asked if value), 1)
    if rank.bytes_per_block % step and not _is_aliased(rank):
        yield f"a block of {rank.bytes_per_block} bytes is not a multiple of {step}"


def _is_aliased(rank: pb.RankPlan) -> bool:
    return len(rank.tensors) > 1 and all(len(tensor.layer_names) == 1 for tensor in rank.tensors)


def _widths(rank: pb.RankPlan) -> Iterator[str]:
    page = {name: t.page_size_bytes for t in rank.tensors for name in t.layer_names}
    drafts = set(rank.draft_layer_names)
    for group in rank.groups:
        names = [name for name in group.layer_names if name in page and name not in drafts]
        if not group.host_resident and sum(page[name] for name in names) > rank.bytes_per_block:
            yield f"group of {names[0]} is wider than a block"


# ------------------------------------------------------------------------------------------------------------ overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Extent and stride."""

    extent: int
    stride: int


def axes_of(tensor: pb.TensorPlacement, *, blocks: int | None = None) -> list[Axis]:
    """The axes of a tensor with more than one index, outermost stride first; content bytes last."""
    axes = [
        Axis(extent=len(tensor.layer_names), stride=tensor.layer_stride_bytes),
        Axis(extent=tensor.num_blocks if blocks is None else blocks, stride=tensor.block_stride_bytes),
        Axis(extent=tensor.num_heads, stride=tensor.head_stride_bytes),
        Axis(extent=tensor.num_states, stride=tensor.state_stride_bytes),
        Axis(extent=tensor.content_size_bytes, stride=1),
    ]
    return sorted((axis for axis in axes if axis.extent > 1), key=lambda axis: -axis.stride)


def self_overlaps(tensor: pb.TensorPlacement) -> bool:
    """Do two different indexes reach the same byte? Each stride must step over everything inside it."""
    span = 1
    for axis in reversed(axes_of(tensor)):
        if axis.stride < span:
            return True
        span += (axis.extent - 1) * axis.stride
    return False


def _extent(tensor: pb.TensorPlacement) -> tuple[int, int]:
    if not tensor.num_blocks:
        return tensor.offset_bytes, tensor.offset_bytes
    inner = sum((axis.extent - 1) * axis.stride for axis in axes_of(tensor)) + 1
    page = (len(tensor.layer_names) - 1) * tensor.layer_stride_bytes
    page += (tensor.num_blocks - 1) * tensor.block_stride_bytes + (
        0 if tensor.content_size_bytes else tensor.page_size_bytes
    )
    return tensor.offset_bytes, tensor.offset_bytes + max(inner, page)


def _overlaps(rank: pb.RankPlan) -> Iterator[str]:
    tensor_of = {name: tensor for tensor in rank.tensors for name in tensor.layer_names}
    for tensor in rank.tensors:
        if self_overlaps(tensor):
            yield f"tensor of {tensor.layer_names[0]} overlaps itself"
    by_group = [
        list({id(tensor_of[n]): tensor_of[n] for n in g.layer_names if n in tensor_of}.values()) for g in rank.groups
    ]
    for tensors in by_group:
        for one, other in itertools.combinations(_sample(tensors), 2):
            if one.host_resident == other.host_resident and not _apart(one, other, rank.bytes_per_block):
                yield f"tensors of {one.layer_names[0]} and {other.layer_names[0]} overlap in one group"
    device = [[t for t in tensors if not t.host_resident] for tensors in by_group]
    for first, second in itertools.combinations([tensors for tensors in device if tensors], 2):
        for one, other in itertools.product(_sample(first), _sample(second)):
            if not _alias_safely(one, other, rank.bytes_per_block):
                yield f"blocks of {one.layer_names[0]} and {other.layer_names[0]} share bytes under different ids"
                return


def _sample(tensors: list[pb.TensorPlacement], most: int = 24) -> list[pb.TensorPlacement]:
    return tensors if len(tensors) <= most else [*tensors[: most // 2], *tensors[-most // 2 :]]


def _block_outermost(tensor: pb.TensorPlacement, block_bytes: int) -> bool:
    return tensor.block_stride_bytes == block_bytes and (
        len(tensor.layer_names) == 1 or tensor.block_stride_bytes > tensor.layer_stride_bytes
    )


def _inside_block(tensor: pb.TensorPlacement) -> tuple[int, int]:
    inner = sum((axis.extent - 1) * axis.stride for axis in axes_of(tensor, blocks=1)) + 1
    return tensor.offset_bytes, tensor.offset_bytes + inner


def _disjoint(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[1] <= other[0] or other[1] <= one[0]


def _apart(one: pb.TensorPlacement, other: pb.TensorPlacement, block_bytes: int) -> bool:
    if _disjoint(_extent(one), _extent(other)):
        return True
    if _block_outermost(one, block_bytes) and _block_outermost(other, block_bytes):
        return _disjoint(_inside_block(one), _inside_block(other))
    return False


def _alias_safely(one: pb.TensorPlacement, other: pb.TensorPlacement, block_bytes: int) -> bool:
    """Groups use the same bytes for the same block id only."""
    if _disjoint(_extent(one), _extent(other)):
        return True
    if _block_outermost(one, block_bytes) and _block_outermost(other, block_bytes):
        return all(_inside_block(tensor)[1] <= block_bytes for tensor in (one, other))
    # Layer-outermost: each layer is a run of pages, and runs either coincide or do not touch.
    grid = one.page_size_bytes * one.num_blocks
    return (
        one.block_stride_bytes == other.block_stride_bytes
        and one.page_size_bytes == other.page_size_bytes
        and one.num_blocks == other.num_blocks
        and (one.offset_bytes - other.offset_bytes) % grid == 0
        and all(len(t.layer_names) == 1 or t.layer_stride_bytes % grid == 0 for t in (one, other))
    )
