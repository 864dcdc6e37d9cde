"""Typed failures of what survives a restart."""

from dataclasses import dataclass

from kvhold_server.domain.errors import PreconditionFailed


@dataclass(eq=False)
class BlockTableUnusable(PreconditionFailed):
    """A block table describes something else, or nothing that can be read: the pool starts fresh."""

    template = "{reason_word}: {detail}"
    reason_word: str  # as in the contract's Recovery.reason
    detail: str
