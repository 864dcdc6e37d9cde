"""What the node answers and keeps beside pools and sessions."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kvhold_server.memory.backend import ExportedRegion, Region
from kvhold_server.sessions.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """How to map one rank's memory: its device region, then its host region if it has one."""

    backend: str
    regions: tuple[tuple[Region, ExportedRegion], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What closing a session released."""

    num_sequences: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetReport:
    """What a reset did, and who holds blocks that can no longer be hit."""

    num_reset_blocks: int
    holders: tuple[Session, ...]


@dataclass(slots=True, kw_only=True)
class DrainState:
    """Set once; sessions may go on until the deadline."""

    deadline_at_s: float = inf
    is_draining: bool = False
    retry_after_s: float = 1.0


@dataclass(slots=True, kw_only=True)
class Shell:
    """What the world outside gives the node."""

    boot_id: str
    clock: Callable[[], float]  # seconds, never decreasing
    new_secret: Callable[[], str]  # unguessable
