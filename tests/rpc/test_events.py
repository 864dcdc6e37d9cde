"""EventService: a reader that applies everything in order holds the daemon's index, and is never silently behind."""

from pathlib import Path
from typing import Any

import grpc

from kvhold.v1 import admin_pb2, block_pb2, pool_pb2
from kvhold.v1 import event_pb2 as pb
from kvhold_server.domain.service_limits import ServiceLimits
from tests.rpc.harness import ClientSession, RunningDaemon, digest, refused, running


class Reader:
    """Follows one pool and keeps what it is told."""

    def __init__(self, daemon: RunningDaemon, **fields: Any) -> None:
        fields.setdefault("pool", "p")
        fields.setdefault("heartbeat_interval_ms", 100)
        self._stream = daemon.events.WatchEvents(pb.WatchEventsRequest(**fields))
        self.index: set[tuple[int, bytes]] = set()
        self.cursor = pb.EventCursor()
        self.num_snapshots = self.num_lost = 0
        self.events: list[pb.CacheEvent] = []

    async def read(self) -> pb.WatchEventsResponse:
        message = await self._stream.read()
        assert message is not grpc.aio.EOF
        self.num_lost += message.lost
        if message.HasField("snapshot"):
            if message.snapshot.begins:
                self.num_snapshots += 1
                self.index.clear()
            for stored in message.snapshot.stored:
                self._store(stored)
        expected = self.cursor.sequence
        for event in message.events:
            assert event.sequence == expected + 1, "no gaps"
            expected = event.sequence
            self.events.append(event)
            if event.HasField("stored"):
                self._store(event.stored)
            elif event.HasField("removed"):
                for block_hash in event.removed.block_hashes:
                    self.index.remove((event.removed.group_id, block_hash))
            else:
                self.index.clear()
        self.cursor = message.cursor
        return message

    async def until_idle(self) -> None:
        """Until a heartbeat says that there is nothing more."""
        while True:
            message = await self.read()
            if not message.events and not message.HasField("snapshot"):
                return

    def cancel(self) -> None:
        self._stream.cancel()

    def _store(self, stored: pb.BlocksStored) -> None:
        assert len(stored.block_hashes) == len(stored.block_indexes) == len(stored.block_ids)
        self.index |= {(stored.group_id, block_hash) for block_hash in stored.block_hashes}


def keys(*numbers: int) -> set[tuple[int, bytes]]:
    return {(0, digest(number)) for number in numbers}


async def started(daemon: RunningDaemon, **options: Any) -> ClientSession:
    await daemon.open_pool(**options)
    session = await daemon.open_session()
    await session.keep_alive()
    return session


async def test_only_completed_blocks_are_told_in_the_order_of_the_prompt(daemon: RunningDaemon) -> None:
    session = await started(daemon)
    reader = Reader(daemon)
    assert (await reader.read()).snapshot.ends
    await session.admit(1, 49, 1, 2, 3)
    await reader.until_idle()
    assert reader.index == set()
    await session.step()
    await reader.until_idle()
    stored = reader.events[0].stored
    assert list(stored.block_hashes) == [digest(1), digest(2), digest(3)] and list(stored.block_indexes) == [0, 1, 2]
    assert (stored.parent_block_hash, stored.parent_unknown, stored.block_size_tokens) == (b"", False, 16)
    extend = block_pb2.ExtendItems(
        sequence_ids=[1], slots_needed=[65], publish_tokens=[64], num_hashes=[1], hashes=digest(4)
    )
    await session.step(extend=extend)
    await session.step()
    await reader.until_idle()
    assert reader.events[1].stored.parent_block_hash == digest(3)
    reader.cancel()


