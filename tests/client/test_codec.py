"""Generated messages become the client's own values, field by field."""

from collections.abc import Iterator

import pytest

from kvhold.v1 import plan_pb2, pool_pb2, session_pb2
from kvhold_client import client as client_module
from kvhold_client.cli.explain import growth_advice
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


def test_what_larger_pools_would_have_kept_is_summed_up_by_age() -> None:
    lines = growth_advice(STATS)
    assert [line.split(" would")[0] for line in lines] == [
        "A quarter more memory", "Twice the memory", "Five times the memory",
    ]  # fmt: skip
    for line, kept in zip(lines, ("100 of them (10", "300 of them (30", "300 of them (30"), strict=True):
        assert kept in line, line
    assert growth_advice(pool_pb2.PrefixStats(query_tokens=9, miss_never_seen_tokens=9)) == []


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
