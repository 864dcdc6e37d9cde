"""Asks grpc.health.v1 without its package: the base install has none, and the two messages have one field each.

HealthCheckRequest { 1 service: string }        HealthCheckResponse { 1 status: enum }
"""

import grpc

from kvhold_client.calls import call
from kvhold_client.client import Client
from kvhold_client.errors import NotFound

_STATES = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
_MAX_SHORT = 127  # lengths up to this are one byte


def check_health(client: Client, service: str) -> str:
    """SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNKNOWN. Raises Unreachable."""
    name = service.encode()
    if len(name) > _MAX_SHORT:
        raise ValueError("a service's name has at most 127 bytes")
    method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = client._channel.unary_unary(
        "/grpc.health.v1.Health/Check", request_serializer=_as_is, response_deserializer=_as_is
    )
    try:
        answer = call(method, b"\x0a" + bytes([len(name)]) + name, client._settings)
    except NotFound:
        return "SERVICE_UNKNOWN"
    return _STATES.get(answer[1] if answer[:1] == b"\x08" else 0, "UNKNOWN")


def _as_is(message: bytes) -> bytes:
    return message
