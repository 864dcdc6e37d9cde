"""Header of a block table: what the records are about, and which content generation counts.

byte 0      slot A ┐ the valid one with the larger sequence number counts; an update fills the other one, checksum last,
byte 512    slot B ┘ so that at any instruction one of the two is whole
byte 1024   blocks that a client may draw and write to before it says so: checksum, number, ids
byte 16384  records
"""

import hashlib
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvhold_server.memory.record_checksum import crc32

MAGIC: Final = b"kvholdBT"
VERSION: Final = 2
SLOT_BYTES: Final = 512
ALLOTTED_OFFSET: Final = 2 * SLOT_BYTES
RECORDS_OFFSET: Final = 16_384
MAX_ALLOTTED: Final = (RECORDS_OFFSET - ALLOTTED_OFFSET - 16) // 4

_FIELDS = struct.Struct("=8sIIQQQIIII32s32s32s32s32s")
_CHECKSUM = struct.Struct("=Q")


def identity_digest(text: str) -> bytes:
    """What a header keeps of an identity; the manifest beside it has the text, for people."""
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableIdentity:
    """What must be equal for records to mean the same blocks with the same contents. Digests of 32 bytes."""

    plan: bytes
    byte_format: bytes
    options: bytes
    regions: bytes  # the very files that hold the bytes: a new file under an old name has other contents
    content: bytes

    @classmethod
    def of(cls, *, plan: str, byte_format: str, options: str, regions: str, content: str) -> "TableIdentity":
        """From texts that are equal exactly when the things are."""
        return cls(
            plan=identity_digest(plan),
            byte_format=identity_digest(byte_format),
            options=identity_digest(options),
            regions=identity_digest(regions),
            content=identity_digest(content),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHeader:
    """One slot's contents."""

    sequence: int  # of header updates
    num_blocks: int
    generation: int  # of contents; records of others are void
    hash_size_bytes: int
    record_size_bytes: int
    checksum_kind: int
    is_clean: bool  # the daemon ended in order
    identity: TableIdentity

    @property
    def slot_offset(self) -> int:
        """Where this update goes: slots alternate."""
        return SLOT_BYTES * (self.sequence % 2)

    def next(self, *, generation: int, content: bytes, is_clean: bool) -> "TableHeader":
        """The update that follows this one."""
        identity = replace(self.identity, content=content)
        return replace(self, sequence=self.sequence + 1, generation=generation, identity=identity, is_clean=is_clean)

    def pack(self) -> bytes:
        """Fields, without the checksum that makes them count."""
        own = self.identity
        return _FIELDS.pack(
            MAGIC,
            VERSION,
            SLOT_BYTES,
            self.sequence,
            self.num_blocks,
            self.generation,
            self.hash_size_bytes,
            self.record_size_bytes,
            self.checksum_kind,
            int(self.is_clean),
            own.plan,
            own.byte_format,
            own.options,
            own.regions,
            own.content,
        )


CHECKSUM_OFFSET: Final = _FIELDS.size
assert CHECKSUM_OFFSET % 8 == 0 and CHECKSUM_OFFSET + _CHECKSUM.size <= SLOT_BYTES


def header_checksum(packed: bytes) -> int:
    """Of a slot's fields."""
    return crc32(packed, VERSION)


def read_header(first_page: bytes) -> TableHeader | None:
    """The newest whole slot, or None if neither is."""
    slots = [_read_slot(first_page[offset : offset + SLOT_BYTES]) for offset in (0, SLOT_BYTES)]
    whole = [slot for slot in slots if slot is not None]
    return max(whole, key=lambda header: header.sequence, default=None)


def generation_of(path: Path) -> int:
    """The generation that counts in a table's file; 0 if the file is not there or its header is damaged."""
    try:
        with path.open("rb") as file:
            header = read_header(file.read(RECORDS_OFFSET))
    except OSError:
        return 0
    return header.generation if header is not None else 0


def _read_slot(slot: bytes) -> TableHeader | None:
    if len(slot) < SLOT_BYTES:
        return None
    packed = slot[:CHECKSUM_OFFSET]
    (checksum,) = _CHECKSUM.unpack_from(slot, CHECKSUM_OFFSET)
    if checksum != header_checksum(packed):
        return None
    magic, version, slot_bytes, sequence, num_blocks, generation, *rest = _FIELDS.unpack(packed)
    hash_size, record_size, checksum_kind, is_clean, plan, byte_format, options, regions, content = rest
    if (magic, version, slot_bytes) != (MAGIC, VERSION, SLOT_BYTES):
        return None
    identity = TableIdentity(plan=plan, byte_format=byte_format, options=options, regions=regions, content=content)
    return TableHeader(
        sequence=sequence,
        num_blocks=num_blocks,
        generation=generation,
        hash_size_bytes=hash_size,
        record_size_bytes=record_size,
        checksum_kind=checksum_kind,
        is_clean=bool(is_clean),
        identity=identity,
    )
