"""Which sessions were open when the daemon died: they may resume, and until they do or their grace is over, blocks
without a record may be theirs.

    slot    word 0    checksum of what follows, seeded with the slot's number; 0 = empty
            word 1    length of the text
            text      JSON

A new state of a session goes to a free slot before the old one is voided: at any instruction one of the two is whole,
and of two whole ones the larger epoch counts.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from sys import byteorder
from typing import Final

from kvhold_server.memory.errors import RegionMismatch
from kvhold_server.memory.mapped_file import MappedFile
from kvhold_server.memory.record_checksum import crc32
from kvhold_server.memory.recovery_errors import SessionRecordsFull

SLOT_BYTES: Final = 1024
_TEXT_OFFSET: Final = 16
MAX_TEXT_BYTES: Final = SLOT_BYTES - _TEXT_OFFSET
MAX_SHOWN_BYTES: Final = 128  # of the client's name, which is for people

SESSION_WRITTEN: Final = "session_records.written"
SESSION_COUNTS: Final = "session_records.counts"
SESSION_REPLACED: Final = "session_records.replaced"
PLACES: Final = (SESSION_WRITTEN, SESSION_COUNTS, SESSION_REPLACED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """What a successor must know of a session. Tokens as digests only, in hexadecimal."""

    session_id: str
    pool: str
    client_name: str
    tenant: str
    pid: int
    epoch: int
    token_digest: str
    previous_token_digest: str = ""


class SessionRecords:
    """Owner of the file. O(1) per change."""

    def __init__(self, file: MappedFile, hit: Callable[[str], None] | None = None) -> None:
        """Use `open`."""
        self._file = file
        self._hit = hit
        self._free = list(range(len(file.bytes) // SLOT_BYTES - 1, -1, -1))
        self._slots: dict[str, int] = {}

    @classmethod
    def open(
        cls, path: Path, *, max_sessions: int, hit: Callable[[str], None] | None = None
    ) -> tuple["SessionRecords", list[SessionRecord]]:
        """The file, new if there is none that can be used, and the sessions that a former daemon left in it.

        Raises ShmTooSmall, SystemCallFailed.
        """
        former: list[SessionRecord] = []
        try:
            old = MappedFile.open(path)
        except (FileNotFoundError, RegionMismatch):
            pass
        else:
            former = _read_all(old)
            old.close()
        records = cls(MappedFile.create(path, (max_sessions + 1) * SLOT_BYTES, _image(former, max_sessions)), hit)
        for slot, record in enumerate(former[:max_sessions]):
            records._slots[record.session_id] = slot
        records._free = records._free[: max_sessions + 1 - len(records._slots)]  # ends with the lowest free slot
        return records, former[:max_sessions]

    def put(self, record: SessionRecord) -> None:
        """Stores a new session, or the new state of one. Raises SessionRecordsFull."""
        old = self._slots.get(record.session_id)
        if not self._free or (old is None and len(self._free) == 1):
            raise SessionRecordsFull(str(self._file.path), len(self._file.bytes) // SLOT_BYTES - 1)
        slot = self._free.pop()
        start = slot * SLOT_BYTES
        packed = _packed(record, slot)
        self._file.bytes[start + 8 : start + len(packed)] = packed[8:]
        self._reached(SESSION_WRITTEN)
        self._file.words[start // 8] = int.from_bytes(packed[:8], byteorder)
        self._reached(SESSION_COUNTS)
        if old is not None:
            self._void(old)
            self._reached(SESSION_REPLACED)
        self._slots[record.session_id] = slot

    def drop(self, session_id: str) -> None:
        """The session is over and settled. Repeating is harmless."""
        slot = self._slots.pop(session_id, None)
        if slot is not None:
            self._void(slot)

    def close(self) -> None:
        """Unmaps; the file stays."""
        self._file.close()

    def _void(self, slot: int) -> None:
        self._file.words[slot * SLOT_BYTES // 8] = 0
        self._free.append(slot)

    def _reached(self, place: str) -> None:
        if self._hit is not None:
            self._hit(place)


def _packed(record: SessionRecord, slot: int) -> bytes:
    """Checksum, length, text; a name that is too long for the slot is cut."""
    fields = {name: getattr(record, name) for name in SessionRecord.__slots__}
    fields["client_name"] = record.client_name.encode()[:MAX_SHOWN_BYTES].decode(errors="ignore")
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    assert len(text) <= MAX_TEXT_BYTES, "all texts are bounded"
    body = len(text).to_bytes(8, byteorder) + text
    return crc32(body, slot).to_bytes(8, byteorder) + body


def _image(former: list[SessionRecord], max_sessions: int) -> bytes:
    return b"".join(_packed(record, slot).ljust(SLOT_BYTES, b"\0") for slot, record in enumerate(former[:max_sessions]))


def _read_all(file: MappedFile) -> list[SessionRecord]:
    newest: dict[str, SessionRecord] = {}
    for slot in range(len(file.bytes) // SLOT_BYTES):
        record = _read(file.bytes[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES], slot)
        if record is not None:
            known = newest.get(record.session_id)
            newest[record.session_id] = record if known is None or known.epoch < record.epoch else known
    return list(newest.values())


def _read(slot_bytes: bytes, slot: int) -> SessionRecord | None:
    checksum = int.from_bytes(slot_bytes[:8], byteorder)
    length = int.from_bytes(slot_bytes[8:16], byteorder)
    if not checksum or not 0 < length <= MAX_TEXT_BYTES:
        return None
    if checksum != crc32(slot_bytes[8 : _TEXT_OFFSET + length], slot):
        return None
    return SessionRecord(**json.loads(slot_bytes[_TEXT_OFFSET : _TEXT_OFFSET + length]))
