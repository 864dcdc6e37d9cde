"""What survives the daemon: one record per block that says which prefix its bytes are, beside the bytes themselves.

    word 0    checksum of the body, seeded with the block id; 0 = this record says nothing
    word 1    stamp: order of last use; not covered, since a wrong order costs a hit at most
    body      checksum of the block's bytes (0 = not taken) · prefix length in tokens · generation · group · hash

A record is updated in place, in three stores, so that SIGKILL between any two of them leaves a record that is whole or
says nothing, never one that is whole and wrong:

    word 0 := 0          the old record is void
    body   := …          torn or not, it does not count
    word 0 := checksum   the new record counts

The daemon records a block when its bytes are proven (the step that wrote them is complete) and voids the record before
it tells anybody to overwrite them. Provisional blocks, secondary keys and partly filled blocks have no record: after a
crash they are a miss. A new content generation voids all records with one header update.
"""

import gc
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Literal, TypeVar

from kvhold_server.memory.block_table_header import (
    CHECKSUM_OFFSET,
    RECORDS_OFFSET,
    TableHeader,
    TableIdentity,
    header_checksum,
    read_header,
)
from kvhold_server.memory.chosen_blocks import Chosen
from kvhold_server.memory.errors import RegionMismatch
from kvhold_server.memory.mapped_file import MappedFile
from kvhold_server.memory.record_checksum import best_kind, checksum_of
from kvhold_server.memory.recovery_errors import BlockTableUnusable

T = TypeVar("T")

MAX_HASH_BYTES: Final = 64
FIRST_GENERATION: Final = 1
_BODY_OFFSET: Final = 16
_WORD: Final = 8
_TOKENS_OFFSET: Final = 8  # in the body, after the checksum of the block's bytes
_GENERATION_OFFSET: Final = 12
_GROUP_OFFSET: Final = 16
_HASH_OFFSET: Final = 24

# Places between two stores, for tests that stop the daemon there (see kvhold_server/failpoints.py).
RECORD_VOIDED: Final = "block_table.record_voided"
RECORD_WRITTEN: Final = "block_table.record_written"
RECORD_COUNTS: Final = "block_table.record_counts"
RECORD_FORGOTTEN: Final = "block_table.record_forgotten"
HEADER_VOIDED: Final = "block_table.header_voided"
HEADER_WRITTEN: Final = "block_table.header_written"
HEADER_COUNTS: Final = "block_table.header_counts"
PLACES: Final = (
    RECORD_VOIDED,
    RECORD_WRITTEN,
    RECORD_COUNTS,
    RECORD_FORGOTTEN,
    HEADER_VOIDED,
    HEADER_WRITTEN,
    HEADER_COUNTS,
)


@dataclass(slots=True, kw_only=True)
class RecoveredBlocks:
    """Whole records of the current generation, as parallel columns by ascending block id; and what was dropped."""

    blocks: list[int]
    groups: "array[int]"
    hashes: list[bytes]
    key_tokens: "array[int]"
    bytes_checksums: "array[int]"  # 0: not taken
    order: list[int]  # the same blocks, least recently used first
    num_torn: int
    num_old_generation: int


