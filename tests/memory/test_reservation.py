"""Reserving off the loop: back-pressure with a deadline, and no orphan of a call that came too late."""

import asyncio
import threading

import pytest

from kvhold_server.domain.ids import PoolName
from kvhold_server.memory import reservation
from kvhold_server.memory.backend import Region, RegionRequest
from kvhold_server.memory.errors import DriverCallFailed, OutOfDeviceMemory, ReservationTimedOut
from kvhold_server.memory.fake import FakeBackend
from kvhold_server.memory.reservation import Reserver

MIB = 1 << 20


def ask(size_bytes: int, rank: int = 0) -> RegionRequest:
    return RegionRequest(pool=PoolName("m"), rank=rank, size_bytes=size_bytes)


class StuckBackend(FakeBackend):
    """A driver whose reserve hangs until it is let go."""

    def __init__(self) -> None:
        super().__init__(device_bytes=64 * MIB)
        self.go_on = threading.Event()
        self.stuck = True

    def reserve(self, request: RegionRequest) -> Region:
        if self.stuck:
            assert self.go_on.wait(20)
        return super().reserve(request)


async def until(condition: object) -> None:
    for _ in range(1000):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


async def test_waiting_for_memory_ends_when_somebody_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "RETRY_INTERVAL_S", 60.0)  # woken, not polled
    backend = FakeBackend(device_bytes=8 * MIB)
    reserver = Reserver(backend)
    held = await reserver.reserve(ask(6 * MIB), timeout_s=1)
    waiting = asyncio.create_task(reserver.reserve(ask(4 * MIB, rank=1), timeout_s=50))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await reserver.release(held)
    assert (await asyncio.wait_for(waiting, 20)).rank == 1
    await reserver.close()


async def test_memory_that_never_comes_is_the_backends_own_typed_answer() -> None:
    reserver = Reserver(FakeBackend(device_bytes=8 * MIB))
    await reserver.reserve(ask(6 * MIB), timeout_s=1)
    with pytest.raises(OutOfDeviceMemory) as caught:
        await reserver.reserve(ask(4 * MIB, rank=1), timeout_s=0.1)
    assert caught.value.free_bytes == 2 * MIB
    assert "rank 0" in caught.value.holders
    await reserver.close()


async def test_a_hanging_driver_gets_a_deadline_and_its_late_region_is_given_back() -> None:
    """DMN-10."""
    backend = StuckBackend()
    reserver = Reserver(backend)
    with pytest.raises(ReservationTimedOut) as caught:
        await reserver.reserve(ask(MIB), timeout_s=0.05)
    assert caught.value.retry_after_s > 0
    assert reserver.num_overdue_calls == 1
    assert backend.health().ok  # others are served meanwhile
    backend.go_on.set()
    await until(lambda: reserver.num_overdue_calls == 0 and backend.num_calls["release"] == 1)
    assert backend.usage().holdings == ()
    backend.stuck = False
    assert (await reserver.reserve(ask(MIB), timeout_s=1)).size_bytes
    await reserver.close()


async def test_a_cancelled_caller_leaves_no_region_behind() -> None:
    backend = StuckBackend()
    reserver = Reserver(backend)
    call = asyncio.create_task(reserver.reserve(ask(MIB), timeout_s=10))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    backend.go_on.set()
    await until(lambda: backend.num_calls["release"] == 1)
    assert backend.usage().holdings == ()
    await reserver.close()


async def test_other_failures_are_not_waited_out() -> None:
    backend = FakeBackend()
    backend.inject_code("reserve", 999)
    reserver = Reserver(backend)
    with pytest.raises(DriverCallFailed):
        await reserver.reserve(ask(MIB), timeout_s=10)
    assert backend.num_calls["reserve"] == 1
    assert (await reserver.reserve(ask(MIB), timeout_s=10)).size_bytes
    await reserver.close()
