"""Where the tokens of prompts came from, over the wire: the parts add up, per pool and per session."""

from kvhold.v1 import pool_pb2, session_pb2
from tests.rpc.harness import RunningDaemon
from tests.rpc.test_event_consumer import Scheduler, open_hybrid

PARTS = (
    "hit_own_tokens",
    "hit_shared_tokens",
    "miss_never_seen_tokens",
    "miss_evicted_tokens",
    "miss_rule_tokens",
    "miss_other_tokens",
)
SUMS = ("query_tokens", "num_requests", "skipped_query_tokens", *PARTS)


def assert_adds_up(stats: pool_pb2.PrefixStats) -> None:
    assert stats.query_tokens == sum(getattr(stats, part) for part in PARTS)
    assert stats.miss_evicted_tokens == sum(stats.miss_evicted_by_age_tokens)
    assert len(stats.miss_evicted_by_age_tokens) == 4
    assert stats.miss_evicted_tokens == sum(stats.miss_evicted_by_growth_tokens)
    assert len(stats.miss_evicted_by_growth_tokens) == len(stats.growth_percents) + 1


async def test_the_parts_sum_to_the_query_tokens_per_pool_and_session(daemon: RunningDaemon) -> None:
    """Each token is attributed once, whatever refusals and repetitions came before."""
    await open_hybrid(daemon)
    schedulers = []
    for number in (1, 2):
        session = await daemon.open_session(client_name=f"scheduler-{number}")
        await session.keep_alive()
        schedulers.append(Scheduler(session, number, seed=10 + number))
    for turn in range(120):
        for scheduler in schedulers:
            await scheduler.act()
        if turn % 20 == 0:
            pool = (await daemon.pools.GetPool(pool_pb2.GetPoolRequest(name="p"))).pool.prefix_stats
            assert_adds_up(pool)
    pool = (await daemon.pools.GetPool(pool_pb2.GetPoolRequest(name="p"))).pool.prefix_stats
    listed = (await daemon.sessions.ListSessions(session_pb2.ListSessionsRequest(pool="p"))).sessions
    for info in listed:
        assert_adds_up(info.prefix_stats)
    for name in SUMS:
        assert getattr(pool, name) == sum(getattr(info.prefix_stats, name) for info in listed), name
    assert all(getattr(pool, part) > 0 for part in PARTS), f"each cause occurs: {pool}"
