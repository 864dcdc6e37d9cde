"""Generated messages become the client's own values, field by field."""

from collections.abc import Iterator

import pytest

from kvhold.v1 import block_pb2, plan_pb2, pool_pb2, session_pb2
from kvhold_client import client as client_module
from kvhold_client.cli.explain import growths_of, memory_advice
from kvhold_client.client import Client
from kvhold_client.codec import decode_prefix_stats, decode_session_info
from kvhold_client.pools import decode_pool
from kvhold_client.results import PrefixStats

STATS = pool_pb2.PrefixStats(
    query_tokens=1000, hit_own_tokens=200, miss_evicted_tokens=800, miss_evicted_by_age_tokens=[100, 200, 0, 500]
)


def test_evicted_tokens_are_told_apart_by_age() -> None:
    stats = decode_prefix_stats(STATS)
    assert stats.miss_evicted_by_age_tokens == (100, 200, 0, 500)
    assert sum(stats.miss_evicted_by_age_tokens) == stats.miss_evicted_tokens


def test_a_session_has_statistics_of_its_own() -> None:
    described = decode_session_info(session_pb2.SessionInfo(short_id="s", prefix_stats=STATS))
    assert described.prefix_stats == decode_prefix_stats(STATS)
    assert decode_session_info(session_pb2.SessionInfo(short_id="s")).prefix_stats == PrefixStats()


GROWN = pool_pb2.Pool(
    prefix_stats=pool_pb2.PrefixStats(
        query_tokens=1000,
        hit_own_tokens=200,
        miss_evicted_tokens=800,
        miss_evicted_by_growth_tokens=[100, 200, 0, 500],
        growth_percents=[5, 20, 100],
    ),
    counts=block_pb2.PoolCounts(num_blocks=1000),
    block_size_bytes=1 << 20,
)


@pytest.mark.parametrize(
    ("percent", "at_least", "at_most"),
    [(1, 0, 100), (5, 100, 100), (12, 100, 300), (20, 300, 300), (99, 300, 300), (100, 300, 300), (500, 300, 800)],
)
def test_what_a_larger_pool_would_have_kept(percent: int, at_least: int, at_most: int) -> None:
    (growth,) = growths_of(GROWN, (percent,))
    assert (growth.kept_tokens_at_least, growth.kept_tokens_at_most) == (at_least, at_most)
    assert growth.more_bytes == 10 * percent << 20
    assert growth.hit_rate == (200 + at_least) / 1000


def test_an_older_daemon_that_does_not_count_growth_is_not_guessed_for() -> None:
    assert growths_of(pool_pb2.Pool(prefix_stats=STATS), (20,)) == []


def test_a_prompts_advice_is_about_the_growth_that_was_asked_for() -> None:
    lines = memory_advice(GROWN, 150, (10, 20))
    assert lines[0].startswith("150 blocks more (15.0 %, 150 MiB a rank)")
    assert "10 % more (100 MiB a rank) would not have been enough." in lines
    assert "20 % more (200 MiB a rank) would have been enough." in lines


@pytest.fixture
def client() -> Iterator[Client]:
    with Client("unix:/nonexistent/kvhold.sock", timeout_s=0.1) as client:
        yield client


def test_a_rank_is_mapped_where_it_was_mapped_before(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a daemon was replaced: `device_address` of the old mapping, or 0 for anywhere."""
    mapped_at = []
    monkeypatch.setattr(client_module, "call", lambda *_: pool_pb2.ExportMemoryResponse())
    monkeypatch.setattr(client_module, "map_region", lambda *_, wanted_address, **__: mapped_at.append(wanted_address))
    message = pool_pb2.Pool(name="m", plan=plan_pb2.Plan(ranks=[plan_pb2.RankPlan()]))
    pool = client_module.Pool(client, message, decode_pool(message))
    pool.map_rank(0, wanted_address=0x7F00_0000_0000)
    pool.map_rank(0)
    assert mapped_at == [0x7F00_0000_0000, 0]
