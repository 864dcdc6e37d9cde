"""One step of one session on one pool: exactly once, counters after it.

    begin (step log) ─▶ seen before? ─▶ the same contents? ─▶ the first answer again
         │
         ▼ complete, drawn, free, invalidate, extend, admit, lookup, allot
         ▼ counters, evictions ─▶ answer ─▶ finish (step log)

The pool applies complete, free, extend, admit and lookup in one call. Where hashes are to be dropped between free and
extend, the step is applied in two calls of the same number.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from kvhold_server.node.errors import StepContentsDiffer
from kvhold_server.node.live_pool import LivePool, PoolTotals
from kvhold_server.node.quotas import apply_quota
from kvhold_server.node.step_values import StepAnswer, StepCommand
from kvhold_server.pool.errors import HashesMissing, NeverFits, UnknownSequence
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.values import Bound, ExtendColumns, FreeColumns, Removed, Status, StepInput, StepOutput
from kvhold_server.sessions.session import Session

MAX_REMEMBERED_PREEMPTIONS = 65_536
_NO_WISHES = frozenset({"is_resumed", "annotated"})


def apply_step(
    live: LivePool, session: Session, command: StepCommand, now_s: float, quota_left: int | None = None
) -> StepAnswer:
    """`quota_left`: blocks that the tenant may still take; None: unbounded.

    Raises StepOutOfOrder, StepContentsDiffer, TooManyOpenSteps; then nothing was applied.
    """
    items = command.items
    stored = session.steps.begin(items.step, command.part, items.completed_step)
    if isinstance(stored, StepAnswer):
        check_retry(session, command, stored)
        live.totals.num_replayed_steps += 1
        return replace(stored, replayed=True)
    remember_preempted(live, session.slot, command)
    if command.annotated:
        live.annotations.add(session.slot, command.annotated)
    quota_limited = False
    if quota_left is not None:
        # The wish stays as it came. Nothing is allotted: what is drawn from that is not counted in time.
        items = replace(items, extend=replace(items.extend), admit=replace(items.admit), max_allotted_blocks=0)
        quota_limited = apply_quota(live, session.slot, items, quota_left)
    if live.journal is not None and live.journal.unverified:
        drawn = live.pool.tenures.sessions[session.slot].allotted[: items.num_drawn_blocks]
        live.verify(items.admit.hashes, overwritten=drawn)
    if command.invalidate:
        output = _step_around_invalidation(live, session.slot, command, items, now_s)
    else:
        output = live.pool.step(session.slot, items, now_s=now_s)
    count_items(live.totals, output, quota_limited=quota_limited)
    live.note(output.completed, output.events)
    if output.completed_last is not None:
        live.note(output.completed_last, ())
    if live.journal is not None:
        live.journal.allot(output.allotted_blocks)
    if len(live.annotations):
        live.annotations.drop(session.slot, items.free.sequence_ids)
    answer = StepAnswer(
        output=output,
        counts=live.pool.counts(),
        num_available_blocks=live.pool.available(session.slot),
        num_groups=len(live.config.groups),
        quota_limited=quota_limited,
    )
    if command.report_evictions:
        answer.evicted_hashes = evicted_hashes(output)
    if command.include_lookup_blocks:
        _add_lookup_blocks(live.pool, session.slot, items, answer)
    session.steps.finish(items.step, command.part, items.completed_step, answer)
    session.asked = command
    is_ahead = items.step - items.completed_step > 1
    session.num_lookahead_blocks = num_given(output) if is_ahead else 0
    return answer


def num_given(output: StepOutput) -> int:
    """New table entries of a step: blocks that it gave, not those that it hit."""
    return len(output.extend_blocks) + len(output.admit_blocks) - sum(output.admit_hit_counts)


def check_retry(session: Session, command: StepCommand, answer: StepAnswer) -> None:
    """A retry wishes what was wished first. Raises StepContentsDiffer.

    Of the newest step the whole request is at hand, by reference: keeping it costs an ordinary step nothing, and only
    a retry pays for comparing. Of the few before it the number of items is.
    """
    items, output, asked = command.items, answer.output, session.asked
    if isinstance(asked, StepCommand) and (asked.items.step, asked.part) == (items.step, command.part):
        different = _first_difference(asked, command)
    else:
        pairs = (
            ("free", items.free.sequence_ids, output.free_status),
            ("extend", items.extend.sequence_ids, output.extend_status),
            ("admit", items.admit.sequence_ids, output.admit_status),
        )
        different = next((f"items.{name}.sequence_ids" for name, now, then in pairs if len(now) != len(then)), "")
    if different:
        raise StepContentsDiffer(different.removeprefix("items."), items.step, command.part)


def _first_difference(first: Any, again: Any) -> str:
    """Path of the first field that differs; empty: none does. What the daemon adds, or only tells watchers, is none."""
    for field in fields(first):
        one, other = getattr(first, field.name), getattr(again, field.name)
        if field.name in _NO_WISHES or one == other:
            continue
        if not is_dataclass(one):
            return field.name
        if deeper := _first_difference(one, other):
            return f"{field.name}.{deeper}"
    return ""


def remember_preempted(live: LivePool, slot: int, command: StepCommand) -> None:
    """Sequences freed as preempted are admitted as resumed later, and counted apart then. Bounded, oldest forgotten."""
    known = live.preempted
    if known and not command.preempted:
        for sequence_id in command.items.free.sequence_ids:
            known.pop((slot, sequence_id), None)
    if command.preempted:
        for sequence_id, preempted in zip(command.items.free.sequence_ids, command.preempted, strict=True):
            known.pop((slot, sequence_id), None)  # a finished id may be used again at once
            if preempted:
                known[(slot, sequence_id)] = None
        while len(known) > MAX_REMEMBERED_PREEMPTIONS:
            del known[next(iter(known))]
    admit = command.items.admit
    if known and admit.sequence_ids:
        admit.is_resumed = [(slot, sequence_id) in known for sequence_id in admit.sequence_ids]


def evicted_hashes(output: StepOutput) -> list[bytes]:
    """Digests whose last block of a group was taken in this step."""
    return [
        block_hash
        for event in output.events
        if isinstance(event, Removed)
        for block_hash, left in zip(event.hashes, event.copies_left, strict=True)
        if not left
    ]


def count_items(totals: PoolTotals, output: StepOutput, *, quota_limited: bool = False) -> None:
    """Adds a step's items to the pool's counters."""
    totals.num_steps += 1
    num_extends = len(output.extend_status) + output.num_drawn_items
    totals.step_items.observe(len(output.free_status) + num_extends + len(output.admit_status))
    results = totals.allocations
    results["ok"] += output.num_drawn_items
    for status in output.extend_status:
        results["ok" if status == Status.OK else allocation_result(status, 0, quota_limited)] += 1
    for status, bound in zip(output.admit_status, output.admit_bound, strict=True):
        results["ok" if status == Status.OK else allocation_result(status, bound, quota_limited)] += 1
    for (part, _), error in output.errors.items():
        if part in ("admit", "extend") and isinstance(error, NeverFits):
            totals.allocations["error"] -= 1
            totals.allocations["never_fits"] += 1


def allocation_result(status: int, bound: int, quota_limited: bool) -> str:
    """The word for an item that got nothing."""
    if status == Status.REFUSED:
        if bound == Bound.STATE_NOT_WRITTEN:
            return "state_not_ready"
        return "quota" if quota_limited else "out_of_blocks"
    if status == Status.NOT_TRIED:
        return "no_budget" if bound == Bound.BUDGET else "not_tried"
    return "hit_conflict" if status == Status.CONFLICT else "error"


def is_unknown(error: object) -> bool:
    """Whether an item failed because the pool does not know the sequence (any more)."""
    return isinstance(error, UnknownSequence | HashesMissing)


def _step_around_invalidation(
    live: LivePool, slot: int, command: StepCommand, items: StepInput, now_s: float
) -> StepOutput:
    first = StepInput(
        step=items.step,
        completed_step=min(items.completed_step, items.step - 1),
        num_drawn_blocks=items.num_drawn_blocks,
        drawn=items.drawn,
        free=items.free,
    )
    freed = live.pool.step(slot, first, now_s=now_s)
    drop_hashes(live, slot, command)
    rest = replace(items, drawn=ExtendColumns(), free=FreeColumns())
    output = live.pool.step(slot, rest, now_s=now_s)
    output.completed, output.num_drawn_items = freed.completed, freed.num_drawn_items
    output.free_status, output.free_counts = freed.free_status, freed.free_counts
    output.events[:0] = [*freed.events, *live.pool.take_events()]
    output.copies[:0] = freed.copies
    output.zero_blocks[:0] = freed.zero_blocks
    output.errors |= {key: error for key, error in freed.errors.items() if key[0] == "free"}
    return output


def drop_hashes(live: LivePool, slot: int, command: StepCommand) -> None:
    """R10: hashes go, blocks stay."""
    wanted = command.invalidate
    live.pool.evict(wanted.block_ids)
    first_tokens = wanted.first_tokens or [0] * len(wanted.sequence_ids)
    for sequence_id, first in zip(wanted.sequence_ids, first_tokens, strict=True):
        try:
            tables = live.pool.tables(slot, sequence_id)
        except UnknownSequence:
            continue  # gone already: it has no hashes to drop
        sizes = [group.block_size_tokens for group in live.config.groups]
        blocks = [b for table, size in zip(tables, sizes, strict=True) for b in table[first // size :] if b]
        live.pool.invalidate(slot, sequence_id, blocks)


def _add_lookup_blocks(pool: Pool, slot: int, items: StepInput, answer: StepAnswer) -> None:
    """For diagnosis: the blocks that a lookup found."""
    columns, position = items.lookup, 0
    for i, count in enumerate(columns.hash_counts):
        hit = pool.lookup(
            slot,
            num_tokens=columns.num_tokens[i],
            hashes=columns.hashes[position : position + count],
            max_hit_tokens=columns.max_hit_tokens[i] if columns.max_hit_tokens else -1,
        )
        position += count
        answer.lookup_counts += map(len, hit.blocks)
        answer.lookup_blocks += [block for table in hit.blocks for block in table]
