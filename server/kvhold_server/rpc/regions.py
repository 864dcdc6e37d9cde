"""Reserving and releasing the regions of a pool, in threads, all or nothing.

reserve r0 ─▶ r1 ─▶ r2 fails ─▶ release r1, r0 ─▶ the error leaves
"""

import asyncio
from collections.abc import Iterable, Mapping

from kvhold_server.memory.backend import MemoryBackend, Region, RegionRequest
from kvhold_server.memory.reservation import Reserver

# How long one driver or kernel call may take, beside the time that the caller wants to wait for others to let go.
CALL_TIMEOUT_S = 120.0
# Host pages are zeroed as they are reserved: 1 to 4 GB/s on an idle machine, so a large region may take minutes.
SLOWEST_FILL_BYTES_PER_S = 250e6


class RegionKeeper:
    """Owned by the event loop; one Reserver a backend, made when first needed."""

    def __init__(self, backends: Mapping[str, MemoryBackend]) -> None:
        self._backends = backends
        self._reservers: dict[str, Reserver] = {}

    async def reserve(self, backend: str, requests: Iterable[RegionRequest], wait_s: float) -> tuple[Region, ...]:
        """All regions, or none and the first error."""
        reserver = self._reserver(backend)
        held: list[Region] = []
        try:
            for request in requests:
                timeout_s = CALL_TIMEOUT_S + request.size_bytes / SLOWEST_FILL_BYTES_PER_S
                held.append(await reserver.reserve(request, timeout_s=timeout_s, wait_s=wait_s))
        except BaseException:
            await asyncio.shield(self.release(backend, held))
            raise
        return tuple(held)

    async def release(self, backend: str, regions: Iterable[Region]) -> None:
        """Gives regions back, last one first."""
        reserver = self._reserver(backend)
        for region in reversed(tuple(regions)):
            await reserver.release(region)

    async def close(self) -> None:
        """Waits for nothing."""
        for reserver in self._reservers.values():
            await reserver.close()

    def _reserver(self, backend: str) -> Reserver:
        if backend not in self._reservers:
            self._reservers[backend] = Reserver(self._backends[backend])
        return self._reservers[backend]
