"""Hit rate over the latest requests, for people who watch; exported metrics are plain counters."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HitObservation:
    """What was counted since the last observation."""

    requests: int
    query_tokens: int
    hit_tokens: int
    was_reset: bool = False  # the cache was reset before: what was seen so far no longer says anything


class HitRateWindow:
    """Keeps the latest observations that together have about `max_recent_requests` requests."""

    def __init__(self, max_recent_requests: int = 1_000) -> None:
        self._max_requests = max_recent_requests
        self._observations: deque[HitObservation] = deque()
        self.requests = self.query_tokens = self.hit_tokens = 0

    def observe(self, observation: HitObservation) -> None:
        """Adds an observation; the oldest are dropped while more than one is kept and the requests are too many."""
        if observation.was_reset:
            self._observations.clear()
            self.requests = self.query_tokens = self.hit_tokens = 0
        if not observation.requests:
            return
        self._observations.append(observation)
        self._add(observation, 1)
        while len(self._observations) > 1 and self.requests > self._max_requests:
            self._add(self._observations.popleft(), -1)

    def _add(self, observation: HitObservation, sign: int) -> None:
        self.requests += sign * observation.requests
        self.query_tokens += sign * observation.query_tokens
        self.hit_tokens += sign * observation.hit_tokens

    def __len__(self) -> int:
        return len(self._observations)

    @property
    def rate(self) -> float:
        """Hit tokens per queried token, 0 if nothing was queried."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0
