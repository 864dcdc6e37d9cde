"""StepRequest → columns, StepAnswer → StepResponse. The hot path: flat arrays in, flat arrays out, no object per item.

    request.extend.sequence_ids  ──list()──▶ ExtendColumns.sequence_ids        length and range checked in C (len, min)
    request.extend.hashes        ──slices──▶ ExtendColumns.hashes              one bytes object a digest
    StepOutput.extend_blocks     ──extend()▶ response.extend.block_ids

Every refusal happens before anything is applied, and names the array and the rule that it broke.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvhold.v1 import block_pb2 as pb
from kvhold_server.domain.errors import InvalidField, InvalidRequest
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.node.step_values import Invalidation, StepCommand
from kvhold_server.pool.values import AdmitColumns, ExtendColumns, FreeColumns, LookupColumns, StepInput
from kvhold_server.rpc.metadata_codec import decode_metadata

MAX_INT32 = 2**31 - 1
CUT_TOGETHER = 128  # digests
# What a step does not ask for; never changed.
_NO_FREES, _NO_EXTENDS, _NO_ADMITS, _NO_LOOKUPS = FreeColumns(), ExtendColumns(), AdmitColumns(), LookupColumns()
_NO_INVALIDATION = Invalidation()
_UNDRAWABLE = (
    "num_lookahead_tokens", "computed_tokens", "num_encoder_tokens", "metadata", "reserved_blocks", "num_tokens"
)  # fmt: skip


@dataclass(eq=False)
class TooManyItems(InvalidRequest):
    """A batch is larger than the daemon takes."""

    template = "{field}: {num_items} items are not allowed: at most {max_items}; split the batch"
    field: str
    num_items: int
    max_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WireShape:
    """What of a pool decides how its messages are read."""

    num_groups: int
    hash_size_bytes: int
    hash_unit_tokens: int
    num_blocks: int
    enable_caching: bool
    carries_tokens: bool


def decode_step(request: pb.StepRequest, shape: WireShape, limits: ServiceLimits) -> StepCommand:
    """Raises InvalidField or TooManyItems; the session's and the step's numbers are checked by the node."""
    if not 0 <= request.part < limits.max_step_parts:
        raise InvalidField("part", request.part, f"must be 0..{limits.max_step_parts - 1}")
    if request.step < 1:
        raise InvalidField("step", request.step, "must be at least 1")
    for name in ("num_drawn_blocks", "max_allotted_blocks"):
        if getattr(request, name) < 0:
            raise InvalidField(name, getattr(request, name), f"must be 0..{MAX_INT32}")
    if not 0 <= request.completed_step <= request.step:
        raise InvalidField("completed_step", request.completed_step, f"must be 0..step, {request.step}")
    items = StepInput(
        step=request.step,
        completed_step=request.completed_step,
        drawn=_NO_EXTENDS,
        free=_NO_FREES,
        extend=_NO_EXTENDS,
        admit=_NO_ADMITS,
        lookup=_NO_LOOKUPS,
    )
    command = StepCommand(
        part=request.part, items=items, invalidate=_NO_INVALIDATION, report_evictions=request.report_evictions
    )
    if request.max_allotted_blocks and not shape.carries_tokens:
        items.max_allotted_blocks = request.max_allotted_blocks
    if request.HasField("drawn"):
        items.drawn = _drawn(request.drawn, shape, limits)
    items.num_drawn_blocks = request.num_drawn_blocks
    if request.HasField("free"):
        items.free = _free(request.free, shape, limits)
        command.preempted = column("free.preempted", request.free.preempted, len(items.free.sequence_ids))
    if request.HasField("invalidate"):
        command.invalidate = _invalidate(request.invalidate, shape, limits)
    if request.HasField("extend"):
        items.extend = _extend(request.extend, shape, limits)
    if request.HasField("admit"):
        items.token_budget = request.admit.token_budget or MAX_INT32
        items.admit = _admit(request.admit, shape, limits)
    if request.HasField("lookup"):
        items.lookup = decode_lookup(request.lookup, shape, limits)
        command.include_lookup_blocks = request.lookup.include_block_ids
    if shape.carries_tokens:
        command.annotated = decode_metadata(request, items)
    return command


def column(field: str, values: Any, num_items: int, *, low: int = 0, required: bool = False) -> Any:
    """One parallel array as a list; empty where it is absent and may be."""
    num_values = len(values)
    if not num_values and not required:
        return []
    if num_values != num_items:
        raise InvalidField(field, f"{num_values} entries", f"must have one entry an item: {num_items}, or none")
    found = list(values)
    if found and min(found) < low:
        raise InvalidField(field, min(found), f"must be {low}..{MAX_INT32}")
    return found


def cut_hashes(field: str, counts: Sequence[int], hashes: bytes, shape: WireShape) -> list[bytes]:
    """Splits concatenated digests; their number must be the sum of the counts."""
    size, total = shape.hash_size_bytes, sum(counts)
    if len(hashes) != total * size:
        rule = f"must be the sum of num_hashes, {total}, times {size} bytes a digest"
        raise InvalidField(f"{field}.hashes", f"{len(hashes)} bytes", rule)
    found: list[bytes] = []
    at = 0
    if total >= CUT_TOGETHER:  # five times as quick as slices
        cutter = _cutter(size)
        for at in range(0, len(hashes) - cutter.size + 1, cutter.size):
            found += cutter.unpack_from(hashes, at)
        at += cutter.size
    return found + [hashes[i : i + size] for i in range(at, len(hashes), size)]


@lru_cache(maxsize=8)
def _cutter(size: int) -> struct.Struct:
    return struct.Struct(f"{size}s" * CUT_TOGETHER)


def _sequence_ids(field: str, values: Any, limits: ServiceLimits) -> list[int]:
    if len(values) > limits.max_items:
        raise TooManyItems(f"{field}.sequence_ids", len(values), limits.max_items)
    found = list(values)
    if len(found) > 1 and len(set(found)) != len(found):
        twice = next(s for s in found if found.count(s) > 1)
        raise InvalidField(f"{field}.sequence_ids", twice, "must name each sequence once")
    return found


def _free(m: pb.FreeItems, shape: WireShape, limits: ServiceLimits) -> FreeColumns:
    ids = _sequence_ids("free", m.sequence_ids, limits)
    n = len(ids)
    counts = column("free.num_hashes", m.num_hashes, n)
    return FreeColumns(
        sequence_ids=ids,
        computed_tokens=column("free.publish_tokens", m.publish_tokens, n),
        hash_counts=counts,
        hashes=cut_hashes("free", counts, m.hashes, shape),
        fence_own=column("free.fence_own", m.fence_own, n),
    )


def _drawn(m: pb.ExtendItems, shape: WireShape, limits: ServiceLimits) -> ExtendColumns:
    """Sequences may repeat; options are for extends that are asked for."""
    n = len(m.sequence_ids)
    if n > limits.max_items:
        raise TooManyItems("drawn.sequence_ids", n, limits.max_items)
    for name in _UNDRAWABLE:
        if len(getattr(m, name)):
            raise InvalidField(f"drawn.{name}", f"{len(getattr(m, name))} entries", "must be absent")
    counts = column("drawn.num_hashes", m.num_hashes, n)
    return ExtendColumns(
        sequence_ids=list(m.sequence_ids),
        slots_needed=column("drawn.slots_needed", m.slots_needed, n, required=True),
        processed_tokens=column("drawn.processed_tokens", m.processed_tokens, n) or [0] * n,
        publish_tokens=column("drawn.publish_tokens", m.publish_tokens, n),
        hash_counts=counts,
        hashes=cut_hashes("drawn", counts, m.hashes, shape) if counts or m.hashes else [],
    )


def _extend(m: pb.ExtendItems, shape: WireShape, limits: ServiceLimits) -> ExtendColumns:
    ids = _sequence_ids("extend", m.sequence_ids, limits)
    n = len(ids)
    counts = column("extend.num_hashes", m.num_hashes, n)
    return ExtendColumns(
        sequence_ids=ids,
        slots_needed=column("extend.slots_needed", m.slots_needed, n, required=True),
        processed_tokens=column("extend.processed_tokens", m.processed_tokens, n) or [0] * n,
        publish_tokens=column("extend.publish_tokens", m.publish_tokens, n),
        hash_counts=counts,
        hashes=cut_hashes("extend", counts, m.hashes, shape) if counts or m.hashes else [],
        num_lookahead_tokens=column("extend.num_lookahead_tokens", m.num_lookahead_tokens, n),
        computed_tokens=column("extend.computed_tokens", m.computed_tokens, n),
        num_encoder_tokens=column("extend.num_encoder_tokens", m.num_encoder_tokens, n),
        reserved_blocks=column("extend.reserved_blocks", m.reserved_blocks, n),
    )


def _admit(m: pb.AdmitItems, shape: WireShape, limits: ServiceLimits) -> AdmitColumns:
    ids = _sequence_ids("admit", m.sequence_ids, limits)
    n = len(ids)
    if m.token_budget < 0:
        raise InvalidField("admit.token_budget", m.token_budget, f"must be 0..{MAX_INT32}")
    counts = column("admit.num_hashes", m.num_hashes, n)
    num_tokens = column("admit.num_tokens", m.num_tokens, n, low=1, required=True)
    skip_lookup = column("admit.skip_lookup", m.skip_lookup, n)
    hashes = cut_hashes("admit", counts, m.hashes, shape)
    if shape.enable_caching and not all(counts):
        counts = _as_remembered(counts or [0] * n, num_tokens, skip_lookup or [False] * n, shape)
    return AdmitColumns(
        sequence_ids=ids,
        num_tokens=num_tokens,
        num_prompt_tokens=column("admit.num_prompt_tokens", m.num_prompt_tokens, n),
        hash_counts=counts,
        hashes=hashes,
        max_hit_tokens=column("admit.max_hit_tokens", m.max_hit_tokens, n, low=-1),
        max_new_tokens=column("admit.max_new_tokens", m.max_new_tokens, n, low=-1),
        budget_overhead=column("admit.budget_overhead_tokens", m.budget_overhead_tokens, n),
        alignment=_zero_is("admit.alignment_tokens", m.alignment_tokens, n, 1),
        num_lookahead_tokens=column("admit.num_lookahead_tokens", m.num_lookahead_tokens, n),
        num_external_tokens=column("admit.num_external_tokens", m.num_external_tokens, n),
        num_encoder_tokens=column("admit.num_encoder_tokens", m.num_encoder_tokens, n),
        full_sequence_must_fit=column("admit.full_sequence_must_fit", m.full_sequence_must_fit, n),
        watermark_blocks=column("admit.watermark_blocks", m.watermark_blocks, n),
        reserved_blocks=column("admit.reserved_blocks", m.reserved_blocks, n),
        defer_publish=column("admit.defer_publish", m.defer_publish, n),
        skip_lookup=skip_lookup,
        expect_hit_tokens=column("admit.expect_hit_tokens", m.expect_hit_tokens, n, low=-1),
    )


def _as_remembered(counts: list[int], num_tokens: list[int], skip_lookup: list[bool], shape: WireShape) -> list[int]:
    """No hashes where there could be some: the daemon is to use those that were sent before (R19), which is -1."""
    rows = zip(counts, num_tokens, skip_lookup, strict=True)
    return [c or (0 if skip or tokens < shape.hash_unit_tokens else -1) for c, tokens, skip in rows]


def decode_lookup(m: pb.LookupItems, shape: WireShape, limits: ServiceLimits) -> LookupColumns:
    """Lookup items have no sequence: ids are 0."""
    n = len(m.num_tokens)
    if n > limits.max_items:
        raise TooManyItems("lookup.num_tokens", n, limits.max_items)
    counts = column("lookup.num_hashes", m.num_hashes, n, required=True)
    return LookupColumns(
        sequence_ids=[0] * n,
        num_tokens=column("lookup.num_tokens", m.num_tokens, n, low=1),
        hash_counts=counts,
        hashes=cut_hashes("lookup", counts, m.hashes, shape),
        max_hit_tokens=column("lookup.max_hit_tokens", m.max_hit_tokens, n, low=-1),
    )


def _invalidate(m: pb.InvalidateItems, shape: WireShape, limits: ServiceLimits) -> Invalidation:
    if len(m.block_ids) > limits.max_items:
        raise TooManyItems("invalidate.block_ids", len(m.block_ids), limits.max_items)
    ids = _sequence_ids("invalidate", m.sequence_ids, limits)
    return Invalidation(
        block_ids=block_ids("invalidate.block_ids", m.block_ids, shape.num_blocks),
        sequence_ids=ids,
        first_tokens=column("invalidate.first_tokens", m.first_tokens, len(ids)),
    )


def block_ids(field: str, values: Any, num_blocks: int) -> list[int]:
    """Ids of real blocks: the null block is none."""
    found = list(values)
    if found and not (min(found) > 0 and max(found) < num_blocks):
        wrong = next(b for b in found if not 0 < b < num_blocks)
        raise InvalidField(field, wrong, f"must be 1..{num_blocks - 1}")
    return found


def _zero_is(field: str, values: Any, num_items: int, meaning: int) -> list[int]:
    """A column in which 0 stands for the default."""
    return [value or meaning for value in column(field, values, num_items)]
