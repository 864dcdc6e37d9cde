"""What a replay found, as a value for programs and as a page for people."""

from dataclasses import dataclass

from kvhold_client.cli.console import Console
from kvhold_client.cli.units import format_bytes, format_count, format_seconds, format_share
from kvhold_client.replay.counters import percentile_s
from kvhold_client.replay.runner import KillReport, ReplayResult, RestartReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One number as the schedulers counted it and as the daemon's metrics have it."""

    what: str
    schedulers: int
    daemon: int
    slack: int  # a killed scheduler may have had one answer under way that it never counted

    @property
    def holds(self) -> bool:
        """Equal, or within what was under way."""
        return self.schedulers <= self.daemon <= self.schedulers + self.slack


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All numbers of a run."""

    seconds: float
    num_rows: int
    num_finished: int
    num_skipped: int
    num_left_out: int
    query_tokens: int
    hit_tokens: int
    prefill_tokens: int
    generated_tokens: int
    num_preemptions: int
    num_blocks: int
    num_evicted_blocks: int | None
    num_steps: int
    num_silent_steps: int
    num_rpcs: int
    rpc_p50_s: float
    rpc_p90_s: float
    rpc_p99_s: float
    rpc_max_s: float
    num_blocks_written: int
    num_blocks_verified: int
    bytes_verified: int
    num_mismatches: int
    agreements: tuple[Agreement, ...]
    kill: KillReport | None
    kill_was_asked: bool
    num_reconnects: int
    restarts: RestartReport | None  # None: one daemon served the whole run
    inherited_query_tokens: int
    inherited_hit_tokens: int
    failures: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Nobody failed, no byte was unexpected, nothing is left undone, and the numbers agree."""
        released = self.kill is None or self.kill.freed_after_s is not None
        agreed = all(agreement.holds for agreement in self.agreements)
        return not self.failures and not self.num_mismatches and agreed and released


def summarize(result: ReplayResult, pool: str) -> Summary:
    """Reads the counters, compares them with the daemon's page."""
    counters = result.counters
    histogram = counters.histogram()
    return Summary(
        seconds=result.seconds,
        num_rows=result.num_rows,
        num_finished=counters.total("finished"),
        num_skipped=counters.total("skipped"),
        num_left_out=result.num_left_out,
        query_tokens=counters.total("query_tokens"),
        hit_tokens=counters.total("hit_tokens"),
        prefill_tokens=counters.total("prefill_tokens"),
        generated_tokens=counters.total("generated_tokens"),
        num_preemptions=counters.total("preemptions"),
        num_blocks=result.after.counts.num_blocks,
        num_evicted_blocks=_gained(result, "kvhold_evicted_blocks_total", pool) if result.page_after else None,
        num_steps=counters.total("steps"),
        num_silent_steps=counters.total("silent_steps"),
        num_rpcs=counters.total("rpcs"),
        rpc_p50_s=percentile_s(histogram, 50),
        rpc_p90_s=percentile_s(histogram, 90),
        rpc_p99_s=percentile_s(histogram, 99),
        rpc_max_s=max(counters.get(slot, "max_rpc_ns") for slot in range(counters.num_slots)) / 1e9,
        num_blocks_written=counters.total("blocks_written"),
        num_blocks_verified=counters.total("blocks_verified"),
        bytes_verified=counters.total("bytes_verified"),
        num_mismatches=counters.total("mismatches"),
        agreements=tuple(_agreements(result, pool)),
        kill=result.kill,
        kill_was_asked=result.kill_was_asked,
        num_reconnects=counters.total("reconnects"),
        restarts=result.restarts,
        inherited_query_tokens=counters.total("inherited_query_tokens"),
        inherited_hit_tokens=counters.total("inherited_hit_tokens"),
        failures=tuple(result.failures),
    )


def _gained(result: ReplayResult, name: str, pool: str) -> int:
    assert result.page_before is not None
    assert result.page_after is not None
    return result.page_after.total(name, pool=pool) - result.page_before.total(name, pool=pool)


def _agreements(result: ReplayResult, pool: str) -> list[Agreement]:
    if result.page_before is None or result.page_after is None:
        return []
    counters = result.counters
    slack = result.max_call_tokens if result.kill is not None and result.kill.was_in_call else 0
    pairs = (
        ("query tokens", ("query_tokens",), "kvhold_prefix_query_tokens_total"),
        ("hit tokens", ("hit_tokens",), "kvhold_prefix_hit_tokens_total"),
        ("query tokens of preempted", ("resumed_query_tokens",), "kvhold_prefix_resumed_query_tokens_total"),
        ("hit tokens of preempted", ("resumed_hit_tokens",), "kvhold_prefix_resumed_hit_tokens_total"),
    )
    return [
        Agreement(
            what=what,
            schedulers=sum(counters.total(name) for name in names),
            daemon=_gained(result, metric, pool),
            slack=slack,
        )
        for what, names, metric in pairs
    ]


