"""Extends that a client serves itself, from blocks that were allotted to its session, and tells with the next request.

allotted 7 9 4 2        A: [3]    B: [5]
A needs 17 slots        A: [3 7]  B: [5]         drawn items: A 17
B needs 33              A: [3 7]  B: [5 9 4]     drawn items: A 17, B 33; 3 blocks
next request            drawn A 17, B 33; then what is freed, extended, admitted
"""

from typing import Any

from kvhold_client.foresight import Foresight
from kvhold_client.mirror import Mirror
from kvhold_client.sequence import Sequence, SequenceState
from kvhold_client.shape import PoolShape
from kvhold_client.step import StepBuilder
from kvhold_client.step_outcome import ExtendAsk, StepOutcome

_RUNNING = SequenceState.RUNNING


class Drawing:
    """What of a table's extends needs no request. Puts what must be told into the table's builder."""

    def __init__(self, shape: PoolShape, mirror: Mirror, builder: StepBuilder) -> None:
        self.foresight = Foresight()
        self._max_slots = shape.max_model_len_tokens
        self._unit_tokens, self._hash_size_bytes = shape.hash_block_size_tokens, shape.hash_size_bytes
        self._mirror = mirror
        self._builder = builder
        self.last_step = 0  # in which somebody was served
        self._drawing: list[Sequence] = []  # parallel to the builder's drawn items

    def serve(self, sequence: Sequence, slots: int, processed: int, publish: int, known: StepOutcome) -> bool:
        """Answers an extend in `known`; False if only the daemon can. Flat: it is what most of a step costs."""
        foresight, mirror, builder = self.foresight, self._mirror, self._builder
        if not foresight.is_open or sequence.state is not _RUNNING:
            return False
        if slots > self._max_slots:
            slots = self._max_slots
        size = mirror.only_block_size
        if size:
            need = -(-slots // size) - len(sequence.tables[0])
            if need < 0:
                need = 0
        else:
            if mirror.releases_unpublished(sequence, processed):  # to the front of the free list: taken before the rest
                return False
            missing = mirror.missing_blocks(sequence, slots)
            need = sum(missing)
        if known.refused_extends or (need > foresight.num_available and not mirror.forgets):
            known.refused_extends.append(extend_ask(sequence, slots, processed, publish, {}))
            return True
        if need > foresight.num_left:
            foresight.num_missing = need
            return False
        num_said = sequence.num_hashes_sent + sequence.num_hashes_drawn
        num_hashes = sequence.num_hashes - num_said
        if num_hashes:
            builder.drawn_items.hash_parts.append(sequence.hashes[num_said * self._hash_size_bytes :])
            sequence.num_hashes_drawn += num_hashes
        builder.drawn_items.rows.append((sequence.sequence_id, slots, processed, publish, num_hashes))
        builder.num_drawn_blocks += need
        self.last_step = mirror.step
        self._drawing.append(sequence)
        if foresight.refused is not None and publish > sequence.published_tokens:
            foresight.published(sequence, sequence.published_tokens // self._unit_tokens, self._hash_size_bytes)
        blocks = foresight.draw(need) if need else []
        if size:
            mirror.take_plainly(sequence, blocks, publish)
            known.new_block_ids.append([blocks])
        else:
            if blocks and mirror.forgets:  # a prefix may be lost as a whole, and its sequence need less
                foresight.refused = None
            known.new_block_ids.append(mirror.take_drawn(sequence, missing, blocks, processed, publish))
            if mirror.forgets and max(sequence.released):
                foresight.more_is_free()
        known.extended.append(sequence)
        return True

    def told(self) -> None:
        """The request with all drawn items was answered."""
        for sequence, row in zip(self._drawing, self._builder.drawn_items.rows, strict=True):
            if sequence.num_hashes_drawn:  # else it was let go meanwhile, or lost
                sequence.num_hashes_sent += row[4]
                sequence.num_hashes_drawn -= row[4]
        self._drawing.clear()


def extend_ask(sequence: Sequence, slots: int, processed: int, publish: int, options: dict[str, Any]) -> ExtendAsk:
    """An extend that was refused, or not tried."""
    return ExtendAsk(
        sequence=sequence, slots_needed=slots, processed_tokens=processed, publish_tokens=publish, options=options
    )
