"""Reserving memory without ever holding up the event loop: work in a thread, then publish or undo.

    reserve_before(deadline)
      └─ thread: backend.reserve ─┬─ region in time ────────────────▶ returned
                                  ├─ region too late ───────────────▶ released again, nobody hears of it
                                  ├─ Exhausted ── wait for `memory_freed` or the next try ── again, until the deadline
                                  └─ any other error ───────────────▶ raised

Lack of memory is back-pressure: somebody may be about to let go. A hanging driver call is not: its caller gets an
answer at the deadline, the thread stays with the call, and whatever comes of it is given back.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvhold_server.domain.errors import Exhausted
from kvhold_server.memory.backend import MemoryBackend, Region, RegionRequest
from kvhold_server.memory.errors import ReservationTimedOut

RETRY_INTERVAL_S = 0.5  # for memory that other processes give back, of which nobody tells us
MIN_CALL_S = 0.02  # a try that has less time is not made
MAX_SLOW_CALLS = 8  # threads; more callers wait, inside their deadline

Result = TypeVar("Result")


class Reserver:
    """Runs a backend's slow calls. Owned by the event loop; the backend may be shared."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend
        self._threads = ThreadPoolExecutor(max_workers=MAX_SLOW_CALLS, thread_name_prefix="kvhold-memory")
        self._memory_freed = asyncio.Event()
        self._late: set[asyncio.Future[Region]] = set()

    @property
    def num_overdue_calls(self) -> int:
        """Reservations whose caller has gone while the driver has not answered: above zero for long is ill health."""
        return len(self._late)

    async def reserve(self, request: RegionRequest, *, timeout_s: float, wait_s: float | None = None) -> Region:
        """Gives one call at most `timeout_s`, and waits at most `wait_s` (None: as long) for others to free memory.

        Raises ReservationTimedOut, or the backend's last Exhausted.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        wait_until_s = deadline_s if wait_s is None else loop.time() + wait_s
        while True:
            self._memory_freed.clear()
            try:
                return await self._reserve_once(request, deadline_s - loop.time(), timeout_s)
            except Exhausted:
                left_s = min(deadline_s, wait_until_s) - loop.time()
                if left_s <= 0:
                    raise
                await self._wait_for_memory(min(left_s, RETRY_INTERVAL_S))
                if deadline_s - loop.time() < MIN_CALL_S:
                    raise  # a last try could not be told from a hanging driver

    async def release(self, region: Region) -> None:
        """Lets go of the region in a thread, then wakes those who wait for memory."""
        await self._in_thread(lambda: self._backend.release(region))
        self._memory_freed.set()

    async def resize(self, region: Region, size_bytes: int) -> Region:
        """Grows or shrinks in a thread. Raises as the backend does."""
        resized = await self._in_thread(lambda: self._backend.resize(region, size_bytes))
        if resized.size_bytes < region.size_bytes:
            self._memory_freed.set()
        return resized

    async def close(self) -> None:
        """Waits for no overdue call: a hanging driver must not keep the daemon from ending."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _reserve_once(self, request: RegionRequest, left_s: float, timeout_s: float) -> Region:
        call = asyncio.ensure_future(self._in_thread(lambda: self._backend.reserve(request)))
        try:
            done, _ = await asyncio.wait({call}, timeout=max(left_s, 0.001))
        except asyncio.CancelledError:
            self._undo_when_done(call)
            raise
        if done:
            return call.result()
        self._undo_when_done(call)
        problem = "the driver or kernel has not answered"
        raise ReservationTimedOut(request.region_id, request.size_bytes, timeout_s, problem, retry_after_s=timeout_s)

    def _undo_when_done(self, call: "asyncio.Future[Region]") -> None:
        self._late.add(call)
        call.add_done_callback(self._undo)

    def _undo(self, call: "asyncio.Future[Region]") -> None:
        self._late.discard(call)
        if not call.cancelled() and call.exception() is None:
            region = call.result()
            self._threads.submit(self._backend.release, region)

    async def _wait_for_memory(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._memory_freed.wait(), timeout_s)
        except asyncio.TimeoutError:
            return

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
