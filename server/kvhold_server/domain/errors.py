"""Every expected failure of kvhold, as one tree of typed errors that carry fields, not prose.

    KvholdError                      never raised itself
    ├── InvalidRequest               the caller's input is wrong; retrying it unchanged cannot help
    ├── NotFound                     the named thing does not exist (any more)
    ├── AlreadyExists                the name is taken by something else
    ├── PreconditionFailed           right request, wrong state (stale epoch, other plan, blocks in use)
    ├── Exhausted                    blocks, memory, quota or a table are full; it may fit later
    ├── Unsupported                  understood, but this build or backend does not do it
    ├── Unavailable                  starting or draining; try again after `retry_after_s`
    └── InternalFault                an invariant of ours is broken

A subclass is a dataclass: its fields become the metadata of the wire's ErrorInfo, its class name (UPPER_SNAKE) the
reason. `rpc/status.py` maps the eight families to gRPC codes in one table. Never catch AssertionError: that is our bug.
"""

import dataclasses
import re
from typing import ClassVar

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class KvholdError(Exception):
    """Base of all typed errors. Subclasses are dataclasses; `template` formats their fields for people."""

    template: ClassVar[str] = ""

    @classmethod
    def reason(cls) -> str:
        """UPPER_SNAKE name, stable across versions: what a client switches on."""
        return _WORD_START.sub("_", cls.__name__).upper()

    def fields(self) -> dict[str, object]:
        """Field name → value, in order of declaration."""
        assert dataclasses.is_dataclass(self)
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __str__(self) -> str:
        return self.template.format(**self.fields())


class InvalidRequest(KvholdError):
    """INVALID_ARGUMENT."""


class NotFound(KvholdError):
    """NOT_FOUND."""


class AlreadyExists(KvholdError):
    """ALREADY_EXISTS."""


class PreconditionFailed(KvholdError):
    """FAILED_PRECONDITION."""


class Exhausted(KvholdError):
    """RESOURCE_EXHAUSTED."""


class Unsupported(KvholdError):
    """UNIMPLEMENTED."""


class Unavailable(KvholdError):
    """UNAVAILABLE."""


class InternalFault(KvholdError):
    """INTERNAL."""


@dataclasses.dataclass(eq=False)
class InvalidField(InvalidRequest):
    """One field of a request is out of its documented range."""

    template = "{field}: {value!r} is not allowed: {constraint}"
    field: str  # dotted path in the request, e.g. "layers[3].block_size_tokens"
    value: object
    constraint: str  # the rule with its bound, e.g. "must be 1..2147483647"
