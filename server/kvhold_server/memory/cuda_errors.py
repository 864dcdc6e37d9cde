"""What the driver's codes mean to a caller: one table per verb.

| code                            | creating            | exporting           |
|---------------------------------|---------------------|---------------------|
| 2   OUT_OF_MEMORY               | OutOfDeviceMemory   | DriverCallFailed    |
| 101 INVALID_DEVICE, 100 NO_…    | DeviceLost          | DeviceLost          |
| 3   NOT_INITIALIZED, 4 DEINIT…  | DeviceLost          | DeviceLost          |
| 800 NOT_PERMITTED, 801 NOT_SUP… | BackendUnavailable  | ExportNotPossible   |
| others                          | DriverCallFailed    | DriverCallFailed    |
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvhold_server.domain.errors import Unavailable
from kvhold_server.memory.backend import Holding, describe_holders
from kvhold_server.memory.cuda_driver import (
    DEINITIALIZED,
    INVALID_DEVICE,
    NO_DEVICE,
    NOT_INITIALIZED,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    CudaDriver,
)
from kvhold_server.memory.errors import BackendUnavailable, DriverCallFailed, ExportNotPossible, OutOfDeviceMemory

_LOST = frozenset({NO_DEVICE, INVALID_DEVICE, NOT_INITIALIZED, DEINITIALIZED})
_REFUSED = frozenset({NOT_PERMITTED, NOT_SUPPORTED})


@dataclass(eq=False)
class DeviceLost(Unavailable):
    """The driver no longer knows the device: it fell off, or the driver is being unloaded."""

    template = "the CUDA driver lost its device: {call} says {name} ({code})"
    call: str
    code: int
    name: str


@contextmanager
def creating(
    driver: CudaDriver, device: int, device_uuid: str, size_bytes: int, holdings: tuple[Holding, ...]
) -> Iterator[None]:
    """Rewrites what the driver says about an allocation."""
    try:
        yield
    except DriverCallFailed as error:
        if error.code == OUT_OF_MEMORY:
            here = describe_holders(tuple(holding for holding in holdings if holding.device_uuid == device_uuid))
            free_bytes, total_bytes = driver.free_bytes(device), driver.total_bytes(device)
            raise OutOfDeviceMemory(device_uuid, size_bytes, free_bytes, total_bytes, here) from error
        if error.code in _REFUSED:
            raise BackendUnavailable("cuda", f"{device_uuid}: {error}") from error
        _raise_if_lost(error)
        raise


@contextmanager
def exporting(region_id: str, wanted: str) -> Iterator[None]:
    """Rewrites what the driver says about an export."""
    try:
        yield
    except DriverCallFailed as error:
        if error.code in _REFUSED:
            raise ExportNotPossible(region_id, wanted, str(error)) from error
        _raise_if_lost(error)
        raise


def _raise_if_lost(error: DriverCallFailed) -> None:
    if error.code in _LOST:
        raise DeviceLost(error.call, error.code, error.name) from error
