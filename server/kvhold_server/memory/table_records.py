"""Reading all records of a block table at once: what they say, whether they are whole, in which order they were used.

    file      record 1 │ record 2 │ record 3 │ …             block_table.py draws one
    columns   checksums, stamps, tokens, generations, …      an array each, without an object for each record

No statement here runs once a block: whole columns go through functions that are written in C. What records say and
whether that may be believed are two questions, so that two processes can answer them side by side.
"""

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

from kvhold_server.memory.block_table_header import RECORDS_OFFSET, TableHeader
from kvhold_server.memory.chosen_blocks import Chosen
from kvhold_server.memory.record_checksum import checksum_of

WORD: Final = 8
BODY_OFFSET: Final = 16
_TOKENS_OFFSET: Final = 8  # in the body, after the checksum of the block's bytes
_GENERATION_OFFSET: Final = 12
_GROUP_OFFSET: Final = 16
_HASH_OFFSET: Final = 24


def body_struct(hash_size_bytes: int) -> struct.Struct:
    """Checksum of the block's bytes, prefix length in tokens, generation, group, padding, hash."""
    return struct.Struct(f"=QIIHHI{hash_size_bytes}s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What the records of the current generation say, whole or not: parallel columns by ascending block id."""

    blocks: list[int]
    groups: "array[int]"
    hashes: list[bytes]
    key_tokens: "array[int]"
    bytes_checksums: "array[int]"  # 0: not taken
    outdated: list[int]  # blocks whose record is of another generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Which of them count."""

    torn: list[int]  # blocks whose record is not the one that its checksum was taken of, of whatever generation
    order: list[int]  # the other blocks of the current generation, least recently used first
    newest_stamp: int


class RecordReader:
    """Changes nothing. The buffer is the whole file."""

    def __init__(self, buffer: memoryview, header: TableHeader) -> None:
        checksum = checksum_of(header.checksum_kind)
        assert checksum is not None
        self._buffer = buffer
        self._header = header
        self._checksum = checksum

    def records(self) -> Records:
        """What they say."""
        chosen, outdated = self._current(Chosen.of(self._numbers("Q", 0)))
        return Records(
            blocks=chosen.blocks,
            groups=chosen.among(self._numbers("H", BODY_OFFSET + _GROUP_OFFSET)),
            hashes=list(self._parts(_HASH_OFFSET, self._header.hash_size_bytes, chosen)),
            key_tokens=chosen.among(self._numbers("i", BODY_OFFSET + _TOKENS_OFFSET)),
            bytes_checksums=chosen.among(self._numbers("Q", BODY_OFFSET)),
            outdated=outdated,
        )

    def verdict(self) -> Verdict:
        """Whether it may be believed."""
        said = self._numbers("Q", 0)
        chosen = Chosen.of(said)  # the rest says nothing
        torn = self._torn(chosen, said)
        if torn:
            for block in torn:
                said[block] = 0
            chosen = Chosen.of(said)
        stamp_of = self._numbers("Q", WORD)
        newest = max(chosen.among(stamp_of), default=0)
        current, _ = self._current(chosen)
        return Verdict(torn=torn, order=_in_order(current, stamp_of), newest_stamp=newest)

    def _current(self, chosen: Chosen) -> tuple[Chosen, list[int]]:
        """Those of the generation that counts, and the others."""
        current = self._header.generation & 0xFFFFFFFF
        generation_of = self._numbers("I", BODY_OFFSET + _GENERATION_OFFSET)
        generations = chosen.among(generation_of)
        if generations == array("I", [current]) * len(generations):
            return chosen, []
        rows = zip(chosen.blocks, generations, strict=True)
        outdated = [block for block, generation in rows if generation != current]
        flags = array("Q", bytes(WORD * len(generation_of)))
        for block in set(chosen.blocks).difference(outdated):
            flags[block] = 1
        return Chosen.of(flags), outdated

    def _torn(self, chosen: Chosen, said: "array[int]") -> list[int]:
        """Block 0 has no record: if it says something, that is wrong."""
        blocks, expected = chosen.blocks, chosen.among(said)
        body_size = body_struct(self._header.hash_size_bytes).size
        found = array("Q", map(self._checksum, self._parts(0, body_size, chosen), blocks))
        if found == expected and not said[0]:
            return []
        rows = zip(blocks, found, expected, strict=True)
        return [block for block, right, word in rows if word != (right or 1) or not block]

    def _parts(self, offset: int, size_bytes: int, chosen: Chosen) -> Iterator[bytes]:
        """So many bytes of the bodies of those records, in order."""
        before, record_size = BODY_OFFSET + offset, self._header.record_size_bytes
        record = struct.Struct(f"{before}x{size_bytes}s{record_size - before - size_bytes}x")
        if not chosen.blocks:
            return iter(())
        first, last = chosen.blocks[0], chosen.blocks[-1]
        records = self._buffer[RECORDS_OFFSET:][first * record_size : (last + 1) * record_size]
        return chain.from_iterable(chosen.within(record.iter_unpack(records)))

    def _numbers(self, item_format: Literal["H", "I", "Q", "i"], offset: int) -> "array[int]":
        """One field of all records, without an object for each: filling fresh memory is what takes the time here."""
        items = self._buffer.cast(item_format)
        step = self._header.record_size_bytes // items.itemsize
        return array(item_format, items[(RECORDS_OFFSET + offset) // items.itemsize :: step].tobytes())


def _in_order(chosen: Chosen, stamp_of: "array[int]") -> list[int]:
    """Blocks by stamp, of which there is one for each block of the table; equal stamps by id.

    Stamps are nearly dense where blocks were all used lately: then a place for each is quicker than sorting. The places
    are an array, not a list, because they are written in random order: it is smaller, and counts no references.
    """
    blocks, stamps = chosen.blocks, chosen.among(stamp_of)
    low, high = min(stamps, default=0), max(stamps, default=0)
    if high - low <= 4 * len(blocks):
        places = array("I", bytes(array("I").itemsize * (high - low + 1)))
        for block, stamp in zip(blocks, stamps, strict=True):
            places[stamp - low] = block
        order = list(filter(None, places))
        if len(order) == len(blocks):  # else two had the same place
            return order
    return sorted(blocks, key=stamp_of.__getitem__)
