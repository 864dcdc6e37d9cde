"""Errors rebuilt from a failed call's status and details."""

import pytest
from google.protobuf import any_pb2, duration_pb2

from kvhold_client.errors import (
    Draining,
    InternalFault,
    InvalidField,
    KvholdError,
    NotFound,
    PoolNotFound,
    ResumeRefused,
    SessionFenced,
    Unreachable,
    error_from_status,
)
from kvhold_client.status_details import parse_status_details

google_rpc = pytest.importorskip("google.rpc.status_pb2", reason="needs googleapis-common-protos")


def details(reason: str, metadata: "dict[str, str] | None" = None, retry_after_s: float = 0.0) -> bytes:
    """What a daemon sends, made with the real messages."""
    from google.rpc import error_details_pb2, status_pb2

    status = status_pb2.Status(code=9, message="text")
    info = error_details_pb2.ErrorInfo(reason=reason, domain="kvhold.v1", metadata=metadata or {})
    packed = any_pb2.Any()
    packed.Pack(info)
    status.details.append(packed)
    if retry_after_s:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        retry = any_pb2.Any()
        retry.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(retry)
    return status.SerializeToString()


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        ("INVALID_ARGUMENT", "INVALID_FIELD", InvalidField),
        ("NOT_FOUND", "POOL_NOT_FOUND", PoolNotFound),
        ("NOT_FOUND", "SOMETHING_NEW", NotFound),
        ("FAILED_PRECONDITION", "SESSION_FENCED", SessionFenced),
        ("FAILED_PRECONDITION", "RESUME_REFUSED", ResumeRefused),
        ("UNAVAILABLE", "DRAINING", Draining),
        ("UNAVAILABLE", "", Unreachable),
        ("DEADLINE_EXCEEDED", "", Unreachable),
        ("DATA_LOSS", "", InternalFault),
    ],
)
def test_reason_then_code_decide_the_type(code: str, reason: str, kind: "type[KvholdError]") -> None:
    found = error_from_status(code, "what happened", details(reason) if reason else None, "unix:/x")
    assert type(found) is kind
    assert found.reason == reason
    assert found.code == code


def test_metadata_and_retry_delay_arrive() -> None:
    found = error_from_status("UNAVAILABLE", "m", details("DRAINING", {"deadline_s": "3"}, retry_after_s=1.5))
    assert found.metadata == {"deadline_s": "3"}
    assert found.retry_after_s == 1.5


def test_an_unreachable_daemon_is_named() -> None:
    assert "unix:/run/kvhold.sock" in str(error_from_status("UNAVAILABLE", "no", None, "unix:/run/kvhold.sock"))


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_details_that_are_cut_off_or_garbage_say_nothing_and_raise_nothing(cut: int) -> None:
    whole = details("SESSION_FENCED", {"a": "b"})
    parse_status_details(whole[:cut])
    parse_status_details(bytes([255]) * cut)
    assert parse_status_details(whole).reason == "SESSION_FENCED"


def test_only_lost_sessions_are_fatal() -> None:
    assert SessionFenced("x").is_fatal
    assert ResumeRefused("x").is_fatal
    assert not Unreachable("x").is_fatal
    assert not PoolNotFound("x").is_fatal
