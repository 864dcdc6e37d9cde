"""StepAnswer → the responses of BlockService. Statuses are translated once per item, everything else is copied flat.

The pool answers only the items that it tried; the wire answers all of them, in order, the rest NOT_TRIED.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any, TypeAlias

from kvhold.v1 import block_pb2 as pb
from kvhold_server.node.step_values import StepAnswer, StepCommand
from kvhold_server.node.steps import is_unknown
from kvhold_server.pool.errors import NeverFits, SequenceExists
from kvhold_server.pool.values import Bound, Counts, Status, StepOutput

WireStatus: TypeAlias = "pb.ItemStatus.ValueType"
OK = pb.ITEM_STATUS_OK
MAX_PROBLEMS = 100
FAILED = (Status.REFUSED, Status.CONFLICT, Status.ERROR)
NOT_TRIED = pb.ITEM_STATUS_NOT_TRIED

# Of an item that failed with an error of its own: which status the error is.
STATUS_OF_ERROR: tuple[tuple[Callable[[object], bool], WireStatus], ...] = (
    (is_unknown, pb.ITEM_STATUS_UNKNOWN_SEQUENCE),
    (lambda error: isinstance(error, SequenceExists), pb.ITEM_STATUS_SEQUENCE_EXISTS),
    (lambda error: isinstance(error, NeverFits), pb.ITEM_STATUS_NEVER_FITS),
)


def encode_step(boot_id: str, command: StepCommand, answer: StepAnswer) -> pb.StepResponse:
    """The answer to a StepRequest."""
    out, items = answer.output, command.items
    response = pb.StepResponse(boot_id=boot_id, replayed=answer.replayed)
    if items.free.sequence_ids:
        response.num_freed_blocks.extend(out.free_counts)
    if items.extend.sequence_ids:
        fill_extend(response.extend, len(items.extend.sequence_ids), answer)
    if items.admit.sequence_ids:
        fill_admit(response.admit, len(items.admit.sequence_ids), answer)
    if items.lookup.num_tokens:
        fill_lookup(response.lookup, answer)
    fill_duties(response, out)
    if answer.evicted_hashes:
        response.evicted_hashes = b"".join(answer.evicted_hashes)
    fill_counts(response.counts, answer.counts, answer.num_available_blocks)
    fill_problems(response, out)
    if out.is_only_session:
        response.is_only_session = True
        response.allotted_block_ids.extend(out.allotted_blocks)
    return response


def fill_problems(response: Any, out: StepOutput) -> None:
    """Why items failed for reasons of their own."""
    for (part, index), error in islice(out.errors.items(), MAX_PROBLEMS):
        response.problems.add(part=part, index=index, reason=error.reason(), message=str(error))


def fill_extend(message: pb.ExtendResults, num_items: int, answer: StepAnswer) -> None:
    """Extend results, padded to all items."""
    out = answer.output
    tried = out.extend_status
    statuses: list[WireStatus] = [OK] * len(tried)
    if any(tried):
        statuses = [item_status("extend", i, status, 0, NOT_TRIED, answer) for i, status in enumerate(tried)]
    missing = num_items - len(statuses)
    message.statuses.extend(statuses + [NOT_TRIED] * missing if missing else statuses)
    message.num_new_blocks.extend(out.extend_counts)
    if missing:
        message.num_new_blocks.extend([0] * (missing * answer.num_groups))
    message.block_ids.extend(out.extend_blocks)


def fill_admit(message: pb.AdmitResults, num_items: int, answer: StepAnswer) -> None:
    """Admit results, padded to all items."""
    out = answer.output
    tried = zip(out.admit_status, out.admit_bound, strict=True)
    missing = num_items - len(out.admit_status)
    zeros = [0] * missing
    rest = _rest_status(out) if missing or any(out.admit_status) else OK
    statuses = [item_status("admit", i, status, bound, rest, answer) for i, (status, bound) in enumerate(tried)]
    message.statuses.extend(statuses + [rest] * missing)
    message.hit_tokens.extend(out.admit_hit_tokens + zeros)
    message.granted_tokens.extend(out.admit_new_tokens + zeros)
    message.shared_prefix_boundary_tokens.extend(out.admit_boundary_tokens + zeros)
    per_group = [0] * (missing * answer.num_groups)
    message.num_blocks.extend(out.admit_counts + per_group)
    message.num_hit_blocks.extend(out.admit_hit_counts + per_group)
    message.block_ids.extend(out.admit_blocks)


def fill_lookup(message: pb.LookupResults, answer: StepAnswer) -> None:
    """Lookup results."""
    message.hit_tokens.extend(answer.output.lookup_hit_tokens)
    message.shared_prefix_boundary_tokens.extend(answer.output.lookup_boundary_tokens)
    message.num_blocks.extend(answer.lookup_counts)
    message.block_ids.extend(answer.lookup_blocks)


def fill_duties(response: Any, out: StepOutput) -> None:
    """What the workers must do, or may: copies, zeroing, states to hand on."""
    if out.copies:
        response.copies.group_ids.extend(copy.group for copy in out.copies)
        response.copies.source_block_ids.extend(copy.source for copy in out.copies)
        response.copies.target_block_ids.extend(copy.target for copy in out.copies)
    if out.zero_blocks:
        response.zero_block_ids.extend(out.zero_blocks)
    if out.hand_offs:
        response.handoffs.sequence_ids.extend(hand.sequence_id for hand in out.hand_offs)
        response.handoffs.group_ids.extend(hand.group for hand in out.hand_offs)
        response.handoffs.block_ids.extend(hand.block for hand in out.hand_offs)
        response.handoffs.boundary_tokens.extend(hand.boundary_tokens for hand in out.hand_offs)


def fill_counts(message: pb.PoolCounts, counts: Counts, num_available_blocks: int) -> None:
    """Blocks by state."""
    message.num_free_blocks = counts.free
    message.num_cached_blocks = counts.cached
    message.num_held_blocks = counts.held
    message.num_quarantined_blocks = counts.quarantined
    message.num_provisional_blocks = counts.provisional
    message.num_blocks = counts.total
    message.num_available_blocks = num_available_blocks


def item_status(part: str, index: int, status: int, bound: int, untried: WireStatus, answer: StepAnswer) -> WireStatus:
    """The wire's status of one tried item."""
    if status == Status.OK:
        return OK
    if status == Status.REFUSED:
        if bound == Bound.STATE_NOT_WRITTEN:
            return pb.ITEM_STATUS_STATE_NOT_READY
        return pb.ITEM_STATUS_QUOTA_EXCEEDED if answer.quota_limited else pb.ITEM_STATUS_OUT_OF_BLOCKS
    if status == Status.NOT_TRIED:
        return pb.ITEM_STATUS_NO_BUDGET if bound == Bound.BUDGET else untried
    if status == Status.CONFLICT:
        return pb.ITEM_STATUS_HIT_CONFLICT
    error = answer.output.errors.get((part, index))
    return next((found for matches, found in STATUS_OF_ERROR if matches(error)), pb.ITEM_STATUS_INVALID)


def _rest_status(out: StepOutput) -> WireStatus:
    """Of admits that were not looked at: an item before them was refused, or the budget was used up."""
    refused = any(out.extend_status) or any(status in FAILED for status in out.admit_status)
    return NOT_TRIED if refused else pb.ITEM_STATUS_NO_BUDGET
