"""Reads the details of a failed call: google.rpc.Status with ErrorInfo and RetryInfo.

The base install has grpcio and protobuf only, and the messages of google.rpc come in another package, so the few fields
that matter are read from the wire format directly (protobuf encoding: https://protobuf.dev/programming-guides/encoding/).

    Status    { 1 code, 2 message, 3 details: Any }       Any { 1 type_url, 2 value }
    ErrorInfo { 1 reason, 2 domain, 3 metadata: map entries { 1 key, 2 value } }
    RetryInfo { 1 retry_delay: Duration { 1 seconds, 2 nanos } }
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusDetails:
    """What a failed call says beyond its code; everything is empty if it says nothing."""

    message: str = ""
    reason: str = ""
    domain: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None


def parse_status_details(data: bytes) -> StatusDetails:
    """Parses `grpc-status-details-bin`. Bytes that are no such message give empty details: a helper never raises."""
    try:
        return _parse(data)
    except (IndexError, ValueError):
        return StatusDetails()


def _parse(data: bytes) -> StatusDetails:
    message, reason, domain = "", "", ""
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None
    for number, value in _fields(data):
        if number == 2:
            message = _text(value)
        if number != 3:
            continue
        type_url, payload = _pair(_bytes(value))
        if type_url.endswith(b"google.rpc.ErrorInfo"):
            for inner, content in _fields(payload):
                if inner == 1:
                    reason = _text(content)
                elif inner == 2:
                    domain = _text(content)
                elif inner == 3:
                    key, text = _pair(_bytes(content))
                    metadata[key.decode()] = text.decode()
        elif type_url.endswith(b"google.rpc.RetryInfo"):
            retry_after_s = _duration(payload)
    return StatusDetails(message=message, reason=reason, domain=domain, metadata=metadata, retry_after_s=retry_after_s)


def _duration(retry_info: bytes) -> float:
    seconds = 0.0
    for number, delay in _fields(retry_info):
        if number == 1:
            parts = {inner: value for inner, value in _fields(_bytes(delay)) if isinstance(value, int)}
            seconds = parts.get(1, 0) + parts.get(2, 0) / 1e9
    return seconds


def _pair(data: bytes) -> tuple[bytes, bytes]:
    """Fields 1 and 2 of a message, both length-delimited."""
    found = {number: _bytes(value) for number, value in _fields(data)}
    return found.get(1, b""), found.get(2, b"")


def _text(value: int | bytes) -> str:
    return _bytes(value).decode()


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes belong")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and raw value, in order."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire_type = tag & 7
        if wire_type == _VARINT:
            number, at = _varint(data, at)
            yield tag >> 3, number
            continue
        if wire_type == _BYTES:
            size, at = _varint(data, at)
        elif wire_type in (_FIXED64, _FIXED32):
            size = 8 if wire_type == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if at + size > len(data):
            raise ValueError("cut off")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("varint too long")
