"""Which token resumes which session. Digests only: no table, record or dump gives a token away.

open            token A ─▶ session
resume(A)       token B ─▶ session, A still ─▶ session: the answer with B may be lost
B's epoch used  token B ─▶ session
"""

import hashlib

from kvhold_server.sessions.session import Session


def token_digest(token: str) -> bytes:
    """What is kept and recorded of a resume token."""
    return hashlib.sha256(token.encode()).digest()


class ResumeTokens:
    """Mutable; at most two tokens per session."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}

    def find(self, token: str) -> Session | None:
        """The session that the token resumes."""
        return self._sessions.get(token_digest(token))

    def give(self, session: Session, token: str, *, shown: str = "") -> None:
        """Makes `token` the session's newest one; of the older ones only the one just `shown` stays good."""
        kept = token_digest(shown) if shown else b""
        for digest in {session.token_digest, session.previous_token_digest} - {b"", kept}:
            del self._sessions[digest]
        session.fresh_token = token
        self.restore(session, token_digest(token), kept)

    def restore(self, session: Session, digest: bytes, previous: bytes = b"") -> None:
        """The session's tokens as a record remembers them: the newest, and the one before it while it may be needed."""
        session.token_digest, session.previous_token_digest = digest, previous
        if digest:
            self._sessions[digest] = session
        if previous:
            self._sessions[previous] = session

    def arrived(self, session: Session) -> None:
        """The client acted with its newest credentials: it has the newest token, and older ones are void."""
        session.fresh_token = ""
        if session.previous_token_digest:
            del self._sessions[session.previous_token_digest]
            session.previous_token_digest = b""

    def forget(self, session: Session) -> None:
        """The session ended."""
        self.arrived(session)
        if session.token_digest:
            del self._sessions[session.token_digest]
            session.token_digest = b""

    def check_invariants(self, sessions: list[Session]) -> None:
        """Asserts that exactly the tokens of these sessions are known."""
        held = set()
        for session in sessions:
            own = {session.token_digest, session.previous_token_digest} - {b""}
            assert session.state.is_open or not own, "a dead session has no token"
            assert all(self._sessions[digest] is session for digest in own)
            held |= own
        assert held == self._sessions.keys()