async def test_removed_is_told_when_the_last_copy_is_gone(daemon: RunningDaemon) -> None:
    session = await started(daemon, num_blocks=10)
    reader = Reader(daemon)
    await reader.read()
    for sequence in (1, 2):
        await session.step(
            admit=block_pb2.AdmitItems(
                sequence_ids=[sequence], num_tokens=[32], num_hashes=[2], hashes=digest(1, 2), skip_lookup=[True]
            )
        )
    await session.step()
    await reader.until_idle()
    assert [len(event.stored.block_hashes) for event in reader.events] == [2]
    await session.step(invalidate=block_pb2.InvalidateItems(block_ids=[1, 2]))
    await reader.until_idle()
    assert reader.index == keys(1, 2), "the second copies are still there"
    await session.step(invalidate=block_pb2.InvalidateItems(block_ids=[4]))
    await reader.until_idle()
    assert reader.index == keys(1) and list(reader.events[-1].removed.block_hashes) == [digest(2)]
    reader.cancel()


async def test_a_late_reader_gets_a_snapshot_and_a_returning_one_its_events(daemon: RunningDaemon) -> None:
    session = await started(daemon)
    await session.admit(1, 33, 1, 2)
    await session.step()
    first = Reader(daemon)
    await first.until_idle()
    assert first.index == keys(1, 2) and first.num_snapshots == 1
    first.cancel()
    await session.admit(2, 33, 5, 6)
    await session.close()
    again = Reader(daemon, after=first.cursor)
    again.index, again.cursor = first.index, first.cursor
    await again.until_idle()
    assert again.num_snapshots == 0 and again.index == keys(1, 2, 5, 6), "closing in order completes what was published"
    again.cancel()
    stranger = Reader(daemon, after=pb.EventCursor(boot_id="before", sequence=1))
    await stranger.until_idle()
    assert (stranger.num_snapshots, stranger.num_lost) == (1, 0) and stranger.index == again.index
    stranger.cancel()


async def test_a_reader_that_fell_out_of_the_ring_is_told_and_starts_over(short_dir: Path) -> None:
    async with running(short_dir, limits=ServiceLimits(max_event_buffer=4)) as daemon:
        session = await started(daemon)
        reader = Reader(daemon)
        await reader.until_idle()
        reader.cancel()
        for sequence in range(10):
            await session.admit(sequence, 17, sequence)
        await session.step()
        again = Reader(daemon, after=reader.cursor)
        await again.until_idle()
        assert (again.num_snapshots, again.num_lost) == (1, 1) and again.index == keys(*range(10))
        again.cancel()


async def test_reset_and_deletion_are_told(daemon: RunningDaemon) -> None:
    session = await started(daemon)
    await session.admit(1, 33, 1, 2)
    await session.step()
    reader = Reader(daemon)
    await reader.until_idle()
    await daemon.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(pool="p", force=True))
    await reader.until_idle()
    assert reader.index == set() and reader.events[-1].cleared.reason == "RESET"
    await daemon.pools.DeletePool(pool_pb2.DeletePoolRequest(name="p", force=True))
    assert (await reader.read()).events[0].cleared.reason == "POOL_DELETED"


async def test_a_step_that_names_itself_as_complete_is_told_at_once(daemon: RunningDaemon) -> None:
    session = await started(daemon)
    reader = Reader(daemon)
    await reader.read()
    admit = block_pb2.AdmitItems(sequence_ids=[1], num_tokens=[33], num_hashes=[2], hashes=digest(1, 2))
    await session.step(admit=admit, step=1, completed_step=1)
    await reader.until_idle()
    assert reader.index == keys(1, 2)
    # Hashes dropped and given in one step: it drops first.
    again = block_pb2.AdmitItems(sequence_ids=[2], num_tokens=[49], num_hashes=[3], hashes=digest(1, 3, 4))
    invalidate = block_pb2.InvalidateItems(block_ids=[1])
    await session.step(invalidate=invalidate, admit=again, step=2, completed_step=2)
    await reader.until_idle()
    assert reader.index == keys(1, 2, 3, 4)
    other = await daemon.open_session()
    lookup = block_pb2.LookupItems(num_tokens=[49], num_hashes=[3], hashes=digest(1, 3, 4))
    assert list((await other.step(lookup=lookup)).lookup.hit_tokens) == [48], "and others hit it"
    reader.cancel()


