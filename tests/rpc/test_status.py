"""The one table from typed errors to gRPC, and what of an error travels."""

from dataclasses import dataclass

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from kvhold_server.domain import errors
from kvhold_server.node.errors import Draining, PoolBusy, PoolNotFound
from kvhold_server.rpc.status import CODES, code_of, to_wire


def details(error: errors.KvholdError) -> tuple[ErrorInfo, RetryInfo | None]:
    status = Status.FromString(to_wire(error).trailing_metadata[0][1])  # type: ignore[arg-type]
    info, retry = ErrorInfo(), RetryInfo()
    assert status.details[0].Unpack(info)
    return info, retry if len(status.details) > 1 and status.details[1].Unpack(retry) else None


def test_every_family_has_a_code_of_its_own() -> None:
    families = {family for family in errors.KvholdError.__subclasses__() if family.__module__ == errors.__name__}
    assert families == set(CODES) and len(set(CODES.values())) == len(CODES)


def test_reason_fields_and_text_travel() -> None:
    info, retry = details(PoolNotFound("a"))
    assert (info.reason, info.domain, dict(info.metadata), retry) == ("POOL_NOT_FOUND", "kvhold", {"pool": "a"}, None)
    assert to_wire(PoolNotFound("a")).details == "no pool 'a'"


def test_errors_that_pass_by_themselves_say_when() -> None:
    _, retry = details(Draining(1.5))
    assert retry is not None and (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 500_000_000)


def test_a_busy_pool_is_aborted_and_not_a_precondition() -> None:
    assert code_of(PoolBusy("a", "being opened")) is grpc.StatusCode.ABORTED


@dataclass(eq=False)
class Odd(errors.Exhausted):
    template = "{data} {flag} {text}"
    data: bytes
    flag: bool
    text: str


def test_values_are_bounded_text() -> None:
    info, _ = details(Odd(b"\xff\x00", True, "x" * 10_000))
    assert (info.metadata["data"], info.metadata["flag"], len(info.metadata["text"])) == ("ff00", "true", 1024)
    assert len(to_wire(Odd(b"", False, "x" * 10_000)).details) == 2048


@pytest.mark.parametrize("family", list(CODES))
def test_subclasses_inherit_the_code(family: type[errors.KvholdError]) -> None:
    leaf = dataclass(eq=False)(type("Leaf", (family,), {"template": "", "__annotations__": {}}))
    assert code_of(leaf()) is CODES[family]
