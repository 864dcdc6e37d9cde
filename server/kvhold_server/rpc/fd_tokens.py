"""One-time tokens: what ExportMemory hands out and the fd channel takes."""

import secrets
from dataclasses import dataclass

from kvhold_server.domain.errors import Exhausted, NotFound
from kvhold_server.domain.ids import PoolName


@dataclass(eq=False)
class UnknownToken(NotFound):
    """Never issued, used before, or too old: which of them is nobody's business."""

    template = "this token is unknown, used or expired; ask ExportMemory for a new one"


@dataclass(eq=False)
class TooManyTokens(Exhausted):
    """Tokens are issued faster than they are redeemed."""

    template = "{num_tokens} tokens are unredeemed, at most {max_tokens} are allowed; redeem some or wait {ttl_s} s"
    num_tokens: int
    max_tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FdGrant:
    """What a token stands for."""

    owner: str  # whose worker: a session id, or "" for one that comes before its scheduler
    pool: PoolName
    rank: int
    host: bool = False
    read_only: bool = False


class TokenTable:
    """One-time tokens. Time is an argument.

    issue(now) → token ── redeem(token, now ≤ issued + ttl) → grant, once
    """

    def __init__(self, *, max_tokens: int, ttl_s: float) -> None:
        self._max_tokens = max_tokens
        self._ttl_s = ttl_s
        self._grants: dict[bytes, tuple[float, FdGrant]] = {}  # in order of expiry, since all have the same ttl

    def __len__(self) -> int:
        return len(self._grants)

    def issue(self, grant: FdGrant, now_s: float) -> bytes:
        """16 random bytes. Raises TooManyTokens."""
        self._expire(now_s)
        if len(self._grants) >= self._max_tokens:
            raise TooManyTokens(len(self._grants), self._max_tokens, self._ttl_s)
        token = secrets.token_bytes(16)
        self._grants[token] = (now_s + self._ttl_s, grant)
        return token

    def redeem(self, token: bytes, now_s: float) -> FdGrant:
        """Raises UnknownToken."""
        self._expire(now_s)
        entry = self._grants.pop(token, None)
        if entry is None:
            raise UnknownToken()
        return entry[1]

    def drop_pool(self, pool: PoolName) -> None:
        """The pool is deleted: tokens for it are worth nothing."""
        for token in [token for token, (_, grant) in self._grants.items() if grant.pool == pool]:
            del self._grants[token]

    def _expire(self, now_s: float) -> None:
        while self._grants:
            token, (expires_s, _) = next(iter(self._grants.items()))
            if expires_s > now_s:
                break
            del self._grants[token]
