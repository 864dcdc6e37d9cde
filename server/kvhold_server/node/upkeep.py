"""What operators and weight updates do to a pool's cache. Blocks stay where they are; only hashes go."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from kvhold_server.node.errors import TooManyTenants
from kvhold_server.node.identity import ContentIdentity
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.warm_restart import WarmRestart
from kvhold_server.pool.errors import BlocksInUse
from kvhold_server.sessions.session import Session

MAX_NAMED_HOLDERS = 20


def forget_hashes(
    live: LivePool, sessions: Iterable[Session] = (), *, force: bool, reason: str
) -> tuple[int, set[int]]:
    """Returns (blocks that had a hash, slots of sessions that hold blocks).

    Raises BlocksInUse unless forced; it names those of `sessions` that hold blocks.
    """
    num_hashed = len(live.pool.published().blocks) + live.pool.counts().provisional
    try:
        holders = live.pool.reset(force=force)
    except BlocksInUse as refusal:
        raise BlocksInUse(refusal.num_held, _holders(live, sessions) or refusal.holders) from None
    live.note(None, live.pool.take_events(), reason)
    return num_hashed, {slot for slot, _ in holders}


def _holders(live: LivePool, sessions: Iterable[Session]) -> str:
    slots = {slot for slot, _ in live.pool.holders()}
    named = (f"{session.short_id} ({session.request.client_name})" for session in sessions if session.slot in slots)
    return ", ".join(islice(named, MAX_NAMED_HOLDERS))


def evict(live: LivePool, block_ids: list[int]) -> int:
    """Drops the hashes of these blocks; returns how many had one."""
    num_evicted = live.pool.evict(block_ids)
    live.note(None, live.pool.take_events())
    return num_evicted


def new_generation(live: LivePool, content: ContentIdentity) -> tuple[int, int]:
    """From now on nothing published before can be hit. Returns (generation, blocks fenced)."""
    num_fenced, _ = forget_hashes(live, force=True, reason="CONTENT_UPDATED")
    live.content_generation += 1
    live.identity = replace(live.identity, content=content)
    return live.content_generation, num_fenced


def change_quota(live: LivePool, tenant: str, max_held_blocks: int, max_tenants: int, warm: WarmRestart | None) -> None:
    """Bounds a tenant; 0: no longer. A successor knows it before anybody here does. Raises TooManyTenants; ShmTooSmall,
    SystemCallFailed if it could not be told; then nothing has changed.
    """
    if max_held_blocks and tenant not in live.quotas and len(live.quotas) >= max_tenants:
        raise TooManyTenants(live.name, len(live.quotas), max_tenants)
    if warm is not None and live.journal is not None:
        warm.set_quota(live.name, tenant, max_held_blocks)
    if max_held_blocks:
        live.quotas[tenant] = max_held_blocks
    else:
        live.quotas.pop(tenant, None)
