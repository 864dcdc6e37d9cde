"""Typed errors of sessions. What a client does about each is in the comments of proto/kvhold/v1/session.proto."""

from dataclasses import dataclass

from kvhold_server.domain.errors import Exhausted, NotFound, PreconditionFailed


@dataclass(eq=False)
class UnknownSession(NotFound):
    """Nobody here remembers the session: open a new one."""

    template = "session {short_id}… is not known to this daemon"
    short_id: str  # never the whole id: it is a secret


@dataclass(eq=False)
class SessionFenced(PreconditionFailed):
    """The caller lost the session: a newer tenure owns it, or it ended. Nothing that it held is its own any more."""

    template = "session {short_id}… epoch {epoch} is fenced: {why}"
    short_id: str
    epoch: int  # the caller's
    current_epoch: int
    why: str


@dataclass(eq=False)
class ResumeRefused(PreconditionFailed):
    """The token resumes nothing. Open a new session; what the old one held is not the caller's any more."""

    template = "the session cannot be resumed: {why}"
    why: str


@dataclass(eq=False)
class BootIdMismatch(PreconditionFailed):
    """The daemon restarted since: resume the session and say what it holds."""

    template = "the daemon restarted (it is {boot_id} now): resume the session and re-assert what it holds"
    boot_id: str


@dataclass(eq=False)
class StepOutOfOrder(PreconditionFailed):
    """A step that neither follows the last one nor repeats a remembered one, or completes what did not begin."""

    template = (
        "step {step} part {part} (completed {completed_step}) does not follow "
        "step {last_step} part {last_part} (completed {last_completed_step})"
    )
    step: int
    part: int
    completed_step: int
    last_step: int
    last_part: int
    last_completed_step: int


@dataclass(eq=False)
class TooManySessions(Exhausted):
    """The daemon's (or the tenant's) bound on sessions is reached; the dead ones whose blocks wait count too."""

    template = "{num_sessions} sessions are open for {scope}, the bound is {max_sessions}"
    scope: str  # "all tenants", or "tenant red"
    num_sessions: int
    max_sessions: int


@dataclass(eq=False)
class TooManyWatches(Exhausted):
    """The bound on processes that map pools is reached."""

    template = "{num_watches} processes map pools, the bound is {max_watches}"
    num_watches: int
    max_watches: int
