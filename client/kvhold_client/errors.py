"""What can go wrong, as one tree of typed errors rebuilt from the daemon's ErrorInfo.

    KvholdError
    ├── Unreachable            no answer: nobody listens, the connection broke, or the deadline passed
    ├── InvalidRequest         the request is wrong; repeating it cannot help      InvalidField, TooManyItems
    ├── NotFound               the named thing does not exist (any more)           PoolNotFound, UnknownSession
    ├── AlreadyExists          the name is taken
    ├── PreconditionFailed     right request, wrong state                          SessionFenced, ResumeRefused,
    │                                                                              BootIdMismatch, StepOutOfOrder, …
    ├── Exhausted              memory, blocks, quota or a table is full
    ├── Conflict               somebody else changed it at the same time
    ├── Unsupported            understood, but this daemon does not do it
    ├── Unavailable            starting or draining; see `retry_after_s`           Draining
    ├── PermissionDenied       not allowed for this caller
    └── InternalFault          the daemon found a fault of its own

`is_fatal` is true for the errors after which a scheduler must stop using its session: nothing it holds is its own any
more, and going on would write into blocks of somebody else. Anything else may be handled and survived.

The client's own code raises no other exceptions for what a daemon or a network does; ValueError and TypeError mean a
wrong call.
"""

from collections.abc import Mapping

from kvhold_client.status_details import StatusDetails, parse_status_details


class KvholdError(Exception):
    """Base. `reason` is the stable name to switch on, `metadata` the fields of the daemon's error as text."""

    is_fatal = False

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        code: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.code = code  # the gRPC status name, e.g. "NOT_FOUND"; empty if no answer carried one
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.reason else self.message


class Unreachable(KvholdError):
    """The daemon gave no answer. Whether it applied the request is not known; steps are resent exactly once."""


class InvalidRequest(KvholdError):
    """INVALID_ARGUMENT."""


class InvalidField(InvalidRequest):
    """One field is out of its documented range: see `metadata["field"]` and `metadata["constraint"]`."""


class TooManyItems(InvalidRequest):
    """A batch is over the bound that GetCapabilities states; nothing of it was applied. Split it."""


class NotFound(KvholdError):
    """NOT_FOUND."""


class PoolNotFound(NotFound):
    """Nobody has opened a pool of this name."""


class UnknownSession(NotFound):
    """The daemon does not know the session: its grace period is over, or the daemon restarted."""


class AlreadyExists(KvholdError):
    """ALREADY_EXISTS."""


class PreconditionFailed(KvholdError):
    """FAILED_PRECONDITION."""


class SessionFenced(PreconditionFailed):
    """Somebody resumed this session, or it was reaped. Fatal: nothing it held may be read or written any more."""

    is_fatal = True


class ResumeRefused(PreconditionFailed):
    """The session cannot be resumed. Fatal for what it held; a new session may be opened."""

    is_fatal = True


class BootIdMismatch(PreconditionFailed):
    """The daemon restarted since the session was opened. The client resumes by itself; seen only if that fails."""


class StepOutOfOrder(PreconditionFailed):
    """Steps were sent backwards."""


class PlanMismatch(PreconditionFailed):
    """The pool of this name has another plan: see `metadata["first_difference"]`."""


class ByteFormatMismatch(PreconditionFailed):
    """The pool's bytes are written in another format."""


class ContentMismatch(PreconditionFailed):
    """The pool's contents belong to another model, revision or hash."""


class PoolInUse(PreconditionFailed):
    """Sessions or mappings are still there."""


class Exhausted(KvholdError):
    """RESOURCE_EXHAUSTED."""


class Conflict(KvholdError):
    """ABORTED."""


class Unsupported(KvholdError):
    """UNIMPLEMENTED."""


class Unavailable(KvholdError):
    """UNAVAILABLE with a reason."""


class Draining(Unavailable):
    """The daemon is going away: finish, or reconnect after `retry_after_s`."""


class PermissionDenied(KvholdError):
    """PERMISSION_DENIED or UNAUTHENTICATED."""


class InternalFault(KvholdError):
    """INTERNAL, or an answer that makes no sense."""


_BY_CODE: dict[str, type[KvholdError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "FAILED_PRECONDITION": PreconditionFailed,
    "RESOURCE_EXHAUSTED": Exhausted,
    "ABORTED": Conflict,
    "UNIMPLEMENTED": Unsupported,
    "UNAVAILABLE": Unavailable,
    "PERMISSION_DENIED": PermissionDenied,
    "UNAUTHENTICATED": PermissionDenied,
}

_BY_REASON: dict[str, type[KvholdError]] = {
    "INVALID_FIELD": InvalidField,
    "TOO_MANY_ITEMS": TooManyItems,
    "POOL_NOT_FOUND": PoolNotFound,
    "UNKNOWN_SESSION": UnknownSession,
    "SESSION_FENCED": SessionFenced,
    "RESUME_REFUSED": ResumeRefused,
    "BOOT_ID_MISMATCH": BootIdMismatch,
    "STEP_OUT_OF_ORDER": StepOutOfOrder,
    "PLAN_MISMATCH": PlanMismatch,
    "BYTE_FORMAT_MISMATCH": ByteFormatMismatch,
    "CONTENT_MISMATCH": ContentMismatch,
    "POOL_IN_USE": PoolInUse,
    "DRAINING": Draining,
}

# Codes that a transport makes up by itself: without a reason from the daemon they mean that there was no answer.
_NO_ANSWER = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN"}


def error_from_status(code: str, message: str, details: bytes | None, target: str = "") -> KvholdError:
    """Rebuilds the typed error of a failed call from its status name, text and `grpc-status-details-bin`."""
    parsed = parse_status_details(details) if details else StatusDetails()
    if not parsed.reason and code in _NO_ANSWER:
        where = f"the kvhold daemon at {target}" if target else "the kvhold daemon"
        what = "did not answer in time" if code == "DEADLINE_EXCEEDED" else "cannot be reached"
        return Unreachable(f"{where} {what}: {message}", code=code)
    kind = _BY_REASON.get(parsed.reason) or _BY_CODE.get(code, InternalFault)
    return kind(
        message or parsed.message or code,
        reason=parsed.reason,
        metadata=parsed.metadata,
        code=code,
        retry_after_s=parsed.retry_after_s,
    )
