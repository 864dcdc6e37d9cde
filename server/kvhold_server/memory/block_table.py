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
crash they are a miss. A new content generation voids all records with one header update. Allotted blocks keep their
records, because most are given back; they are listed in the header, and whoever reads the table drops them.
"""

import gc
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from typing import Final, TypeVar

from kvhold_server.memory.block_table_header import (
    ALLOTTED_OFFSET,
    CHECKSUM_OFFSET,
    MAX_ALLOTTED,
    RECORDS_OFFSET,
    TableHeader,
    TableIdentity,
    header_checksum,
    read_header,
)
from kvhold_server.memory.errors import RegionMismatch
from kvhold_server.memory.mapped_file import MappedFile
from kvhold_server.memory.record_checksum import best_kind, checksum_of
from kvhold_server.memory.recovery_errors import BlockTableUnusable
from kvhold_server.memory.table_records import BODY_OFFSET, WORD, RecordReader, Records, Verdict, body_struct

T = TypeVar("T")

MAX_HASH_BYTES: Final = 64
FIRST_GENERATION: Final = 1
MAX_STAMP: Final = 2**63  # no block was ever used so often: a larger one is damaged, and leaves none to count on with

# Places between two stores, for tests that stop the daemon there (see kvhold_server/failpoints.py).
RECORD_VOIDED: Final = "block_table.record_voided"
RECORD_WRITTEN: Final = "block_table.record_written"
RECORD_COUNTS: Final = "block_table.record_counts"
RECORD_FORGOTTEN: Final = "block_table.record_forgotten"
ALLOTTED_VOIDED: Final = "block_table.allotted_voided"
ALLOTTED_COUNTS: Final = "block_table.allotted_counts"
HEADER_VOIDED: Final = "block_table.header_voided"
HEADER_WRITTEN: Final = "block_table.header_written"
HEADER_COUNTS: Final = "block_table.header_counts"
PLACES: Final = (
    RECORD_VOIDED,
    RECORD_WRITTEN,
    RECORD_COUNTS,
    RECORD_FORGOTTEN,
    ALLOTTED_VOIDED,
    ALLOTTED_COUNTS,
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
        self._body = body_struct(header.hash_size_bytes)
        self._stamp = 1
        self._has_allotted = True  # a former daemon may have: the first time it is written, whatever it says

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
    def path(self) -> Path:
        """Of the file."""
        return self._file.path

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
            buffer[offset + BODY_OFFSET : offset + BODY_OFFSET + body_size] = body
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
        first, step = RECORDS_OFFSET // WORD, self._header.record_size_bytes // WORD
        for block in blocks:
            assert 0 < block < num_blocks
            words[first + block * step] = 0
            if hit is not None:
                hit(RECORD_FORGOTTEN)

    def touch(self, blocks: Iterable[int]) -> None:
        """These blocks were used now, in this order; only the order after a recovery depends on it."""
        words, stamp = self._file.words, self._stamp
        first, step = RECORDS_OFFSET // WORD + 1, self._header.record_size_bytes // WORD
        for block in blocks:
            words[first + block * step] = stamp
            stamp += 1
        self._stamp = stamp

    def allot(self, blocks: Sequence[int]) -> None:
        """From the return on these blocks may be written to by a client, and no others are allotted.

        Killed in between there are none, and that is right: the client has not been told of these, and has said what it
        drew of the ones before.
        """
        assert len(blocks) <= MAX_ALLOTTED
        if not blocks and not self._has_allotted:
            return
        words, hit, word = self._file.words, self._hit, ALLOTTED_OFFSET // WORD
        words[word] = 0
        if hit is not None:
            hit(ALLOTTED_VOIDED)
        body = array("I", [len(blocks), *blocks]).tobytes()
        self._file.bytes[ALLOTTED_OFFSET + WORD : ALLOTTED_OFFSET + WORD + len(body)] = body
        words[word] = self._checksum(body, 0) or 1
        if hit is not None:
            hit(ALLOTTED_COUNTS)
        self._has_allotted = bool(blocks)

    def allotted(self) -> list[int]:
        """What a former daemon had allotted when it ended: their records do not count. Changes nothing."""
        said = self._file.words[ALLOTTED_OFFSET // WORD]
        start = ALLOTTED_OFFSET + WORD
        ids = array("I", bytes(self._file.bytes[start : start + 4 * (MAX_ALLOTTED + 1)]))
        listed = ids[: 1 + min(ids[0], MAX_ALLOTTED)]
        is_whole = said and said == (self._checksum(listed.tobytes(), 0) or 1)
        return [block for block in listed[1:] if 0 < block < self._header.num_blocks] if is_whole else []

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
        """Reads all records; torn and outdated ones are voided on the way. A million in about a second."""
        with garbage_collection_paused():
            return self.settle(self.records(), self.verdict())

    def records(self) -> Records:
        """What the records say, whole or not. Changes nothing."""
        return RecordReader(memoryview(self._file.bytes), self._header).records()

    def verdict(self) -> Verdict:
        """Whether that may be believed; SecondLook answers the same from another process. Changes nothing."""
        return RecordReader(memoryview(self._file.bytes), self._header).verdict()

    def settle(self, records: Records, verdict: Verdict) -> RecoveredBlocks:
        """What may be believed, of records that nobody changed in between; the others are voided."""
        torn = set(verdict.torn)
        outdated = [block for block in records.outdated if block not in torn]
        self.forget(filter(None, chain(torn, outdated)))
        self._stamp = min(verdict.newest_stamp, MAX_STAMP) + 1
        kept = [block not in torn for block in records.blocks] if torn else None
        return RecoveredBlocks(
            blocks=_kept(records.blocks, kept),
            groups=_kept_items(records.groups, kept),
            hashes=_kept(records.hashes, kept),
            key_tokens=_kept_items(records.key_tokens, kept),
            bytes_checksums=_kept_items(records.bytes_checksums, kept),
            order=verdict.order,
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

    def _update_header(self, *, generation: int, content: bytes, is_clean: bool) -> None:
        updated = self._header.next(generation=generation, content=content, is_clean=is_clean)
        packed, hit, offset = updated.pack(), self._hit, updated.slot_offset
        word = (offset + CHECKSUM_OFFSET) // WORD
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
    return -(-(BODY_OFFSET + body_struct(hash_size_bytes).size) // WORD) * WORD


def table_size_bytes(num_blocks: int, hash_size_bytes: int) -> int:
    """Of the whole file."""
    return RECORDS_OFFSET + num_blocks * record_size_bytes(hash_size_bytes)


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


def _kept(column: list[T], kept: list[bool] | None) -> list[T]:
    return column if kept is None else list(compress(column, kept))


def _kept_items(column: "array[int]", kept: list[bool] | None) -> "array[int]":
    return column if kept is None else array(column.typecode, compress(column, kept))


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
