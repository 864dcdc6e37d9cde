"""/metrics over HTTP: everything at zero from the start, parts that sum, few lines, no stalled loop."""

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvhold.v1 import block_pb2
from kvhold_server.http import MAX_CONNECTIONS, REQUEST_TIMEOUT_S
from kvhold_server.observe.routes import CACHE_S
from kvhold_server.observe.take import Observer
from tests.rpc.harness import RunningDaemon, refused, running

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def get(daemon: RunningDaemon, path: str = "/metrics", request: bytes | None = None) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.daemon.metrics_port)
    writer.write(request or f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body


async def scrape(daemon: RunningDaemon) -> Samples:
    _, text = await get(daemon)
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


async def test_every_counter_exists_at_zero_and_states_sum_to_the_pool(short_dir: Path) -> None:
    async with running(short_dir, metrics="127.0.0.1:0") as daemon:
        await daemon.open_pool(num_blocks=100, num_reserved_low_blocks=4)
        samples = await scrape(daemon)
        for result in ("ok", "out_of_blocks", "never_fits", "quota", "error"):
            assert value(samples, "kvhold_allocations_total", pool="p", result=result) == 0
        assert value(samples, "kvhold_evicted_blocks_total", pool="p") == 0
        assert value(samples, "kvhold_prefix_hit_tokens_total", pool="p", source="shared") == 0
        assert value(samples, "kvhold_rpcs_total", method="BlockService/Step", code="OK") == 0
        states = {dict(labels)["state"]: v for (name, labels), v in samples.items() if name == "kvhold_pool_blocks"}
        assert sum(states.values()) == 100 and (states["null"], states["reserved"], states["free"]) == (1, 4, 95)


async def test_numbers_follow_the_work_and_usage_leaves_the_null_block_out(short_dir: Path) -> None:
    async with running(short_dir, metrics="127.0.0.1:0") as daemon:
        await daemon.open_pool(num_blocks=101)
        session = await daemon.open_session()
        await session.admit(1, 40, 1, 2)
        await session.free(1)
        await session.admit(2, 40, 1, 2)
        await session.admit(3, 16 * 97, skip_lookup=[True])
        await session.admit(4, 40, 5, 6)
        await refused(session.step(part=-1))
        samples = await scrape(daemon)
        assert value(samples, "kvhold_pool_usage_ratio", pool="p") == 1.0
        assert value(samples, "kvhold_allocations_total", pool="p", result="ok") == 3
        assert value(samples, "kvhold_allocations_total", pool="p", result="out_of_blocks") == 1
        assert value(samples, "kvhold_prefix_query_tokens_total", pool="p") == 80
        assert value(samples, "kvhold_prefix_hit_tokens_total", pool="p", source="self") == 32
        parts = [v for (name, _), v in samples.items() if name.startswith(("kvhold_prefix_hit", "kvhold_prefix_miss"))]
        assert sum(parts) == 80
        assert value(samples, "kvhold_sessions", pool="p", state="grace") == 1
        assert value(samples, "kvhold_rpcs_total", method="BlockService/Step", code="OK") == 5
        assert value(samples, "kvhold_rpcs_total", method="BlockService/Step", code="INVALID_ARGUMENT") == 1
        assert value(samples, "kvhold_rpc_duration_seconds_count", method="BlockService/Step") == 6


async def test_blocks_given_to_a_step_that_the_device_has_not_begun_are_counted(short_dir: Path) -> None:
    async with running(short_dir, metrics="127.0.0.1:0") as daemon:
        await daemon.open_pool(num_blocks=101)
        session = await daemon.open_session()
        await session.admit(1, 40, 1, 2)
        await session.step(extend=block_pb2.ExtendItems(sequence_ids=[1], slots_needed=[80]), completed_step=0)
        assert value(await scrape(daemon), "kvhold_pool_lookahead_blocks", pool="p") == 2
        await asyncio.sleep(CACHE_S)
        await session.step(free=block_pb2.FreeItems(sequence_ids=[1]))
        samples = await scrape(daemon)
        assert value(samples, "kvhold_pool_lookahead_blocks", pool="p") == 0
        assert value(samples, "kvhold_pool_blocks", pool="p", state="held") == 0


async def test_eight_pools_stay_under_a_thousand_lines(short_dir: Path) -> None:
    async with running(short_dir, metrics="127.0.0.1:0") as daemon:
        for i in range(8):
            await daemon.open_pool(f"pool-{i}")
        _, text = await get(daemon)
        assert len(text.splitlines()) < 1000


async def test_of_two_views_at_once_the_second_lacks_nothing(short_dir: Path) -> None:
    """A page and a scrape in the first moment of a daemon."""
    async with running(short_dir) as daemon:
        await daemon.open_pool()
        await daemon.open_session()
        observer = Observer(daemon.node, "1")
        for view in await asyncio.gather(observer.take(), observer.take()):
            assert view.backends and len(view.sessions) == 1


async def test_http_serves_known_pages_only(short_dir: Path) -> None:
    async with running(short_dir, metrics="127.0.0.1:0") as daemon:
        assert (await get(daemon, "/healthz"))[0] == 200
        assert (await get(daemon, "/readyz"))[0] == 200
        assert (await get(daemon, "/etc/passwd"))[0] == 404
        assert (await get(daemon, request=b"POST /metrics HTTP/1.1\r\n\r\n"))[0] == 405
        assert (await get(daemon, request=b"junk\r\n\r\n"))[0] == 400
        daemon.node.begin_drain(1.0)
        assert (await get(daemon, "/readyz"))[0] == 503


async def test_idle_connections_keep_no_scraper_out(short_dir: Path) -> None:
    async with running(short_dir, metrics="127.0.0.1:0") as daemon:
        idle = [
            await asyncio.open_connection("127.0.0.1", daemon.daemon.metrics_port) for _ in range(2 * MAX_CONNECTIONS)
        ]
        assert (await asyncio.wait_for(get(daemon, "/healthz"), REQUEST_TIMEOUT_S / 2))[0] == 200
        assert await idle[0][0].read() == b"", "the oldest was cut"
        for _, writer in idle:
            writer.close()
