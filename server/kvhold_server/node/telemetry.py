"""What the shell counts about itself: calls by method and code, their durations, the event loop's lag.

Plain integers under the event loop's thread; `metrics.py` reads a copy. A call costs two dictionary look-ups and a
bisection, nothing is allocated after a (method, code) has been seen once.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

# Upper ends in seconds; the last bucket is +Inf.
DURATION_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


@dataclass(slots=True)
class Histogram:
    """Counts per bucket, not cumulated, and the sum of all values."""

    bounds: tuple[float, ...]
    buckets: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.buckets = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> "Histogram":
        twin = Histogram(self.bounds)
        twin.buckets[:] = self.buckets
        twin.sum = self.sum
        return twin


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation that can be looked up in traces."""

    trace_id: str
    value: float
    at_s: float  # Unix time


@dataclass(slots=True)
class MethodStats:
    """One rpc method. `codes` are names of gRPC status codes."""

    codes: dict[str, int] = field(default_factory=lambda: {"OK": 0})
    durations: Histogram = field(default_factory=lambda: Histogram(DURATION_BUCKETS_S))
    in_flight: int = 0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)  # by bucket of `durations`: the latest; tracing only

    def finished(self, code: str, seconds: float) -> None:
        self.codes[code] = self.codes.get(code, 0) + 1
        self.durations.observe(seconds)

    def exemplify(self, seconds: float, trace_id: str, at_s: float) -> None:
        """Remembers which trace had a duration like this."""
        self.exemplars[bisect_left(self.durations.bounds, seconds)] = Exemplar(trace_id, seconds, at_s)


@dataclass(slots=True)
class Telemetry:
    """All methods, by "Service/Method"; and the loop."""

    methods: dict[str, MethodStats] = field(default_factory=dict)
    loop_lag: Histogram = field(default_factory=lambda: Histogram(LAG_BUCKETS_S))
    num_unexpected_errors: int = 0

    def method(self, name: str) -> MethodStats:
        """The method's counters, at zero from the first mention on."""
        return self.methods.setdefault(name, MethodStats())

    def copy(self) -> "Telemetry":
        """A snapshot that another thread may read."""
        methods = {
            name: MethodStats(dict(stats.codes), stats.durations.copy(), stats.in_flight, dict(stats.exemplars))
            for name, stats in self.methods.items()
        }
        return Telemetry(methods, self.loop_lag.copy(), self.num_unexpected_errors)