class BlockTable:
    """Owner of one table file. Not thread-safe. Blocks are 1..num_blocks − 1: the null block has no record."""

    def __init__(self, file: MappedFile, header: TableHeader, hit: Callable[[str], None] | None = None) -> None:
        """Use `create` or `open`."""
        checksum = checksum_of(header.checksum_kind)
        assert checksum is not None
        self._file = file
        self._header = header
        self._checksum = checksum
        self._hit = hit
        self._body = _body_struct(header.hash_size_bytes)
        self._stamp = 1

    @classmethod
    def create(
        cls,
        path: Path,
        identity: TableIdentity,
        *,
        num_blocks: int,
        hash_size_bytes: int,
        hit: Callable[[str], None] | None = None,
    ) -> "BlockTable":
        """An empty table that replaces whatever had the name. Raises ShmTooSmall, SystemCallFailed."""
        assert 1 <= hash_size_bytes <= MAX_HASH_BYTES
        header = TableHeader(
            sequence=0,
            num_blocks=num_blocks,
            generation=FIRST_GENERATION,
            hash_size_bytes=hash_size_bytes,
            record_size_bytes=record_size_bytes(hash_size_bytes),
            checksum_kind=best_kind(),
            is_clean=False,
            identity=identity,
        )
        packed = header.pack()
        first = packed + struct.pack("=Q", header_checksum(packed))
        file = MappedFile.create(path, table_size_bytes(num_blocks, hash_size_bytes), first)
        return cls(file, header, hit)

    @classmethod
    def open(
        cls,
        path: Path,
        identity: TableIdentity,
        *,
        num_blocks: int,
        hash_size_bytes: int,
        hit: Callable[[str], None] | None = None,
    ) -> "BlockTable":
        """The table that a former daemon left. Changes nothing. Raises BlockTableUnusable with the reason."""
        try:
            file = MappedFile.open(path)
        except FileNotFoundError:
            raise BlockTableUnusable("NO_BLOCK_TABLE", f"{path.name} does not exist") from None
        except RegionMismatch as error:
            raise BlockTableUnusable("HEADER_CORRUPT", str(error)) from None
        header = read_header(file.bytes[:RECORDS_OFFSET])
        problem = _problem(header, identity, num_blocks, hash_size_bytes, len(file.bytes))
        if problem is not None or header is None:
            file.close()
            assert problem is not None
            raise problem
        return cls(file, header, hit)

    @property
    def generation(self) -> int:
        """The content generation that counts."""
        return self._header.generation

    @property
    def was_clean(self) -> bool:
        """Whether the header says that its last daemon ended in order."""
        return self._header.is_clean

    # ------------------------------------------------------------------ the hot path
    def record(
        self,
        blocks: Sequence[int],
        groups: Sequence[int],
        hashes: Sequence[bytes],
        key_tokens: Sequence[int],
        bytes_checksums: Sequence[int] = (),
    ) -> None:
        """These blocks' bytes are proven: parallel lists, in order of use. About half a microsecond a block."""
        words, buffer, hit, checksum = self._file.words, self._file.bytes, self._hit, self._checksum
        pack, body_size, hash_size = self._body.pack, self._body.size, self._header.hash_size_bytes
        record_size, num_blocks = self._header.record_size_bytes, self._header.num_blocks
        generation, stamp = self._header.generation & 0xFFFFFFFF, self._stamp
        sums = bytes_checksums or [0] * len(blocks)
        for block, group, digest, tokens, bytes_sum in zip(blocks, groups, hashes, key_tokens, sums, strict=True):
            assert 0 < block < num_blocks and len(digest) == hash_size
            offset = RECORDS_OFFSET + block * record_size
            word = offset >> 3
            words[word] = 0
            if hit is not None:
                hit(RECORD_VOIDED)
            body = pack(bytes_sum, tokens, generation, group, 0, 0, digest)
            buffer[offset + _BODY_OFFSET : offset + _BODY_OFFSET + body_size] = body
            words[word + 1] = stamp
            if hit is not None:
                hit(RECORD_WRITTEN)
            words[word] = checksum(body, block) or 1
            if hit is not None:
                hit(RECORD_COUNTS)
            stamp += 1
        self._stamp = stamp

    def forget(self, blocks: Iterable[int]) -> None:
        """Voids records, whole or not: these blocks' bytes are about to change, or are in doubt."""
        words, hit, num_blocks = self._file.words, self._hit, self._header.num_blocks
        first, step = RECORDS_OFFSET // _WORD, self._header.record_size_bytes // _WORD
        for block in blocks:
            assert 0 < block < num_blocks
            words[first + block * step] = 0
            if hit is not None:
                hit(RECORD_FORGOTTEN)

    def touch(self, blocks: Iterable[int]) -> None:
        """These blocks were used now, in this order; only the order after a recovery depends on it."""
        words, stamp = self._file.words, self._stamp
        first, step = RECORDS_OFFSET // _WORD + 1, self._header.record_size_bytes // _WORD
        for block in blocks:
            words[first + block * step] = stamp
            stamp += 1
        self._stamp = stamp

    # ------------------------------------------------------------------ the whole table
    def start_generation(self, content: bytes) -> int:
        """Voids every record at once: from the return on, no recovery keeps a block recorded before."""
        self._update_header(generation=self._header.generation + 1, content=content, is_clean=False)
        return self._header.generation

    def mark_clean(self, is_clean: bool) -> None:
        """The daemon ends in order (or starts to change the table again)."""
        if is_clean != self._header.is_clean:
            self._update_header(
                generation=self._header.generation, content=self._header.identity.content, is_clean=is_clean
            )

    def scan(self) -> RecoveredBlocks:
        """Reads all records; torn and outdated ones are voided on the way. A million in well under a second.

        No statement here runs once a block: whole columns go through functions that are written in C.
        """
        with garbage_collection_paused():
            said = self._numbers("Q", 0)
            chosen = Chosen.of(said)  # the rest says nothing
            torn = self._torn(chosen, said)
            outdated = self._outdated(chosen, set(torn))
            if torn or outdated:
                self.forget(filter(None, chain(torn, outdated)))
                for block in chain(torn, outdated):
                    said[block] = 0
                chosen = Chosen.of(said)
            stamp_of = self._numbers("Q", _WORD)
            self._stamp = max(chosen.among(stamp_of), default=0) + 1
            return RecoveredBlocks(
                blocks=chosen.blocks,
                groups=chosen.among(self._numbers("H", _BODY_OFFSET + _GROUP_OFFSET)),
                hashes=list(self._parts(_HASH_OFFSET, self._header.hash_size_bytes, chosen)),
                key_tokens=chosen.among(self._numbers("i", _BODY_OFFSET + _TOKENS_OFFSET)),
                bytes_checksums=chosen.among(self._numbers("Q", _BODY_OFFSET)),
                order=_in_order(chosen, stamp_of),
                num_torn=len(torn),
                num_old_generation=len(outdated),
            )

    def close(self) -> None:
        """Unmaps; the file stays for the next daemon."""
        self._file.close()

    def delete(self) -> None:
        """The pool is gone."""
        self._file.path.unlink(missing_ok=True)
        self.close()

    def _torn(self, chosen: "Chosen", said: "array[int]") -> list[int]:
        """Blocks whose record is not the one that its checksum was taken of; block 0 has no record."""
        blocks, expected = chosen.blocks, chosen.among(said)
        found = array("Q", map(self._checksum, self._parts(0, self._body.size, chosen), blocks))
        if found == expected and not said[0]:
            return []
        rows = zip(blocks, found, expected, strict=True)
        return [block for block, right, word in rows if word != (right or 1) or not block]

    def _outdated(self, chosen: "Chosen", torn: set[int]) -> list[int]:
        """Blocks whose record is whole, and of a content generation that does not count any more."""
        current = self._header.generation & 0xFFFFFFFF
        generations = chosen.among(self._numbers("I", _BODY_OFFSET + _GENERATION_OFFSET))
        if generations.count(current) == len(generations):
            return []
        rows = zip(chosen.blocks, generations, strict=True)
        return [block for block, generation in rows if generation != current and block not in torn]

    def _parts(self, offset: int, size_bytes: int, chosen: "Chosen") -> Iterator[bytes]:
        """So many bytes of the bodies of those records, in order."""
        before, record_size = _BODY_OFFSET + offset, self._header.record_size_bytes
        record = struct.Struct(f"{before}x{size_bytes}s{record_size - before - size_bytes}x")
        if not chosen.blocks:
            return iter(())
        first, last = chosen.blocks[0], chosen.blocks[-1]
        records = memoryview(self._file.bytes)[RECORDS_OFFSET:][first * record_size : (last + 1) * record_size]
        return chain.from_iterable(chosen.within(record.iter_unpack(records)))

    def _numbers(self, item_format: Literal["H", "I", "Q", "i"], offset: int) -> "array[int]":
        """One field of all records, without an object for each: filling fresh memory is what takes the time here."""
        items = memoryview(self._file.bytes).cast(item_format)
        step = self._header.record_size_bytes // items.itemsize
        return array(item_format, items[(RECORDS_OFFSET + offset) // items.itemsize :: step].tobytes())

    def _update_header(self, *, generation: int, content: bytes, is_clean: bool) -> None:
        updated = self._header.next(generation=generation, content=content, is_clean=is_clean)
        packed, hit, offset = updated.pack(), self._hit, updated.slot_offset
        word = (offset + CHECKSUM_OFFSET) // _WORD
        self._file.words[word] = 0
        if hit is not None:
            hit(HEADER_VOIDED)
        self._file.bytes[offset : offset + len(packed)] = packed
        if hit is not None:
            hit(HEADER_WRITTEN)
        self._file.words[word] = header_checksum(packed)
        self._header = updated
        if hit is not None:
            hit(HEADER_COUNTS)


def record_size_bytes(hash_size_bytes: int) -> int:
    """Of one record; a multiple of eight."""
    return -(-(_BODY_OFFSET + _body_struct(hash_size_bytes).size) // _WORD) * _WORD


def table_size_bytes(num_blocks: int, hash_size_bytes: int) -> int:
    """Of the whole file."""
    return RECORDS_OFFSET + num_blocks * record_size_bytes(hash_size_bytes)


def _body_struct(hash_size_bytes: int) -> struct.Struct:
    return struct.Struct(f"=QIIHHI{hash_size_bytes}s")


def _problem(
    header: TableHeader | None, identity: TableIdentity, num_blocks: int, hash_size_bytes: int, file_bytes: int
) -> BlockTableUnusable | None:
    if header is None:
        return BlockTableUnusable("HEADER_CORRUPT", "neither copy of the header is whole")
    if checksum_of(header.checksum_kind) is None:
        return BlockTableUnusable(
            "HEADER_CORRUPT", f"its checksum is of a kind ({header.checksum_kind}) that is not here"
        )
    have = header.identity
    differs = (
        ("PLAN_MISMATCH", "the plan", have.plan != identity.plan),
        ("PLAN_MISMATCH", f"blocks: {header.num_blocks} there, {num_blocks} here", header.num_blocks != num_blocks),
        ("BYTE_FORMAT_MISMATCH", "the byte format", have.byte_format != identity.byte_format),
        ("CONTENT_MISMATCH", "the content identity", have.content != identity.content),
        ("OPTIONS_MISMATCH", "the pool options", have.options != identity.options),
        ("OPTIONS_MISMATCH", "the hash size", header.hash_size_bytes != hash_size_bytes),
        ("REGION_MISSING", "the memory's files are other ones", have.regions != identity.regions),
        ("HEADER_CORRUPT", "the file's size", file_bytes != table_size_bytes(num_blocks, hash_size_bytes)),
    )
    return next((BlockTableUnusable(word, what) for word, what, is_different in differs if is_different), None)


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


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Millions of small objects that all stay: looking for garbage among them would take most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
