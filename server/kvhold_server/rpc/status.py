"""The one table from typed errors to gRPC: family → code; class name → reason; fields → ErrorInfo metadata.

    PlanMismatch(pool="llama", first_difference=…)
        └─▶ FAILED_PRECONDITION + ErrorInfo{reason: PLAN_MISMATCH, domain: kvhold, metadata: {pool: llama, …}}

The client rebuilds the error from the same three parts. Values are cut at 1 KiB: metadata travels in HTTP/2 headers.
"""

import math
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from kvhold_server.domain.errors import (
    AlreadyExists,
    Exhausted,
    InternalFault,
    InvalidRequest,
    KvholdError,
    NotFound,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)

ERROR_DOMAIN = "kvhold"
DETAILS_KEY = "grpc-status-details-bin"
MAX_VALUE_CHARS = 1024
MAX_MESSAGE_CHARS = 2048


CODES: dict[type[KvholdError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    InternalFault: grpc.StatusCode.INTERNAL,
}

# Reasons whose code is not their family's: a precondition that changes by itself in a moment.
CODE_OF_REASON: dict[str, grpc.StatusCode] = {
    "POOL_BUSY": grpc.StatusCode.ABORTED,
    "GENERATION_CONFLICT": grpc.StatusCode.ABORTED,
    "TENANT_MISMATCH": grpc.StatusCode.PERMISSION_DENIED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireError:
    """What `context.abort` takes."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def code_of(error: KvholdError) -> grpc.StatusCode:
    """The status code of a typed error."""
    by_reason = CODE_OF_REASON.get(error.reason())
    if by_reason is not None:
        return by_reason
    return next((CODES[base] for base in type(error).__mro__ if base in CODES), grpc.StatusCode.INTERNAL)


def to_wire(error: KvholdError) -> WireError:
    """Encodes a typed error."""
    code = code_of(error)
    details = str(error)[:MAX_MESSAGE_CHARS]
    info = ErrorInfo(reason=error.reason(), domain=ERROR_DOMAIN, metadata=_metadata(error))
    status = Status(code=code.value[0], message=details, details=[_packed(info), *_retry(error)])
    return WireError(code=code, details=details, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),))


def _metadata(error: KvholdError) -> dict[str, str]:
    return {name: _text(value)[:MAX_VALUE_CHARS] for name, value in error.fields().items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.hex() if isinstance(value, bytes) else str(value)


def _retry(error: KvholdError) -> list[Any]:
    """RetryInfo for errors that say when trying again makes sense."""
    after = error.fields().get("retry_after_s")
    if not isinstance(after, int | float) or after < 0 or not math.isfinite(after):
        return []
    delay = Duration(seconds=int(after), nanos=int(after % 1 * 1e9))
    return [_packed(RetryInfo(retry_delay=delay))]


def _packed(message: ErrorInfo | RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
