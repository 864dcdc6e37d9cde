"""The typed error of a step that was refused on a connection which goes on: from the code and details of a call."""

from kvhold_client.errors import KvholdError, error_from_status

_CODES = {
    1: "CANCELLED", 2: "UNKNOWN", 3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND", 6: "ALREADY_EXISTS",
    7: "PERMISSION_DENIED", 8: "RESOURCE_EXHAUSTED", 9: "FAILED_PRECONDITION", 10: "ABORTED", 11: "OUT_OF_RANGE",
    12: "UNIMPLEMENTED", 13: "INTERNAL", 14: "UNAVAILABLE", 15: "DATA_LOSS", 16: "UNAUTHENTICATED",
}  # fmt: skip


def refusal(code: int, details: bytes | None, target: str, message: str = "") -> KvholdError:
    """From a gRPC code's number and an encoded google.rpc.Status."""
    return error_from_status(_CODES.get(code, "UNKNOWN"), message, details, target)
