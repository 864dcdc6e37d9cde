"""The usual decode step in bulk: many sequences of one plain group grow by a block, and all of them can.

    slots needed ─▶ blocks missing (a number each) ─▶ one draw ─▶ cut ─▶ tables
                                                  └▶ more than there are: nothing is changed, they are asked one by one

Blocks, order and answers are those of one item after the other: drawing for all first and publishing afterwards ends in
the same state, because what is published is held, and what is drawn is free.
"""

from __future__ import annotations

from itertools import repeat

from kvhold_server.pool.groups import Groups
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import ExtendColumns, Status
from kvhold_server.pool.waiting import cut


def is_plain(columns: ExtendColumns) -> bool:
    """Nothing but slots and hashes is asked for, of sequences that differ."""
    rare = columns.num_lookahead_tokens or columns.num_encoder_tokens or columns.reserved_blocks
    return not rare and len(set(columns.sequence_ids)) == len(columns.sequence_ids)


def extend_together(turn: Turn, columns: ExtendColumns, groups: Groups) -> bool:
    """Applies all items and answers them in the turn's output. False: nothing was changed, ask one by one.

    For pools whose single group is plain, and columns that are.
    """
    config, store, get = groups.config, groups.store, turn.owner.sequences.get
    sequences = [sequence for sequence in map(get, columns.sequence_ids) if sequence is not None]
    slots, publish = columns.slots_needed, columns.publish_tokens
    num_items = len(columns.sequence_ids)
    lowest = min(min(slots), min(columns.processed_tokens), min(publish, default=0))
    if len(sequences) != num_items or lowest < 0 or max(slots) > config.max_model_len:
        return False
    size = groups.plain_sizes[0]
    counts = []
    for sequence, wanted in zip(sequences, slots, strict=True):
        missing = -(-wanted // size) - len(sequence.tables[0])
        counts.append(missing if missing > 0 else 0)
    total = sum(counts)
    if total > store.available(turn.session):
        return False
    blocks = store.take(total, turn.session) if total else []
    at = 0
    for sequence, num in zip(sequences, counts, strict=True):
        if num:
            sequence.tables[0] += blocks[at : at + num]
            at += num
    if columns.hashes:
        for sequence, hashes in zip(sequences, cut(columns.hashes, columns.hash_counts), strict=True):
            if hashes:
                sequence.hashes += hashes
    if publish and config.enable_caching:
        publish_together(turn, sequences, publish, groups)
    output = turn.output
    if turn.zeroing:
        output.zero_blocks += blocks
    output.extend_status += repeat(Status.OK, num_items)
    output.extend_counts += counts
    output.extend_blocks += blocks
    return True


def publish_together(turn: Turn, sequences: list[Sequence], tokens: list[int], groups: Groups) -> None:
    """What these known tokens fill: as `Groups.publish`, sequence by sequence."""
    prefixes = groups.store.prefixes
    if prefixes.events is not None and prefixes.tells_stored:
        for sequence, known in zip(sequences, tokens, strict=True):
            if known and not sequence.is_stale:
                groups.publish(sequence, known, turn)
        return
    size, withheld = groups.plain_sizes[0], groups.withheld_tokens
    blocks: list[int] = []
    hashes: list[bytes] = []
    lengths: list[int] = []
    for sequence, known in zip(sequences, tokens, strict=True):
        table, digests = sequence.tables[0], sequence.hashes
        if known // size > len(digests):
            known = len(digests) * size
        end, start = (known - withheld) // size, sequence.offered[0]
        if end > len(table):
            end = len(table)
        if end <= start or sequence.is_stale:
            continue
        sequence.offered[0] = end
        if end == start + 1:  # nearly always
            blocks.append(table[start])
            hashes.append(digests[start])
            lengths.append(end * size)
        else:
            blocks += table[start:end]
            hashes += digests[start:end]
            lengths += range((start + 1) * size, end * size + 1, size)
    if blocks:
        prefixes.publish(0, blocks, hashes, turn.origin(0), lengths)
