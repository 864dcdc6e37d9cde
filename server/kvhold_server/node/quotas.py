"""Quotas: what a tenant's sessions may hold of a pool together.

A quota is turned into free blocks that a step must leave alone, so that the pool's own all-or-nothing rule enforces it:

    free for the session   ├────────── available ──────────┤
    left of the quota      ├── left ──┤
    to leave free                      ├──── reserved ─────┤       constant in a step: what it frees counts

Blocks that others hold already are shared, not taken: hitting them costs no quota. Nor, within its step, does hitting a
cached block that is fenced for the session: it was not among the available ones. The next step counts it as held.
"""

from kvhold_server.node.live_pool import LivePool
from kvhold_server.pool.values import StepInput
from kvhold_server.sessions.session import NO_SLOT
from kvhold_server.sessions.session_table import SessionTable


def held_by_tenant(live: LivePool, sessions: SessionTable, tenant: str) -> int:
    """Blocks in tables of the tenant's sessions, each session's counted once. O(those blocks)."""
    known = sessions.sessions(live.name)
    own = [session for session in known if session.request.tenant == tenant and session.session_id in live.members]
    uses = [live.pool.use_of(session.slot) for session in own if session.slot != NO_SLOT]  # else it has just closed
    return sum(use.num_held_blocks + use.num_quarantined_blocks for use in uses)


def quota_of(live: LivePool, sessions: SessionTable, tenant: str) -> int | None:
    """Blocks that the tenant may still take; None: it has no quota."""
    quota = live.quotas.get(tenant)
    return None if quota is None else quota - held_by_tenant(live, sessions, tenant)


def apply_quota(live: LivePool, slot: int, items: StepInput, num_left_blocks: int) -> bool:
    """Raises the items' reserved blocks so that at most `num_left_blocks` are taken. True if that is a real bound."""
    reserved = live.pool.available(slot) - max(0, num_left_blocks)
    if reserved <= 0:
        return False
    for columns in (items.extend, items.admit):
        given = columns.reserved_blocks or [0] * len(columns.sequence_ids)
        columns.reserved_blocks = [max(value, reserved) for value in given]
    return True
