"""A file of small JSON records by key, that survives SIGKILL at any instruction: for what changes seldom.

    slot    word 0    checksum of what follows, seeded with the slot's number; 0 = empty
            word 1    number of the change: of two whole slots with one key the larger counts
            word 2    length of the text
            text      JSON: {"key": …, …}

A new state of a record goes to a free slot before the old one is voided, so that at any instruction one of them is
whole.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from sys import byteorder
from typing import Any, Final

from kvhold_server.memory.errors import RegionMismatch
from kvhold_server.memory.mapped_file import MappedFile
from kvhold_server.memory.record_checksum import crc32
from kvhold_server.memory.recovery_errors import RecordsFull

_TEXT_OFFSET: Final = 24
_KEY: Final = "key"

SLOT_WRITTEN: Final = "record_slots.written"
SLOT_COUNTS: Final = "record_slots.counts"
SLOT_REPLACED: Final = "record_slots.replaced"
PLACES: Final = (SLOT_WRITTEN, SLOT_COUNTS, SLOT_REPLACED)


class RecordSlots:
    """Owner of the file. O(1) per change."""

    def __init__(self, file: MappedFile, slot_bytes: int, hit: Callable[[str], None] | None = None) -> None:
        """Use `open`."""
        self._file = file
        self._slot_bytes = slot_bytes
        self._hit = hit
        self._free = list(range(len(file.bytes) // slot_bytes - 1, -1, -1))
        self.problem = ""  # why a file that was there could not be used
        self._slots: dict[str, int] = {}
        self._change = 0

    @classmethod
    def open(
        cls, path: Path, *, max_records: int, slot_bytes: int = 1024, hit: Callable[[str], None] | None = None
    ) -> tuple["RecordSlots", dict[str, dict[str, Any]]]:
        """The file, new if there is none that can be used, and the records by key that a former daemon left in it: all
        of them, also where the bound was lowered since.

        Raises ShmTooSmall, SystemCallFailed.
        """
        former: dict[str, dict[str, Any]] = {}
        problem = ""
        try:
            old = MappedFile.open(path)
        except FileNotFoundError:
            pass
        except RegionMismatch as error:
            problem = str(error)
        else:
            former = _read_all(old, slot_bytes)
            old.close()
        max_records = max(max_records, len(former))
        image = b"".join(
            _packed(key, fields, slot, slot).ljust(slot_bytes, b"\0")
            for slot, (key, fields) in enumerate(former.items())
        )
        records = cls(MappedFile.create(path, (max_records + 1) * slot_bytes, image), slot_bytes, hit)
        records._slots = {key: slot for slot, key in enumerate(former)}
        records._free = records._free[: max_records + 1 - len(former)]  # ends with the lowest free slot
        records._change = len(former)
        records.problem = problem
        return records, former

    def put(self, key: str, fields: Mapping[str, Any]) -> None:
        """Stores a new record, or the new state of one. Raises RecordsFull. The text must fit into a slot."""
        old = self._slots.get(key)
        if not self._free or (old is None and len(self._free) == 1):
            raise RecordsFull(str(self._file.path), len(self._file.bytes) // self._slot_bytes - 1)
        self._change += 1
        slot = self._free[-1]
        packed = _packed(key, fields, self._change, slot)
        assert len(packed) <= self._slot_bytes, "all texts are bounded"
        self._free.pop()
        start = slot * self._slot_bytes
        self._file.bytes[start + 8 : start + len(packed)] = packed[8:]
        self._reached(SLOT_WRITTEN)
        self._file.words[start // 8] = int.from_bytes(packed[:8], byteorder)
        self._reached(SLOT_COUNTS)
        if old is not None:
            self._void(old)
            self._reached(SLOT_REPLACED)
        self._slots[key] = slot

    def drop(self, key: str) -> None:
        """The record is over. Repeating is harmless."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._void(slot)

    def close(self) -> None:
        """Unmaps; the file stays."""
        self._file.close()

    def _void(self, slot: int) -> None:
        self._file.words[slot * self._slot_bytes // 8] = 0
        self._free.append(slot)

    def _reached(self, place: str) -> None:
        if self._hit is not None:
            self._hit(place)


def _packed(key: str, fields: Mapping[str, Any], change: int, slot: int) -> bytes:
    """Checksum, change, length, text."""
    text = json.dumps({_KEY: key, **fields}, ensure_ascii=False, separators=(",", ":")).encode()
    body = change.to_bytes(8, byteorder) + len(text).to_bytes(8, byteorder) + text
    return crc32(body, slot).to_bytes(8, byteorder) + body


def _read_all(file: MappedFile, slot_bytes: int) -> dict[str, dict[str, Any]]:
    newest: dict[str, tuple[int, dict[str, Any]]] = {}
    for slot in range(len(file.bytes) // slot_bytes):
        found = _read(file.bytes[slot * slot_bytes : (slot + 1) * slot_bytes], slot)
        if found is not None:
            change, fields = found
            key = fields.pop(_KEY)
            if key not in newest or newest[key][0] < change:
                newest[key] = found
    return {key: fields for key, (_, fields) in newest.items()}


def _read(slot_bytes: bytes, slot: int) -> tuple[int, dict[str, Any]] | None:
    checksum = int.from_bytes(slot_bytes[:8], byteorder)
    change = int.from_bytes(slot_bytes[8:16], byteorder)
    length = int.from_bytes(slot_bytes[16:24], byteorder)
    if not checksum or not 0 < length <= len(slot_bytes) - _TEXT_OFFSET:
        return None
    if checksum != crc32(slot_bytes[8 : _TEXT_OFFSET + length], slot):
        return None
    fields: dict[str, Any] = json.loads(slot_bytes[_TEXT_OFFSET : _TEXT_OFFSET + length])
    return change, fields
