"""Who was there when the daemon died: sessions that may resume, and processes that may still write to the memory.

Until all of them have come back, or are proven gone, blocks without a record may be theirs. A process is told from a
later one with the same number by its start time.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvhold_server.memory.record_slots import RecordSlots

MAX_SHOWN_BYTES: Final = 128  # of a client's name, which is for people


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
    is_outdated: bool = False  # it may hold sequences of contents that were replaced: they must not be published


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A process that maps a rank of a pool writably."""

    key: str  # of the mapping
    pool: str
    rank: int
    session_id: str  # empty: it named none
    pid: int
    start_ticks: int  # of the process, since the machine booted


class SessionRecords:
    """Owner of the file of sessions."""

    def __init__(self, slots: RecordSlots) -> None:
        """Use `open`."""
        self._slots = slots

    @classmethod
    def open(
        cls, path: Path, *, max_sessions: int, hit: Callable[[str], None] | None = None
    ) -> tuple["SessionRecords", list[SessionRecord]]:
        """The file, and the sessions that a former daemon left. Raises ShmTooSmall, SystemCallFailed."""
        slots, former = RecordSlots.open(path, max_records=max_sessions, hit=hit)
        return cls(slots), [SessionRecord(session_id=key, **fields) for key, fields in former.items()]

    def put(self, record: SessionRecord) -> None:
        """A new session, or the new state of one. Raises RecordsFull."""
        fields = asdict(record)
        fields["client_name"] = record.client_name.encode()[:MAX_SHOWN_BYTES].decode(errors="ignore")
        self._slots.put(fields.pop("session_id"), fields)

    def drop(self, session_id: str) -> None:
        """The session is over and settled. Repeating is harmless."""
        self._slots.drop(session_id)

    def close(self) -> None:
        """Unmaps; the file stays."""
        self._slots.close()


class WorkerRecords:
    """Owner of the file of processes."""

    def __init__(self, slots: RecordSlots) -> None:
        """Use `open`."""
        self._slots = slots

    @classmethod
    def open(
        cls, path: Path, *, max_workers: int, hit: Callable[[str], None] | None = None
    ) -> tuple["WorkerRecords", list[WorkerRecord]]:
        """The file, and the processes that a former daemon watched. Raises ShmTooSmall, SystemCallFailed."""
        slots, former = RecordSlots.open(path, max_records=max_workers, slot_bytes=512, hit=hit)
        return cls(slots), [WorkerRecord(key=key, **fields) for key, fields in former.items()]

    def put(self, record: WorkerRecord) -> None:
        """A process maps a rank. Raises RecordsFull."""
        fields = asdict(record)
        self._slots.put(fields.pop("key"), fields)

    def drop(self, key: str) -> None:
        """It is gone. Repeating is harmless."""
        self._slots.drop(key)

    def close(self) -> None:
        """Unmaps; the file stays."""
        self._slots.close()
