"""What waiting sequences ask for: one row of a step's admit columns as a value, and the last answer to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from kvhold_server.pool.values import Admitted, StepInput


@dataclass(slots=True, kw_only=True)
class AdmitItem:
    """One row of AdmitColumns; see there."""

    sequence_id: int
    num_tokens: int
    num_prompt_tokens: int
    hashes: list[bytes] | None
    max_hit_tokens: int = -1
    max_new_tokens: int = -1
    budget_overhead: int = 0
    alignment: int = 1
    num_lookahead_tokens: int = 0
    num_external_tokens: int = 0
    num_encoder_tokens: int = 0
    full_sequence_must_fit: bool = False
    watermark_blocks: int = 0
    reserved_blocks: int = 0
    defer_publish: bool = False
    skip_lookup: bool = False
    is_resumed: bool = False
    expect_hit_tokens: int = -1


class Refusal:
    """What a waiting sequence was told, and when: the same question gets the same answer until something changes."""

    __slots__ = ("_item", "_version", "answer")

    def __init__(self, version: int, item: AdmitItem, answer: Admitted) -> None:
        self._version = version
        self._item = item
        self.answer = answer

    def holds(self, version: int, item: AdmitItem) -> bool:
        """Is it still true for this item, which sends no hashes?"""
        if self._version != version or item.hashes is not None:
            return False
        self._item.hashes = None
        return self._item == item


def cut(hashes: list[bytes], counts: list[int]) -> Iterator[list[bytes]]:
    """Cuts a flat column of hashes into the items' lists; a negative count takes none."""
    start = 0
    for count in counts:
        if count > 0:
            yield hashes[start : start + count]
            start += count
        else:
            yield []


def admit_items(items: StepInput) -> Iterator[AdmitItem]:
    """The rows of a step's admit columns."""
    columns = items.admit
    num = len(columns.sequence_ids)
    counts = columns.hash_counts or [0] * num
    rows = zip(
        columns.sequence_ids,
        columns.num_tokens,
        columns.num_prompt_tokens or columns.num_tokens,
        counts,
        cut(columns.hashes, counts),
        columns.max_hit_tokens or repeat(-1),
        columns.max_new_tokens or repeat(-1),
        columns.budget_overhead or repeat(0),
        columns.alignment or repeat(1),
        columns.num_lookahead_tokens or repeat(0),
        columns.num_external_tokens or repeat(0),
        columns.num_encoder_tokens or repeat(0),
        columns.full_sequence_must_fit or repeat(False),
        columns.watermark_blocks or repeat(0),
        columns.reserved_blocks or repeat(0),
        columns.defer_publish or repeat(False),
        columns.skip_lookup or repeat(False),
        columns.is_resumed or repeat(False),
        columns.expect_hit_tokens or repeat(-1),
        strict=False,
    )
    for row in rows:
        yield AdmitItem(
            sequence_id=row[0],
            num_tokens=row[1],
            num_prompt_tokens=row[2],
            hashes=None if row[3] < 0 else row[4],
            max_hit_tokens=row[5],
            max_new_tokens=row[6],
            budget_overhead=row[7],
            alignment=row[8],
            num_lookahead_tokens=row[9],
            num_external_tokens=row[10],
            num_encoder_tokens=row[11],
            full_sequence_must_fit=row[12],
            watermark_blocks=row[13],
            reserved_blocks=row[14],
            defer_publish=row[15],
            skip_lookup=row[16],
            is_resumed=row[17],
            expect_hit_tokens=row[18],
        )
