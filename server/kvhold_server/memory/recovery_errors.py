"""Typed failures of what survives a restart."""

from dataclasses import dataclass

from kvhold_server.domain.errors import Exhausted, PreconditionFailed


@dataclass(eq=False)
class BlockTableUnusable(PreconditionFailed):
    """A block table describes something else, or nothing that can be read: the pool starts fresh."""

    template = "{reason_word}: {detail}"
    reason_word: str  # as in the contract's Recovery.reason
    detail: str


@dataclass(eq=False)
class ManifestUnreadable(PreconditionFailed):
    """A pool of a former daemon cannot be offered again: its manifest is damaged, or of another version."""

    template = "{path} {problem}"
    path: str
    problem: str


@dataclass(eq=False)
class RecordsFull(Exhausted):
    """A file of records has room for no more."""

    template = "{path} has room for {max_records} records"
    path: str
    max_records: int
