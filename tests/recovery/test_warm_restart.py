"""A daemon that restarts on its directory: what it keeps, what it says about it, and how sessions come back."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvhold.v1 import block_pb2, pool_pb2, session_pb2
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.block_table import RECORDS_OFFSET, record_size_bytes
from kvhold_server.memory.segment_names import instance_digest
from tests.rpc.harness import ClientSession, RunningDaemon, digest, llama, refused, running

CONTENT = pool_pb2.ContentIdentity(model="m", weight_version="1")


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for a socket's path."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    for left in segments(path):
        left.unlink()
    shutil.rmtree(path, ignore_errors=True)


def segments(directory: Path) -> list[Path]:
    """Memory of the daemons of one directory; others may be running beside this test."""
    found = Path("/dev/shm").glob(f"kvhold.{instance_digest(directory)}.*")
    return sorted(path for path in found if path.suffix != ".lock")


def posix(directory: Path, **settings: Any) -> Any:
    return running(directory, **{"backend": "posix_shm", "keep_pools": True, "grace_period_s": 2.0} | settings)


def pool_request(**changes: Any) -> pool_pb2.OpenPoolRequest:
    fields: dict[str, Any] = {
        "name": "p",
        "plan": llama(),
        "content": CONTENT,
        "options": pool_pb2.PoolOptions(enable_prefix_caching=True),
    }
    return pool_pb2.OpenPoolRequest(**fields | changes)


async def fill(daemon: RunningDaemon) -> ClientSession:
    """A session that has completed three blocks of sequence 1, and has two more of sequence 2 under way."""
    session = await daemon.open_session()
    await session.keep_alive()
    await session.admit(1, 48, 1, 2, 3)
    await session.admit(2, 40, 7, 8)
    return session


def hit(daemon: RunningDaemon, *hashes: int) -> Any:
    items = block_pb2.LookupItems(num_tokens=[16 * len(hashes) + 1], num_hashes=[len(hashes)], hashes=digest(*hashes))
    return daemon.blocks.Lookup(block_pb2.LookupRequest(pool="p", lookup=items))


async def hit_tokens(daemon: RunningDaemon, *hashes: int) -> int:
    return (await hit(daemon, *hashes)).lookup.hit_tokens[0]


async def test_completed_blocks_are_hit_after_a_restart_and_others_are_not(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with posix(directory) as daemon:
        opened = await daemon.pools.OpenPool(pool_request())
        assert (opened.outcome, opened.recovery.reason) == (pool_pb2.OPEN_POOL_OUTCOME_FRESH, "NEW_POOL")
        await fill(daemon)
    async with posix(directory) as daemon:
        assert await hit_tokens(daemon, 1, 2, 3) == 48
        assert await hit_tokens(daemon, 7, 8) == 0, "its step was not complete"
        opened = await daemon.pools.OpenPool(pool_request())
        assert opened.outcome == pool_pb2.OPEN_POOL_OUTCOME_RECOVERED
        assert (opened.recovery.num_kept_blocks, opened.recovery.reason) == (3, "")
        assert "pool p is back: 3 blocks kept, 0 dropped" in caplog.text
        again = await daemon.pools.OpenPool(pool_request())
        assert again.outcome == pool_pb2.OPEN_POOL_OUTCOME_ATTACHED
        daemon.check()


async def test_what_was_evicted_is_not_found_after_a_restart(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        await session.free(1, 2)
        for sequence_id in range(3, 60):
            await session.admit(sequence_id, 1000 if sequence_id < 20 else 16, 100 + sequence_id)
    async with posix(directory) as daemon:
        assert await hit_tokens(daemon, 1, 2, 3) == await hit_tokens(daemon, 7, 8) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"plan": llama(num_layers=1)}, "PLAN_MISMATCH"),
        ({"byte_format": pool_pb2.ByteFormat(engine="other")}, "BYTE_FORMAT_MISMATCH"),
        ({"content": pool_pb2.ContentIdentity(model="m", weight_version="2")}, "CONTENT_MISMATCH"),
        ({"options": pool_pb2.PoolOptions(enable_prefix_caching=True, num_reserved_low_blocks=3)}, "PLAN_MISMATCH"),
    ],
)
async def test_another_identity_starts_fresh_and_says_which_differs(
    directory: Path, changes: dict[str, Any], reason: str
) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        await session.step()
        await session.free(1, 2)
        await session.close()
    async with posix(directory) as daemon:
        opened = await daemon.pools.OpenPool(pool_request(**changes))
        assert (opened.outcome, opened.recovery.reason) == (pool_pb2.OPEN_POOL_OUTCOME_FRESH, reason)
        assert opened.recovery.detail
        assert await hit_tokens(daemon, 1, 2, 3) == 0
    async with posix(directory) as daemon:
        opened = await daemon.pools.OpenPool(pool_request(**changes))
        assert opened.outcome == pool_pb2.OPEN_POOL_OUTCOME_RECOVERED, "the new one is kept now"


async def test_a_session_comes_back_with_what_it_holds(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        tables = daemon.node.pools["p"].pool
        slot = daemon.node.sessions.sessions()[0].slot
        first, second = tables.tables(slot, 1)[0], tables.tables(slot, 2)[0]
    async with posix(directory) as daemon:
        with_boot_id = block_pb2.StepRequest(**session.head, step=3, boot_id="former")
        assert (await refused(daemon.blocks.Step(with_boot_id))).reason == "BOOT_ID_MISMATCH"
        assert (await refused(daemon.blocks.Step(block_pb2.StepRequest(**session.head, step=3)))).reason == (
            "BOOT_ID_MISMATCH"
        ), "also a client that does not look at boot ids"
        held = [
            session_pb2.HeldSequence(
                sequence_id=1, num_tokens=48, publish_tokens=48, num_blocks=[3], block_ids=first, hashes=digest(1, 2, 3)
            ),
            session_pb2.HeldSequence(
                sequence_id=2, num_tokens=40, num_blocks=[3], block_ids=second, hashes=digest(7, 8)
            ),
            session_pb2.HeldSequence(
                sequence_id=3, num_tokens=16, num_blocks=[1], block_ids=[first[0]], hashes=digest(9)
            ),
        ]
        request = session_pb2.OpenSessionRequest(pool="p", resume_token=session.opened.resume_token, held=held)
        resumed = await daemon.sessions.OpenSession(request)
        assert resumed.outcome == session_pb2.OPEN_SESSION_OUTCOME_REASSERTED
        assert list(resumed.lost_sequence_ids) == [3]
        assert resumed.epoch == session.opened.epoch + 1 and resumed.session_id == session.opened.session_id
        daemon.check()
        counts = daemon.node.pools["p"].pool.counts()
        assert (counts.held, counts.sequences) == (6, 2)
        again = await daemon.sessions.OpenSession(request)
        assert again.outcome == session_pb2.OPEN_SESSION_OUTCOME_REASSERTED
        assert list(again.lost_sequence_ids) == [3], "the first answer may have been lost: it is told again"
        assert daemon.node.pools["p"].pool.counts() == counts
        resumed_session = ClientSession(daemon, again)
        resumed_session.next_step = session.next_step
        answer = await resumed_session.step(
            extend=block_pb2.ExtendItems(sequence_ids=[2], slots_needed=[60], publish_tokens=[32])
        )
        assert answer.extend.statuses == [block_pb2.ITEM_STATUS_OK] and len(answer.extend.block_ids) == 1
        assert answer.extend.block_ids[0] not in {*first, *second}
        await resumed_session.step()
        assert await hit_tokens(daemon, 7, 8) == 32
        later = session_pb2.OpenSessionRequest(pool="p", resume_token=again.resume_token, held=held)
        assert (await daemon.sessions.OpenSession(later)).outcome == session_pb2.OPEN_SESSION_OUTCOME_RESUMED
        daemon.check()


@pytest.mark.parametrize("character", ["x", '"', "\U0001f600"])
async def test_the_longest_names_fit_into_a_sessions_record(directory: Path, character: str) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request(name="p" * 128))
        await daemon.sessions.OpenSession(
            session_pb2.OpenSessionRequest(pool="p" * 128, client_name=character * 128, tenant=character * 64)
        )
    async with posix(directory) as daemon:
        (session,) = daemon.node.sessions.sessions()
        assert session.request.tenant == character * 64


async def test_sessions_of_before_are_waited_for_although_fewer_are_allowed_by_now(directory: Path) -> None:
    """A session that is not remembered holds nothing: its blocks would be given to others while it writes to them."""
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        sessions = [await daemon.open_session() for _ in range(3)]
        limits = daemon.daemon.config.limits
    async with posix(directory, limits=replace(limits, max_sessions=1)) as daemon:
        known = {session.session_id for session in daemon.node.sessions.unasserted(PoolName("p"))}
        assert known == {session.opened.session_id for session in sessions}
        refusal = await refused(daemon.sessions.OpenSession(session_pb2.OpenSessionRequest(pool="p")))
        assert refusal.reason == "TOO_MANY_SESSIONS"


async def test_control_characters_in_names_are_refused_and_nothing_is_left(directory: Path) -> None:
    """Else the record of such a session would not fit, neither when it opens nor when it expires."""
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        for name in ("client_name", "tenant"):
            with pytest.raises(grpc.aio.AioRpcError, match=f"{name}: .*control characters"):
                await daemon.sessions.OpenSession(session_pb2.OpenSessionRequest(pool="p", **{name: "\x01" * 64}))
        assert daemon.node.sessions.num_open() == 0


async def test_nothing_is_handed_out_until_every_former_session_has_come_back_or_is_given_up(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        await fill(daemon)  # never comes back
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        started = asyncio.get_running_loop().time()
        newcomer = await daemon.open_session()
        await newcomer.keep_alive()
        assert await hit_tokens(daemon, 1, 2, 3) == 48, "what is recorded is served meanwhile"
        await newcomer.step()  # says nothing that needs a block: not held back
        assert asyncio.get_running_loop().time() - started < 1.0
        answer = await newcomer.admit(1, 100, 21)
        waited = asyncio.get_running_loop().time() - started
        assert answer.admit.statuses == [block_pb2.ITEM_STATUS_OK]
        assert 1.9 < waited < 4.0, "grace is 2 s"
        daemon.check()


async def test_a_content_update_fences_what_was_recorded_before(directory: Path) -> None:
    new = pool_pb2.ContentIdentity(model="m", weight_version="2")
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        await daemon.pools.UpdateContent(pool_pb2.UpdateContentRequest(pool="p", expected_generation=1, content=new))
        await session.close()
    async with posix(directory) as daemon:
        assert await hit_tokens(daemon, 1, 2, 3) == 0
        opened = await daemon.pools.OpenPool(pool_request(content=new))
        assert opened.outcome == pool_pb2.OPEN_POOL_OUTCOME_RECOVERED
        assert (opened.recovery.num_kept_blocks, opened.pool.content_generation) == (0, 2)


async def test_torn_records_and_missing_files_are_told(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        await session.close()
    table = directory / "pools" / "p.blocks"
    data = bytearray(table.read_bytes())
    size = record_size_bytes(32)
    recorded = [b for b in range((len(data) - RECORDS_OFFSET) // size) if any(data[RECORDS_OFFSET + b * size :][:8])]
    data[RECORDS_OFFSET + recorded[0] * size + 30] ^= 1
    table.write_bytes(data)
    async with posix(directory) as daemon:
        opened = await daemon.pools.OpenPool(pool_request())
        assert (opened.recovery.num_kept_blocks, opened.recovery.num_dropped_torn_blocks) == (len(recorded) - 1, 1)
    table.unlink()
    async with posix(directory) as daemon:
        opened = await daemon.pools.OpenPool(pool_request())
        assert (opened.outcome, opened.recovery.reason) == (pool_pb2.OPEN_POOL_OUTCOME_FRESH, "NO_BLOCK_TABLE")
    for region in segments(directory):
        region.unlink()
    async with posix(directory) as daemon:
        opened = await daemon.pools.OpenPool(pool_request())
        assert (opened.outcome, opened.recovery.reason) == (pool_pb2.OPEN_POOL_OUTCOME_FRESH, "REGION_MISSING")


async def test_a_deleted_pool_stays_deleted(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        await daemon.pools.DeletePool(pool_pb2.DeletePoolRequest(name="p"))
        assert list((directory / "pools").iterdir()) == []
    async with posix(directory) as daemon:
        assert (await refused(daemon.pools.GetPool(pool_pb2.GetPoolRequest(name="p")))).reason == "POOL_NOT_FOUND"


async def test_a_daemon_told_not_to_keep_pools_leaves_nothing(directory: Path) -> None:
    async with posix(directory, keep_pools=False) as daemon:
        await daemon.pools.OpenPool(pool_request())
    assert segments(directory) == []
    assert not (directory / "pools").exists()


async def test_bad_claims_are_refused_by_name(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
    async with posix(directory) as daemon:
        for held, field in (
            (session_pb2.HeldSequence(sequence_id=1, num_blocks=[2], block_ids=[1]), "held[0].num_blocks"),
            (session_pb2.HeldSequence(sequence_id=1, hashes=b"short"), "held[0].hashes"),
            (session_pb2.HeldSequence(sequence_id=1, num_tokens=-1), "held[0].num_tokens"),
        ):
            request = session_pb2.OpenSessionRequest(pool="p", resume_token=session.opened.resume_token, held=[held])
            refusal = await refused(daemon.sessions.OpenSession(request))
            assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT and refusal.metadata["field"] == field


async def test_changed_bytes_are_found_on_the_first_hit(directory: Path) -> None:
    options = pool_pb2.PoolOptions(enable_prefix_caching=True, verify_checksums=True)
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request(options=options))
        session = await fill(daemon)
        slot = daemon.node.sessions.sessions()[0].slot
        blocks = daemon.node.pools["p"].pool.tables(slot, 1)[0]
        placement = daemon.node.pools["p"].plan.ranks[0].tensors[0]
        await session.close()
    (region,) = segments(directory)
    with region.open("r+b") as file:
        file.seek(placement.page_offset_bytes(0, blocks[1]) + 5)
        file.write(b"\xff")
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request(options=options))
        newcomer = await daemon.open_session()
        answer = await newcomer.admit(1, 49, 1, 2, 3)
        assert list(answer.admit.hit_tokens) == [16], "the second block's bytes are not what they were"
        assert daemon.node.pools["p"].journal.num_failed_checksums == 1
        found = daemon.node.pools["p"].recovery
        assert (found.num_kept_blocks, found.num_dropped_checksum_blocks) == (4, 1)
        daemon.check()


async def test_an_early_close_keeps_what_it_says_is_complete(directory: Path) -> None:
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await fill(daemon)
        await session.admit(3, 33, 31, 32)
        request = session_pb2.CloseSessionRequest(**session.head, completed_step=2)
        await daemon.sessions.CloseSession(request)
        assert await hit_tokens(daemon, 7, 8) == 32, "step 2 is complete, and so is what it published"
        assert await hit_tokens(daemon, 31, 32) == 0
    async with posix(directory) as daemon:
        assert (await hit_tokens(daemon, 7, 8), await hit_tokens(daemon, 31, 32)) == (32, 0)


async def test_after_a_crash_blocks_are_evicted_in_the_order_in_which_they_came_free(directory: Path) -> None:
    """Published first, used last: the order of publishing would evict the wrong ones."""
    async with posix(directory) as daemon:
        await daemon.pools.OpenPool(pool_request())
        session = await daemon.open_session()
        await session.keep_alive()
        for sequence_id in (1, 2, 3):
            await session.admit(sequence_id, 33, 10 * sequence_id, 10 * sequence_id + 1)
        for sequence_id in (2, 3, 1):
            await session.free(sequence_id)
        live = daemon.node.pools["p"]
        await daemon.until(lambda: not live.pool.store.free.recent)
        wanted = [block for block in live.pool.store.free.order() if live.pool.store.key_of[block] is not None]
        found = live.journal.table.scan()  # what a successor would find, without an orderly end
        assert found.order == wanted and len(wanted) == 6


async def test_what_was_allotted_is_not_found_after_a_restart(directory: Path) -> None:
    """Its client may have overwritten it without a word."""
    async with posix(directory) as daemon:
        opened = await daemon.pools.OpenPool(pool_request())
        num_free = opened.pool.counts.num_available_blocks
        session = await daemon.open_session()
        await session.keep_alive()
        await session.admit(1, 48, 1, 2, 3)
        for num_taken in range(3, num_free, 64):
            num_blocks = min(64, num_free - num_taken)
            filled = await session.admit(num_taken, 16 * num_blocks, skip_lookup=[True])
            assert list(filled.admit.num_blocks) == [num_blocks]
        answer = await session.step(free=block_pb2.FreeItems(sequence_ids=[1]), max_allotted_blocks=2)
        assert len(answer.allotted_block_ids) == 2
        answer = await session.step(max_allotted_blocks=2, completed_step=session.next_step)  # nothing was drawn
        assert len(answer.allotted_block_ids) == 2 and answer.is_only_session
    async with posix(directory) as daemon:
        opened = await daemon.pools.OpenPool(pool_request())
        assert opened.recovery.num_dropped_provisional_blocks == 2
        assert opened.recovery.num_kept_blocks == 1
        assert await hit_tokens(daemon, 1, 2, 3) == 16
