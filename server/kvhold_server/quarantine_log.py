"""One line in the log for every dead session whose blocks wait, whenever what they wait for changes, and when they go.
A session that holds nothing leaves none: thousands of them come and go in order.

session 5hG2kQ0a… died: 312 blocks wait: worker of rank 0 (pid 4711) still runs
session 5hG2kQ0a… is settled after 12.4 s
"""

import logging
import re
from dataclasses import dataclass, field

from kvhold_server.node.node import Node
from kvhold_server.sessions.lease import SessionState

logger = logging.getLogger(__name__)

_COUNTDOWN = re.compile(r", [\d.]+ s to go")


@dataclass(slots=True)
class QuarantineLog:
    """Called now and then; O(dead sessions)."""

    node: Node
    _said: dict[str, tuple[str, str, float]] = field(default_factory=dict)  # session → short id, reason, since

    def look(self) -> None:
        """Logs what changed since the last look."""
        now_s, table = self.node.now_s, self.node.sessions
        waiting = set()
        for session in table.dead():
            if session.state is not SessionState.WAITING:
                continue
            waiting.add(session.session_id)
            reason = _COUNTDOWN.sub("", table.quarantine_reason(session.session_id, now_s))
            _, before, since_s = self._said.get(session.session_id, ("", "", now_s))
            if reason and reason != before:
                num_blocks = self.node.session_use(session).num_quarantined_blocks
                if not num_blocks:
                    continue  # it waits, and nobody misses anything
                cause = session.end_cause.value if session.end_cause else "ended"
                logger.info("session %s… %s: %d blocks wait: %s", session.short_id, cause, num_blocks, reason)
                self._said[session.session_id] = (session.short_id, reason, since_s)
        for session_id in self._said.keys() - waiting:
            short_id, _, since_s = self._said.pop(session_id)
            logger.info("session %s… is settled after %.1f s", short_id, now_s - since_s)
