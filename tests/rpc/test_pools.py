"""PoolService over a real socket: opening, attaching, what must agree, memory, deletion."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvhold.v1 import pool_pb2 as pb
from tests.rpc.harness import RunningDaemon, llama, refused, running, simulated

FRESH, ATTACHED = pb.OPEN_POOL_OUTCOME_FRESH, pb.OPEN_POOL_OUTCOME_ATTACHED
CACHED = pb.PoolOptions(enable_prefix_caching=True)


def request(name: str = "llama", **fields: object) -> pb.OpenPoolRequest:
    return pb.OpenPoolRequest(**{"name": name, "plan": llama(), "options": CACHED} | fields)  # type: ignore[arg-type]


async def test_first_open_is_fresh_and_says_why_then_equals_attach(daemon: RunningDaemon) -> None:
    first = await daemon.pools.OpenPool(request())
    assert (first.outcome, first.recovery.reason) == (FRESH, "NEW_POOL")
    assert first.pool.counts.num_blocks == first.pool.plan.num_blocks > 100
    second = await daemon.pools.OpenPool(request())
    assert second.outcome == ATTACHED and not second.HasField("recovery")
    assert second.pool.plan == first.pool.plan


async def test_another_plan_is_refused_with_the_first_difference(daemon: RunningDaemon) -> None:
    await daemon.pools.OpenPool(request())
    refusal = await refused(daemon.pools.OpenPool(request(plan=llama(memory_bytes=4 << 20))))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PLAN_MISMATCH")
    assert "num_blocks" in refusal.metadata["first_difference"]


async def test_another_byte_format_or_content_is_refused_by_field(daemon: RunningDaemon) -> None:
    await daemon.pools.OpenPool(request(content=pb.ContentIdentity(model="a", weight_version="1")))
    for fields, reason, field in (
        ({"byte_format": pb.ByteFormat(instruction_set="amx")}, "BYTE_FORMAT_MISMATCH", "instruction_set"),
        ({"content": pb.ContentIdentity(model="a", weight_version="2")}, "CONTENT_MISMATCH", "weight_version"),
    ):
        same = {"content": pb.ContentIdentity(model="a", weight_version="1")}
        refusal = await refused(daemon.pools.OpenPool(request(**same | fields)))
        assert refusal.reason == reason and field in refusal.metadata["first_difference"]


async def test_options_are_part_of_the_identity(daemon: RunningDaemon) -> None:
    await daemon.open_pool(num_blocks=50)
    refusal = await refused(daemon.open_pool(num_blocks=60))
    assert refusal.reason == "PLAN_MISMATCH" and "num_blocks: 50 held, 60 asked" in refusal.message


async def test_open_without_a_plan_attaches_only(daemon: RunningDaemon) -> None:
    refusal = await refused(daemon.pools.OpenPool(pb.OpenPoolRequest(name="llama")))
    assert refusal.reason == "PLAN_REQUIRED"
    await daemon.pools.OpenPool(request())
    assert (await daemon.pools.OpenPool(pb.OpenPoolRequest(name="llama"))).outcome == ATTACHED


async def test_an_expected_fingerprint_is_compared(daemon: RunningDaemon) -> None:
    refusal = await refused(daemon.pools.OpenPool(request(expected_plan_fingerprint="0" * 64)))
    assert refusal.reason == "PLAN_MISMATCH" and not daemon.node.pools
    fingerprint = (await daemon.pools.OpenPool(request())).pool.plan_fingerprint
    assert (await daemon.pools.OpenPool(request(expected_plan_fingerprint=fingerprint))).outcome == ATTACHED


async def test_concurrent_opens_make_one_pool(daemon: RunningDaemon) -> None:
    answers = await asyncio.gather(*(daemon.pools.OpenPool(request()) for _ in range(4)), return_exceptions=True)
    outcomes = [answer.outcome for answer in answers if isinstance(answer, pb.OpenPoolResponse)]
    refused_codes = {answer.code() for answer in answers if isinstance(answer, grpc.aio.AioRpcError)}
    assert outcomes.count(FRESH) == 1 and refused_codes <= {grpc.StatusCode.ABORTED}
    assert len(daemon.node.pools) == 1


async def test_memory_that_is_not_there_leaves_no_trace(short_dir: Path) -> None:
    async with running(short_dir, fake_device_bytes=4 << 20) as daemon:
        refusal = await refused(daemon.pools.OpenPool(request(plan=llama(8 << 20))))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_DEVICE_MEMORY")
        assert int(refusal.metadata["free_bytes"]) == 4 << 20
        assert not daemon.node.pools and not daemon.daemon.backends["fake"].usage().holdings
        assert (await daemon.pools.OpenPool(request(plan=llama(2 << 20)))).outcome == FRESH


async def test_second_rank_that_fails_gives_the_first_back(short_dir: Path) -> None:
    async with running(short_dir, fake_device_bytes=12 << 20) as daemon:
        options = pb.PoolOptions(rank_device_indexes=[0, 0])
        refusal = await refused(daemon.pools.OpenPool(request(plan=llama(8 << 20, num_ranks=2), options=options)))
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not daemon.daemon.backends["fake"].usage().holdings


@pytest.mark.parametrize("slow", ["reserve", "make"])
async def test_a_caller_that_hangs_up_leaves_a_whole_pool_or_none(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """DMN-*: abort at any point of OpenPool leaks nothing; whoever asks next attaches."""
    owner, name = (daemon.daemon.backends["fake"], "reserve") if slow == "reserve" else (daemon.node, "make_pool")
    original, begun = getattr(owner, name), threading.Event()

    def slowly(*args: Any) -> Any:
        begun.set()
        time.sleep(0.3)
        return original(*args)

    monkeypatch.setattr(owner, name, slowly)
    call = daemon.pools.OpenPool(request())
    await asyncio.to_thread(begun.wait)
    call.cancel()
    refusal = await refused(daemon.pools.OpenPool(request()))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "POOL_BUSY")
    await daemon.until(lambda: bool(daemon.node.pools))
    assert (await daemon.pools.OpenPool(request())).outcome == ATTACHED
    assert len(daemon.daemon.backends["fake"].usage().holdings) == 1
    await daemon.pools.DeletePool(pb.DeletePoolRequest(name="llama"))
    assert not daemon.daemon.backends["fake"].usage().holdings


async def test_a_pool_that_cannot_be_made_gives_its_memory_back(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("disk full")

    monkeypatch.setattr(daemon.node, "make_pool", broken)
    assert (await refused(daemon.pools.OpenPool(request()))).reason == "UNEXPECTED_FAULT"
    assert not daemon.daemon.backends["fake"].usage().holdings
    monkeypatch.undo()
    assert (await daemon.pools.OpenPool(request())).outcome == FRESH


async def test_export_names_the_region_and_its_bounds(short_dir: Path) -> None:
    async with running(short_dir, backend="posix_shm") as daemon:
        opened = await daemon.pools.OpenPool(request(options=CACHED))
        size = opened.pool.plan.ranks[0].region_size_bytes
        export = await daemon.pools.ExportMemory(pb.ExportMemoryRequest(pool="llama", rank=0, expected_size_bytes=size))
        region = export.regions[0]
        assert export.backend == pb.MEMORY_BACKEND_POSIX_SHM and region.shm_name and region.fd_token
        assert Path("/dev/shm", region.shm_name).stat().st_size == region.size_bytes >= size
        for fields, reason in (
            ({"rank": 1}, "RANK_NOT_FOUND"),
            ({"rank": -1}, "RANK_NOT_FOUND"),
            ({"expected_size_bytes": size + 1}, "REGION_SIZE_MISMATCH"),
            ({"num_warmup_blocks": 3}, "LOW_BLOCKS_NOT_RESERVED"),
        ):
            refusal = await refused(daemon.pools.ExportMemory(pb.ExportMemoryRequest(pool="llama", **fields)))  # type: ignore[arg-type]
            assert refusal.reason == reason
        await daemon.pools.DeletePool(pb.DeletePoolRequest(name="llama", force=True))
        assert not Path("/dev/shm", region.shm_name).exists()


async def test_simulated_pool_has_nothing_to_export(daemon: RunningDaemon) -> None:
    await daemon.open_pool()
    assert (await refused(daemon.pools.ExportMemory(pb.ExportMemoryRequest(pool="p")))).reason == "NO_MEMORY_HERE"


async def test_delete_is_refused_while_in_use_and_idempotent(daemon: RunningDaemon) -> None:
    await daemon.open_pool()
    session = await daemon.open_session()
    refusal = await refused(daemon.pools.DeletePool(pb.DeletePoolRequest(name="p")))
    assert refusal.reason == "POOL_IN_USE" and refusal.metadata["num_sessions"] == "1"
    await daemon.pools.DeletePool(pb.DeletePoolRequest(name="p", force=True))
    assert (await refused(session.step())).reason == "SESSION_FENCED"
    assert not (await daemon.pools.DeletePool(pb.DeletePoolRequest(name="p"))).freed_bytes
    await daemon.open_pool()
    await (await daemon.open_session()).admit(1, 40)


async def test_update_content_is_a_new_generation_and_hits_nothing_old(daemon: RunningDaemon) -> None:
    await daemon.open_pool()
    session = await daemon.open_session()
    await session.admit(1, 40, 1, 2)
    await session.free(1)
    update = pb.UpdateContentRequest(pool="p", expected_generation=1, content=pb.ContentIdentity(weight_version="2"))
    answer = await daemon.pools.UpdateContent(update)
    assert (answer.content_generation, answer.num_fenced_blocks) == (2, 2)
    assert (await session.admit(1, 40, 1, 2)).admit.hit_tokens == [0]
    refusal = await refused(daemon.pools.UpdateContent(update))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "GENERATION_CONFLICT")
    refusal = await refused(daemon.pools.UpdateContent(pb.UpdateContentRequest(pool="p", expected_generation=2)))
    assert (refusal.reason, refusal.metadata["field"]) == ("INVALID_FIELD", "content")
    refusal = await refused(daemon.pools.OpenPool(pb.OpenPoolRequest(name="p", options=simulated())))
    assert refusal.reason == "CONTENT_MISMATCH"


async def test_list_and_get(daemon: RunningDaemon) -> None:
    await daemon.open_pool("b")
    await daemon.open_pool("a")
    assert [pool.name for pool in (await daemon.pools.ListPools(pb.ListPoolsRequest())).pools] == ["a", "b"]
    assert (await daemon.pools.GetPool(pb.GetPoolRequest(name="a"))).pool.num_groups == 1
    assert (await refused(daemon.pools.GetPool(pb.GetPoolRequest(name="c")))).reason == "POOL_NOT_FOUND"
