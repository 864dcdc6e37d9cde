"""Bad input gets a typed error that names field and bound, and changes nothing."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from kvhold.v1 import block_pb2, plan_pb2, pool_pb2, session_pb2
from tests.rpc.harness import ClientSession, RunningDaemon, digest, llama, refused, running

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MANY = [1] * 65_537


@pytest.fixture
async def session(daemon: RunningDaemon) -> ClientSession:
    await daemon.open_pool()
    opened = await daemon.open_session()
    await opened.admit(1, 40, 1, 2)
    return opened


def parts(**fields: Any) -> dict[str, Any]:
    return fields


ex, ad = block_pb2.ExtendItems, block_pb2.AdmitItems
opts, byte_format = pool_pb2.PoolOptions, pool_pb2.ByteFormat

BAD_STEPS: list[tuple[str, dict[str, Any]]] = [
    ("step", parts(step=0)),
    ("step", parts(step=-1)),
    ("completed_step", parts(step=3, completed_step=4)),
    ("completed_step", parts(step=3, completed_step=-1)),
    ("part", parts(part=-1)),
    ("part", parts(part=1024)),
    ("extend.slots_needed", parts(extend=ex(sequence_ids=[1]))),
    ("extend.slots_needed", parts(extend=ex(sequence_ids=[1], slots_needed=[-5]))),
    ("extend.slots_needed", parts(extend=ex(sequence_ids=[1], slots_needed=[1, 2]))),
    ("extend.hashes", parts(extend=ex(sequence_ids=[1], slots_needed=[1], num_hashes=[1], hashes=b"x"))),
    ("extend.sequence_ids", parts(extend=ex(sequence_ids=[1, 1], slots_needed=[1, 1]))),
    ("extend.sequence_ids", parts(extend=ex(sequence_ids=MANY, slots_needed=MANY))),
    ("admit.num_tokens", parts(admit=ad(sequence_ids=[2]))),
    ("admit.num_tokens", parts(admit=ad(sequence_ids=[2], num_tokens=[0]))),
    ("admit.num_tokens", parts(admit=ad(sequence_ids=[2], num_tokens=[-(2**31)]))),
    ("admit.token_budget", parts(admit=ad(token_budget=-1))),
    ("admit.hashes", parts(admit=ad(sequence_ids=[2], num_tokens=[40], num_hashes=[1], hashes=b"x" * 31))),
    ("admit.hashes", parts(admit=ad(sequence_ids=[2], num_tokens=[40], hashes=b"x" * 32))),
    ("admit.sequence_ids", parts(admit=ad(sequence_ids=MANY, num_tokens=MANY))),
    ("admit.watermark_blocks", parts(admit=ad(sequence_ids=[2], num_tokens=[4], watermark_blocks=[-1]))),
    ("free.sequence_ids", parts(free=block_pb2.FreeItems(sequence_ids=[3, 3]))),
    ("free.publish_tokens", parts(free=block_pb2.FreeItems(sequence_ids=[3], publish_tokens=[-1]))),
    ("lookup.num_hashes", parts(lookup=block_pb2.LookupItems(num_tokens=[4]))),
    ("lookup.num_tokens", parts(lookup=block_pb2.LookupItems(num_tokens=[0], num_hashes=[0]))),
    ("invalidate.block_ids", parts(invalidate=block_pb2.InvalidateItems(block_ids=[0]))),
    ("invalidate.block_ids", parts(invalidate=block_pb2.InvalidateItems(block_ids=[100]))),
    ("invalidate.block_ids", parts(invalidate=block_pb2.InvalidateItems(block_ids=[2**31 - 1]))),
]  # fmt: skip


@pytest.mark.parametrize(("field", "request_parts"), BAD_STEPS)
async def test_bad_steps(
    daemon: RunningDaemon, session: ClientSession, field: str, request_parts: dict[str, Any]
) -> None:
    pool = daemon.node.pools["p"].pool  # type: ignore[index]
    before = pool.counts(), pool.describe()
    refusal = await refused(session.step(**request_parts))
    assert refusal.code == INVALID and refusal.reason in ("INVALID_FIELD", "TOO_MANY_ITEMS")
    assert refusal.metadata["field"] == field
    assert any(bound in refusal.message for bound in ("must", "at most")), refusal.message
    assert (pool.counts(), pool.describe()) == before
    assert (await session.step()).replayed is False


async def test_stale_epoch_and_unknown_session(daemon: RunningDaemon, session: ClientSession) -> None:
    token = session.opened.resume_token
    await daemon.sessions.OpenSession(session_pb2.OpenSessionRequest(pool="p", resume_token=token))
    refusal = await refused(session.step())
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_FENCED")
    assert (refusal.metadata["epoch"], refusal.metadata["current_epoch"]) == ("1", "2")
    refusal = await refused(daemon.blocks.Step(block_pb2.StepRequest(session_id="guess", epoch=1, step=1)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_SESSION")
    assert token not in str(refusal.metadata)


async def test_unknown_pool(daemon: RunningDaemon) -> None:
    lookup = block_pb2.LookupItems(num_tokens=[4], num_hashes=[0])
    for call in (
        daemon.pools.GetPool(pool_pb2.GetPoolRequest(name="x")),
        daemon.pools.ExportMemory(pool_pb2.ExportMemoryRequest(pool="x")),
        daemon.sessions.OpenSession(session_pb2.OpenSessionRequest(pool="x")),
        daemon.sessions.ListSessions(session_pb2.ListSessionsRequest(pool="x")),
        daemon.blocks.Lookup(block_pb2.LookupRequest(pool="x", lookup=lookup)),
    ):
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "POOL_NOT_FOUND")
        assert refusal.metadata == {"pool": "x"}


@pytest.mark.parametrize("name", ["", "a/b", "..\n", "ä", "x" * 129, "a b"])
async def test_pool_names(daemon: RunningDaemon, name: str) -> None:
    refusal = await refused(daemon.open_pool(name))
    assert (refusal.code, refusal.metadata["field"]) == (INVALID, "name") and "1..128" in refusal.message


BAD_POOLS: list[tuple[str, pool_pb2.OpenPoolRequest]] = [
    ("options.hash_size_bytes", pool_pb2.OpenPoolRequest(options=opts(hash_size_bytes=65))),
    ("options.hash_size_bytes", pool_pb2.OpenPoolRequest(options=opts(hash_size_bytes=-1))),
    ("options.hash_size_bytes", pool_pb2.OpenPoolRequest(
        options=opts(hash_size_bytes=16), content=pool_pb2.ContentIdentity(hash_algorithm="sha256"))),
    ("options.num_reserved_low_blocks", pool_pb2.OpenPoolRequest(options=opts(num_reserved_low_blocks=-1))),
    ("num_reserved_low_blocks", pool_pb2.OpenPoolRequest(options=opts(num_reserved_low_blocks=100_000))),
    ("options.eagle_group_ids", pool_pb2.OpenPoolRequest(options=opts(eagle_group_ids=[3]))),
    ("options.rank_device_indexes", pool_pb2.OpenPoolRequest(options=opts(rank_device_indexes=[0, 1]))),
    ("byte_format.tensor_parallel_size", pool_pb2.OpenPoolRequest(byte_format=byte_format(tensor_parallel_size=-1))),
    ("byte_format.extras", pool_pb2.OpenPoolRequest(byte_format=byte_format(extras=["a"] * 65))),
    ("content.model", pool_pb2.OpenPoolRequest(content=pool_pb2.ContentIdentity(model="m" * 600))),
]  # fmt: skip


@pytest.mark.parametrize(("field", "request_"), BAD_POOLS)
async def test_bad_pools(daemon: RunningDaemon, field: str, request_: pool_pb2.OpenPoolRequest) -> None:
    request_.name = "p"
    request_.plan.CopyFrom(llama())
    request_.options.enable_prefix_caching = True
    refusal = await refused(daemon.pools.OpenPool(request_))
    assert (refusal.code, refusal.metadata["field"]) == (INVALID, field)
    assert not daemon.node.pools and not daemon.daemon.backends["fake"].usage().holdings
    request = pool_pb2.OpenPoolRequest(name="p", plan=llama())
    assert (await daemon.pools.OpenPool(request)).pool.name == "p", "the name was not left taken"


async def test_memory_wait_is_bounded(daemon: RunningDaemon) -> None:
    request = pool_pb2.OpenPoolRequest(name="p", plan=llama())
    request.memory_wait.seconds = 601
    refusal = await refused(daemon.pools.OpenPool(request))
    assert (refusal.code, refusal.metadata["field"]) == (INVALID, "memory_wait") and "0..600" in refusal.message


async def test_plan_requests(daemon: RunningDaemon) -> None:
    unknown_kind = llama()
    unknown_kind.layer_specs[0].ClearField("kind")
    zero_block = llama()
    zero_block.layer_specs[0].block_size_tokens = 0
    negative = llama()
    negative.layer_specs[0].geometry.num_kv_heads = -8
    for request in (unknown_kind, zero_block, negative):
        for call in (
            daemon.plans.Plan(request),
            daemon.pools.OpenPool(pool_pb2.OpenPoolRequest(name="p", plan=request)),
        ):
            refusal = await refused(call)
            assert refusal.code == INVALID and "layer_specs[0]" in refusal.metadata["field"], refusal.message
    assert not daemon.node.pools


async def test_too_many_layers_are_refused_by_count(short_dir: Path) -> None:
    """A request for 10⁹ layers does not fit any message; what fits is bounded."""
    from kvhold_server.domain.service_limits import ServiceLimits

    async with running(short_dir, limits=ServiceLimits(max_layers=10)) as daemon:
        refusal = await refused(daemon.plans.Plan(llama(num_layers=11)))
        assert refusal.code == INVALID and "10" in refusal.message


async def test_oversize_and_malformed_messages_are_typed(short_dir: Path) -> None:
    from kvhold_server.domain.service_limits import ServiceLimits

    async with running(short_dir, limits=ServiceLimits(max_message_bytes=10_000)) as daemon:
        big = block_pb2.StepRequest(admit=block_pb2.AdmitItems(hashes=b"x" * 10_001))
        refusal = await refused(daemon.blocks.Step(big))
        assert (refusal.code, refusal.reason) == (INVALID, "MESSAGE_TOO_LARGE")
        assert refusal.metadata["max_message_bytes"] == "10000"
        huge = block_pb2.StepRequest(admit=block_pb2.AdmitItems(hashes=b"x" * 30_000))
        assert (await refused(daemon.blocks.Step(huge))).code == grpc.StatusCode.RESOURCE_EXHAUSTED
        raw = daemon.channel.unary_unary("/kvhold.v1.BlockService/Step")
        refusal = await refused(raw(b"\xff\xff\xff"))
        assert (refusal.code, refusal.reason) == (INVALID, "MALFORMED_MESSAGE")
        capabilities = await daemon.plans.GetCapabilities(plan_pb2.GetCapabilitiesRequest())
        assert {bound.name: bound.max_value for bound in capabilities.bounds}["message_bytes"] == 10_000


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("client_name", {"client_name": "n" * 129}),
        ("tenant", {"tenant": "t" * 65}),
        ("request_id", {"request_id": "r" * 65}),
        ("pid", {"pid": -1}),
    ],
)
async def test_bad_session_requests(daemon: RunningDaemon, field: str, fields: dict[str, Any]) -> None:
    await daemon.open_pool()
    refusal = await refused(daemon.open_session(**fields))
    assert (refusal.code, refusal.metadata["field"]) == (INVALID, field)
    assert not daemon.node.sessions.sessions()


async def test_counts_beyond_int32_do_not_travel(session: ClientSession) -> None:
    with pytest.raises(ValueError, match="out of range"):
        block_pb2.AdmitItems(num_tokens=[2**31])
    answer = await session.admit(2, 2**31 - 1, skip_lookup=[True])
    assert list(answer.admit.statuses) == [block_pb2.ITEM_STATUS_NEVER_FITS]
    assert digest(1) and "pool has 99" in answer.problems[0].message
