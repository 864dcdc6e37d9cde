"""When may the blocks of a dead session be given to others? A pure function of facts that are brought in from outside.

A scheduler's death says nothing about its workers: their kernels may write for seconds more (R17). Each process that
could write is one *witness*, and there are three things that the daemon can know about it:

    GONE        its pidfd fired, or the connection that its mapping hangs on closed    → does not delay
    RUNNING     it is watched, and neither has happened                                → delays without bound
    UNWATCHED   it took the memory by name: nobody tells us when it ends               → delays until stream end + grace
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvhold_server.sessions.lease import LeaseTerms

MAX_REASONS = 8  # named in a text; the rest is counted


class Evidence(Enum):
    """What is known about a process that could write to a session's blocks."""

    GONE = "gone"
    RUNNING = "running"
    UNWATCHED = "unwatched"


class Wait(Enum):
    """How long a witness delays the release."""

    NOT = "not"
    UNTIL_GRACE_ENDS = "until_grace_ends"
    UNTIL_PROVEN = "until_proven"


WAIT_FOR: Final[dict[Evidence, Wait]] = {
    Evidence.GONE: Wait.NOT,
    Evidence.RUNNING: Wait.UNTIL_PROVEN,
    Evidence.UNWATCHED: Wait.UNTIL_GRACE_ENDS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """One process that could write to the session's blocks."""

    what: str  # for people: "client", "worker of rank 0", "worker of rank 1 that named no session"
    pid: int  # 0: unknown
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathFacts:
    """All that the decision depends on."""

    ended_in_order: bool  # its client closed it, every step complete: its kernels are done, whoever still runs
    stream_ended_at_s: float
    witnesses: tuple[Witness, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the blocks may go, and if not, why and when to ask again."""

    may_release: bool
    reason: str = ""  # for people and logs; empty if they may go
    retry_at_s: float | None = None  # None: only new evidence can change it


def judge(facts: DeathFacts, terms: LeaseTerms, now_s: float) -> Verdict:
    """Decides on a dead session's blocks. Pure."""
    if facts.ended_in_order:
        return Verdict(may_release=True)
    waits = [(witness, WAIT_FOR[witness.evidence]) for witness in facts.witnesses]
    unproven = [witness for witness, wait in waits if wait is Wait.UNTIL_PROVEN]
    grace_ends_at_s = facts.stream_ended_at_s + terms.unproven_grace_s
    counting = [witness for witness, wait in waits if wait is Wait.UNTIL_GRACE_ENDS] if now_s < grace_ends_at_s else []
    if not unproven and not counting:
        return Verdict(may_release=True)
    reasons = [f"{_name(witness)} still runs" for witness in unproven]
    reasons += [f"{_name(witness)} is not watched, {grace_ends_at_s - now_s:.1f} s to go" for witness in counting]
    return Verdict(may_release=False, reason=_join(reasons), retry_at_s=None if unproven else grace_ends_at_s)


def _name(witness: Witness) -> str:
    return f"{witness.what} (pid {witness.pid})" if witness.pid else witness.what


def _join(reasons: list[str]) -> str:
    shown = reasons[:MAX_REASONS]
    if len(reasons) > MAX_REASONS:
        shown.append(f"and {len(reasons) - MAX_REASONS} more")
    return "; ".join(shown)
