"""A session's life as one literal table, and the times that move it.

      open                     stream breaks, falls silent
        │            ┌────────────────────────────┐
        ▼   attach   ▼                            │
      GRACE ───────▶ LIVE ────────────────────────┤
        │  ▲          │                           │
        │  └──────────┴── resume (epoch + 1) ◀────┘
        │ grace over, closed, killed
        ▼
      REAPING ──reaped──▶ WAITING ──proven──▶ RELEASING ──released──▶ GONE
      (its provisional    (workers may        (its blocks go
       hashes go)          still run)          back, in slices)

A session is in GRACE from its opening until its first KeepAlive stream: a client that dies between the two is noticed
like any other. The last four are one state on the wire (QUARANTINED), and nothing leads back from them.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final


class SessionState(Enum):
    """Where a session is in its life."""

    LIVE = "live"  # its KeepAlive stream is up and not silent
    GRACE = "grace"  # no stream; may be resumed or attached until the grace period ends
    REAPING = "reaping"  # dead; the pool drops its provisional hashes, slice by slice
    WAITING = "waiting"  # dead; its blocks wait until all that could write to them is proven gone
    RELEASING = "releasing"  # dead; its blocks go back to the free list, slice by slice
    GONE = "gone"

    @property
    def is_open(self) -> bool:
        """Whether its client may still act."""
        return self in (SessionState.LIVE, SessionState.GRACE)


class SessionEvent(Enum):
    """What can happen to a session."""

    ATTACHED = "attached"  # its client opened a KeepAlive stream
    BROKEN = "broken"  # the stream broke, or was silent for the lease's time
    RESUMED = "resumed"  # its client came back with the token
    ENDED = "ended"  # closed by its client, expired, or killed
    REAPED = "reaped"
    PROVEN = "proven"  # nothing that could write to its blocks is left
    RELEASED = "released"


TRANSITIONS: Final[dict[tuple[SessionState, SessionEvent], SessionState]] = {
    (SessionState.GRACE, SessionEvent.ATTACHED): SessionState.LIVE,
    (SessionState.GRACE, SessionEvent.RESUMED): SessionState.GRACE,
    (SessionState.GRACE, SessionEvent.ENDED): SessionState.REAPING,
    (SessionState.LIVE, SessionEvent.ATTACHED): SessionState.LIVE,
    (SessionState.LIVE, SessionEvent.BROKEN): SessionState.GRACE,
    (SessionState.LIVE, SessionEvent.RESUMED): SessionState.GRACE,
    (SessionState.LIVE, SessionEvent.ENDED): SessionState.REAPING,
    (SessionState.REAPING, SessionEvent.REAPED): SessionState.WAITING,
    (SessionState.WAITING, SessionEvent.PROVEN): SessionState.RELEASING,
    (SessionState.RELEASING, SessionEvent.RELEASED): SessionState.GONE,
}


def after(state: SessionState, event: SessionEvent) -> SessionState:
    """The state that follows; asserts that the table knows the pair (callers ask only for what can happen)."""
    assert (state, event) in TRANSITIONS, f"{event} cannot happen in {state}"
    return TRANSITIONS[state, event]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """The times of a daemon's leases."""

    lease_ttl_s: float = 10.0  # a stream that is silent for longer counts as broken
    grace_s: float = 5.0  # how long a session without a stream may be resumed
    unproven_grace_s: float = 5.0  # from the end of the stream: when processes that nobody watches count as gone
    max_tick_s: float = 1.0  # a longer gap between two `expire` calls means that the daemon slept: it counts for nobody


TICK_S: Final = 0.25  # how often the shell should call `expire`