def print_summary(console: Console, summary: Summary) -> None:
    """One page. What went wrong comes last, where it is seen."""
    s = summary
    rows = [
        ("requests", _requests(s)),
        ("time", f"{format_seconds(s.seconds)}: {format_count(s.num_finished / s.seconds)} requests/s"),
        ("prompt tokens", f"{format_count(s.query_tokens)} asked for at admission"),
        (
            "found in cache",
            f"{format_count(s.hit_tokens)} tokens, {format_share(s.hit_tokens, s.query_tokens)} hit rate",
        ),
        ("computed", f"{format_count(s.prefill_tokens)} prompt tokens, {format_count(s.generated_tokens)} generated"),
        ("blocks", _blocks(s)),
        ("preemptions", format_count(s.num_preemptions)),
        ("steps", _steps(s)),
        ("rpc time", _rpc_times(s)),
        ("bytes", _bytes(s)),
    ]
    for name, text in rows:
        console.print(f"{name:<15} {text}")
    _print_kill(console, s)
    _print_reconnects(console, s)
    for agreement in s.agreements:
        mark = console.styled("agrees", "green") if agreement.holds else console.styled("DIFFERS", "red")
        console.print(
            f"{'/metrics':<15} {mark}: {agreement.what} {format_count(agreement.daemon)}"
            + ("" if agreement.daemon == agreement.schedulers else f", schedulers {format_count(agreement.schedulers)}")
        )
    for failure in s.failures:
        console.error(failure)


def _requests(s: Summary) -> str:
    parts = [f"{format_count(s.num_finished)} finished"]
    if s.num_skipped:
        parts.append(f"{format_count(s.num_skipped)} skipped (longer than the model's length)")
    if s.num_left_out:
        why = "" if s.failures else " (--max-prompt-tokens)"
        parts.append(f"{format_count(s.num_left_out)} not run{why}")
    return ", ".join(parts)


def _blocks(s: Summary) -> str:
    evicted = "" if s.num_evicted_blocks is None else f", {format_count(s.num_evicted_blocks)} evicted"
    return f"{format_count(s.num_blocks - 1)} in the pool, {format_count(s.num_blocks_written)} writes{evicted}"


def _steps(s: Summary) -> str:
    silent = format_share(s.num_silent_steps, s.num_steps)
    rate = format_count(s.num_steps / s.seconds)
    return f"{format_count(s.num_steps)} ({rate}/s), {silent} of them without any rpc, {format_count(s.num_rpcs)} rpcs"


def _rpc_times(s: Summary) -> str:
    named = (("p50", s.rpc_p50_s), ("p90", s.rpc_p90_s), ("p99", s.rpc_p99_s), ("max", s.rpc_max_s))
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in named)


def _bytes(s: Summary) -> str:
    if not s.num_blocks_verified:
        return "none written (no memory behind this pool)"
    verdict = "every one as expected" if not s.num_mismatches else f"{s.num_mismatches} BLOCKS DIFFER"
    return f"{format_bytes(s.bytes_verified)} read back in {format_count(s.num_blocks_verified)} blocks: {verdict}"


def _print_reconnects(console: Console, s: Summary) -> None:
    if s.num_reconnects:
        console.print(f"{'reconnects':<15} {format_count(s.num_reconnects)}, each by a resume of its session")
    restarts = s.restarts
    if restarts is None:
        return
    times = f"{restarts.num_restarts} times" if restarts.num_restarts > 1 else "once"
    kept = f"{restarts.outcome.upper()} with {format_count(restarts.num_recovered_blocks)} blocks"
    why = f" ({restarts.reason})" if restarts.reason else ""
    lost = f"{format_count(restarts.num_lost_sequences)} sequences lost and computed again"
    console.print(f"{'daemon':<15} restarted {times}; its pool came back {kept}{why}; {lost}")
    console.print(f"{'/metrics':<15} not compared: the daemon of now has not counted all of it")


def _print_kill(console: Console, s: Summary) -> None:
    kill = s.kill
    if kill is None:
        if s.kill_was_asked:
            console.print(f"{'killed':<15} nobody: the replay was over before it was time")
        return
    freed = "never released" if kill.freed_after_s is None else f"released after {format_seconds(kill.freed_after_s)}"
    console.print(
        f"{'killed':<15} {kill.name} at {format_seconds(kill.at_s)} with {kill.num_rows_begun} requests in "
        f"{format_count(kill.held_blocks)} blocks, {freed}"
    )
    share = format_share(s.inherited_hit_tokens, s.inherited_query_tokens)
    console.print(
        f"{'successor':<15} found {format_count(s.inherited_hit_tokens)} of "
        f"{format_count(s.inherited_query_tokens)} tokens of those requests in the cache ({share})"
    )
