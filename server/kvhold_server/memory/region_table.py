"""The regions that a backend holds, safe for overlapping calls from several threads.

    claim(id) ──▶ RESERVING ──publish──▶ HELD ──take──▶ gone
                      └── (the slow work failed) ──▶ gone

The lock guards the table alone; slow work happens between `claim` and `publish`, outside of it, so that nobody waits
for a driver in order to read the table.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

from kvhold_server.memory.backend import Holding, Region, RegionId
from kvhold_server.memory.errors import RegionExists, UnknownRegion

Memory = TypeVar("Memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Generic[Memory]):
    """A region and what the backend needs to serve it."""

    region: Region
    memory: Memory


class RegionTable(Generic[Memory]):
    """Region id → held memory, plus the ids whose memory is being made."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._reserving: set[RegionId] = set()
        self._held: dict[RegionId, Held[Memory]] = {}

    @contextmanager
    def claim(self, region_id: RegionId) -> Iterator[None]:
        """Keeps the id for the caller's block, which publishes or fails. Raises RegionExists."""
        with self._lock:
            if region_id in self._held or region_id in self._reserving:
                raise RegionExists(region_id)
            self._reserving.add(region_id)
        try:
            yield
        finally:
            with self._lock:
                self._reserving.discard(region_id)

    def publish(self, region: Region, memory: Memory) -> Region:
        """Makes a claimed region visible."""
        with self._lock:
            assert region.id in self._reserving and region.id not in self._held
            self._held[region.id] = Held(region=region, memory=memory)
        return region

    def replace(self, region: Region, memory: Memory) -> Region:
        """A held region got another size."""
        with self._lock:
            assert region.id in self._held
            self._held[region.id] = Held(region=region, memory=memory)
        return region

    def get(self, region_id: RegionId) -> Held[Memory]:
        """Raises UnknownRegion."""
        with self._lock:
            held = self._held.get(region_id)
        if held is None:
            raise UnknownRegion(region_id)
        return held

    def take(self, region_id: RegionId) -> Held[Memory]:
        """Removes the region; the caller lets go of its memory. Raises UnknownRegion."""
        with self._lock:
            held = self._held.pop(region_id, None)
        if held is None:
            raise UnknownRegion(region_id)
        return held

    def all(self) -> tuple[Held[Memory], ...]:
        """A snapshot, in order of reservation."""
        with self._lock:
            return tuple(self._held.values())

    def known_ids(self) -> frozenset[RegionId]:
        """Held and being reserved."""
        with self._lock:
            return frozenset(self._held) | self._reserving

    def holdings(self) -> tuple[Holding, ...]:
        """Who holds what, for usage and error texts."""
        return tuple(
            Holding(
                region_id=held.region.id,
                pool=held.region.pool,
                rank=held.region.rank,
                device_uuid=held.region.device_uuid,
                size_bytes=held.region.size_bytes,
            )
            for held in self.all()
        )

    def held_bytes(self, device_uuid: str) -> int:
        """Sum over the regions of one device."""
        return sum(held.region.size_bytes for held in self.all() if held.region.device_uuid == device_uuid)
