"""One call, blocking or not: deadline, typed errors. Transport faults are retried where the caller knows it safe."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from kvhold_client.errors import KvholdError, Unreachable, error_from_status

DETAILS_KEY = "grpc-status-details-bin"
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """What every call of a client shares."""

    target: str
    timeout_s: float = 30.0


def call(
    method: Callable[..., Answer], request: Any, settings: CallSettings, *, timeout_s: float | None = None
) -> Answer:
    """Calls a stub's method. Raises KvholdError for everything that goes wrong on the way or there."""
    try:
        return method(request, timeout=settings.timeout_s if timeout_s is None else timeout_s)
    except grpc.RpcError as error:
        raise typed_error(error, settings.target) from None
    except ValueError as error:  # what gRPC raises for a closed channel
        raise Unreachable(f"the client of {settings.target} is closed: {error}") from None


async def aio_call(method: Callable[..., Awaitable[Answer]], request: Any, settings: CallSettings) -> Answer:
    """The same for a stub of asyncio."""
    try:
        return await method(request, timeout=settings.timeout_s)
    except grpc.RpcError as error:
        raise typed_error(error, settings.target) from None


def typed_error(error: Any, target: str) -> KvholdError:
    """From a sync or asyncio RpcError."""
    trailing = error.trailing_metadata() or ()
    details = next((value for key, value in trailing if key == DETAILS_KEY), None)
    return error_from_status(error.code().name, error.details() or "", details, target)