async def test_a_cursor_of_a_deleted_pool_is_not_taken_for_the_new_one_of_its_name(daemon: RunningDaemon) -> None:
    session = await started(daemon)
    reader = Reader(daemon)
    await reader.read()
    await session.admit(1, 33, 1, 2)
    await session.step()
    await reader.until_idle()
    reader.cancel()
    await daemon.pools.DeletePool(pool_pb2.DeletePoolRequest(name="p", force=True))
    session = await started(daemon)
    witness = Reader(daemon)
    await witness.read()
    for sequence in range(1, 4):
        await session.admit(sequence, 17, 10 + sequence)
        await session.step()
    again = Reader(daemon, after=reader.cursor)
    again.index, again.cursor = reader.index, reader.cursor
    await again.until_idle()
    assert (again.num_snapshots, again.num_lost) == (1, 1) and again.index == keys(11, 12, 13)
    again.cancel()
    witness.cancel()


async def test_provisional_blocks_of_a_dead_session_are_never_told(deadly_daemon: RunningDaemon) -> None:
    daemon = deadly_daemon
    session = await started(daemon)
    reader = Reader(daemon)
    await reader.read()
    await session.admit(1, 33, 1, 2)
    session.break_stream()
    await daemon.until(lambda: not daemon.node.sessions.sessions())
    await reader.until_idle()
    assert not reader.events
    reader.cancel()


async def test_events_carry_tokens_where_the_pool_was_opened_so(daemon: RunningDaemon) -> None:
    """R9: token ids of exactly the blocks reported, extra keys, adapter and label."""
    session = await started(daemon, events_carry_tokens=True)
    reader = Reader(daemon)
    await reader.read()
    about = block_pb2.SequenceMetadata(
        token_ids=range(40), lora_id=3, lora_name="poet", extra_keys=[b"", b"\x81\x01"], session_label="chat"
    )
    admit = block_pb2.AdmitItems(
        sequence_ids=[1], num_tokens=[40], num_hashes=[2], hashes=digest(1, 2), metadata=[about]
    )
    await session.step(admit=admit)
    more = block_pb2.SequenceMetadata(token_ids=range(40, 49), extra_keys=[b"\x81\x02"])
    extend = block_pb2.ExtendItems(
        sequence_ids=[1], slots_needed=[49], publish_tokens=[48], num_hashes=[1], hashes=digest(3), metadata=[more]
    )
    await session.step(extend=extend)
    await session.step()
    await reader.until_idle()
    first, second = (event.stored for event in reader.events)
    assert list(first.token_ids) == list(range(32)) and list(first.extra_keys) == [b"", b"\x81\x01"]
    assert (first.lora_id, first.lora_name, first.session_label) == (3, "poet", "chat")
    assert list(second.token_ids) == list(range(32, 48)) and list(second.extra_keys) == [b"\x81\x02"]
    annotations = daemon.node.pools["p"].annotations  # type: ignore[index]
    assert len(annotations) == 1
    await session.free(1)
    assert len(annotations) == 0
    wrong = block_pb2.AdmitItems(sequence_ids=[2], num_tokens=[4], metadata=[about, about])
    assert (await refused(session.step(admit=wrong))).metadata["field"] == "admit.metadata"
    reader.cancel()


async def test_bounds(short_dir: Path) -> None:
    async with running(short_dir, limits=ServiceLimits(max_watchers=1)) as daemon:
        await started(daemon)
        refusal = await refused(
            daemon.events.WatchEvents(pb.WatchEventsRequest(pool="p", heartbeat_interval_ms=99)).read()
        )
        assert refusal.metadata["field"] == "heartbeat_interval_ms"
        reader = Reader(daemon)
        await reader.read()
        refusal = await refused(daemon.events.WatchEvents(pb.WatchEventsRequest(pool="p")).read())
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS")
        reader.cancel()
        await daemon.until(lambda: not daemon.node.pools["p"].events.watchers)  # type: ignore[index]
        Reader(daemon)
        assert (
            await refused(daemon.events.WatchEvents(pb.WatchEventsRequest(pool="x")).read())
        ).reason == "POOL_NOT_FOUND"
