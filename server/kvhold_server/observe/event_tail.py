"""The latest cache events of all pools as lines for people.

A pool's event log begins with its first reader (it costs memory per cached block), so without one there is nothing to
show, and the page says so instead of looking idle.
"""

from kvhold_server.node.event_log import Change, ClearedAll, RemovedRun, StoredRun
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.node import Node

MAX_LINES = 40
SHOWN_HASHES = 3


def event_lines(node: Node) -> list[str]:
    """Newest first, pool by pool."""
    return [line for live in node.pools.values() for line in _pool_lines(live)]


def _pool_lines(live: LivePool) -> list[str]:
    log = live.events
    if not log.is_following:
        return [f"{live.name}: nobody has asked for events yet; the log begins with the first reader"]
    latest = log.since(max(0, log.last_number - MAX_LINES)) or []
    return [f"{live.name} #{event.number} {describe(event.change)}" for event in reversed(latest)]


def describe(change: Change) -> str:
    """One line."""
    match change:
        case StoredRun():
            blocks = ",".join(map(str, change.blocks[:SHOWN_HASHES])) + (
                "…" if len(change.blocks) > SHOWN_HASHES else ""
            )
            return (
                f"stored   {len(change.hashes):>4} in group {change.group}: {_hashes(change.hashes)} in blocks {blocks}"
            )
        case RemovedRun():
            return f"removed  {len(change.hashes):>4} of group {change.group}: {_hashes(change.hashes)}"
        case ClearedAll():
            return f"cleared  everything: {change.reason}"


def _hashes(hashes: tuple[bytes, ...]) -> str:
    shown = " ".join(digest.hex()[:12] for digest in hashes[:SHOWN_HASHES])
    return shown + (" …" if len(hashes) > SHOWN_HASHES else "")
