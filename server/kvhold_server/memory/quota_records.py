"""What tenants may hold of a pool: operators' settings, which must outlive a daemon as the pool does.

One file a pool, made with its first quota and deleted with it; a change is one record, whole or not there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvhold_server.memory.record_slots import RecordSlots

SLOT_BYTES: Final = 512  # 64 characters of a tenant's name, six bytes each at worst
_BLOCKS: Final = "max_held_blocks"


class QuotaRecords:
    """Owner of one pool's file of quotas."""

    def __init__(self, slots: RecordSlots) -> None:
        """Use `open`."""
        self._slots = slots

    @classmethod
    def open(
        cls, path: Path, *, max_tenants: int, hit: Callable[[str], None] | None = None
    ) -> tuple["QuotaRecords", dict[str, int]]:
        """The file, and the quotas by tenant that a former daemon left. Raises ShmTooSmall, SystemCallFailed."""
        slots, former = RecordSlots.open(path, max_records=max_tenants, slot_bytes=SLOT_BYTES, hit=hit)
        # a record without it is another version's
        return cls(slots), {tenant: fields[_BLOCKS] for tenant, fields in former.items() if _BLOCKS in fields}

    @property
    def problem(self) -> str:
        """Why a former daemon's file could not be used; empty if it could, or there was none."""
        return self._slots.problem

    def put(self, tenant: str, max_held_blocks: int) -> None:
        """Bounds a tenant, newly or anew. Raises RecordsFull."""
        self._slots.put(tenant, {_BLOCKS: max_held_blocks})

    def drop(self, tenant: str) -> None:
        """It is bounded no longer. Repeating is harmless."""
        self._slots.drop(tenant)

    def close(self) -> None:
        """Unmaps; the file stays."""
        self._slots.close()
