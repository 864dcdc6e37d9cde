"""A router that only reads events: two sessions work at random, it restarts twice and lags once, and ends up exact."""

import asyncio
import random
from pathlib import Path

import grpc

from kvhold.v1 import admin_pb2, block_pb2, pool_pb2
from kvhold_server.domain.service_limits import ServiceLimits
from tests.rpc.harness import BLOCK_TOKENS, ClientSession, RunningDaemon, digest, running
from tests.rpc.test_events import Reader

EVENT_BUFFER = 200
NUM_BLOCKS = 120
LAG_EVENTS = 5 * EVENT_BUFFER  # some 250 bytes each: more than what SMALL_WINDOW holds for a reader that does not read
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]


class Scheduler:
    """Random steps of one session: prompts that share prefixes, growth, frees, dropped hashes, late completion."""

    def __init__(self, session: ClientSession, number: int, seed: int) -> None:
        self.session = session
        self.random = random.Random(seed)
        self.next_id = number * 1_000_000
        self.running: dict[int, tuple[int, int]] = {}  # sequence → family, blocks

    def hashes(self, family: int, begin: int, end: int) -> bytes:
        return digest(*(family * 1000 + i for i in range(begin, end)))

    async def act(self) -> None:
        rng = self.random
        parts: dict[str, object] = {}
        done = [sequence for sequence in self.running if rng.random() < 0.3 or len(self.running) > 6]
        if done:
            parts["free"] = block_pb2.FreeItems(sequence_ids=done)
            for sequence in done:
                del self.running[sequence]
        if self.running and rng.random() < 0.5:
            parts["extend"] = self.extend(rng.choice(list(self.running)))
        if rng.random() < 0.8:
            parts["admit"] = self.admit()
        if rng.random() < 0.05:
            blocks = rng.sample(range(1, NUM_BLOCKS), 3)
            parts["invalidate"] = block_pb2.InvalidateItems(block_ids=blocks)
        step = self.session.next_step
        parts["completed_step"] = max(0, step - rng.choice((1, 1, 2)), self.completed)
        self.completed = int(parts["completed_step"])  # type: ignore[call-overload]
        answer = await self.session.step(**parts)
        self.learn(answer, parts.get("extend"))

    completed = 0

    def extend(self, sequence: int) -> block_pb2.ExtendItems:
        family, num = self.running[sequence]
        tokens = (num + 1) * BLOCK_TOKENS
        return block_pb2.ExtendItems(
            sequence_ids=[sequence],
            slots_needed=[tokens + 1],
            processed_tokens=[tokens - BLOCK_TOKENS],
            publish_tokens=[tokens],
            num_hashes=[1],
            hashes=self.hashes(family, num, num + 1),
        )

    def admit(self) -> block_pb2.AdmitItems:
        self.next_id += 1
        family, num = self.random.randrange(12), self.random.randint(1, 12)
        self.offered = (self.next_id, family, num)
        return block_pb2.AdmitItems(
            sequence_ids=[self.next_id],
            num_tokens=[num * BLOCK_TOKENS + 1],
            num_hashes=[num],
            hashes=self.hashes(family, 0, num),
            skip_lookup=[self.random.random() < 0.2],
        )

    def learn(self, answer: block_pb2.StepResponse, extended: object) -> None:
        if isinstance(extended, block_pb2.ExtendItems) and answer.extend.statuses[0] == block_pb2.ITEM_STATUS_OK:
            family, num = self.running[extended.sequence_ids[0]]
            self.running[extended.sequence_ids[0]] = (family, num + 1)
        if answer.admit.statuses and answer.admit.statuses[0] == block_pb2.ITEM_STATUS_OK:
            sequence, family, num = self.offered
            self.running[sequence] = (family, num)


async def open_hybrid(daemon: RunningDaemon) -> None:
    overrides = pool_pb2.PoolOverrides(num_blocks=NUM_BLOCKS, max_model_len_tokens=65536)
    overrides.groups.add(kind="full", block_size_tokens=BLOCK_TOKENS)
    overrides.groups.add(kind="sliding_window", block_size_tokens=BLOCK_TOKENS, sliding_window_tokens=32)
    options = pool_pb2.PoolOptions(enable_prefix_caching=True, overrides=overrides)
    await daemon.pools.OpenPool(pool_pb2.OpenPoolRequest(name="p", options=options))


async def described(daemon: RunningDaemon) -> set[tuple[int, bytes]]:
    request = admin_pb2.DescribeBlocksRequest(pool="p", include_index=True, omit_blocks=True)
    dump = await daemon.admin.DescribeBlocks(request)
    return {(entry.group_id, entry.block_hash) for entry in dump.index}


async def test_a_consumer_that_restarts_twice_and_lags_once_ends_with_the_daemons_index(short_dir: Path) -> None:
    async with running(short_dir, limits=ServiceLimits(max_event_buffer=EVENT_BUFFER)) as daemon:
        await open_hybrid(daemon)
        schedulers = []
        for number in (1, 2):
            session = await daemon.open_session()
            await session.keep_alive()
            schedulers.append(Scheduler(session, number, seed=number))
        log = daemon.node.pools["p"].events  # type: ignore[index]

        async def work(num_rounds: int) -> None:
            for _ in range(num_rounds):
                for scheduler in schedulers:
                    await scheduler.act()

        await work(20)
        consumer = Reader(daemon)
        follow = asyncio.create_task(consumer.until_idle())
        await work(60)
        await follow
        consumer.cancel()

        # First restart: it kept its index and its cursor, and misses nothing.
        await work(5)
        second = Reader(daemon, after=consumer.cursor)
        second.index, second.cursor = consumer.index, consumer.cursor
        await second.until_idle()
        assert (second.num_snapshots, second.num_lost) == (0, 0) and second.events
        second.cancel()

        # Second restart: it lost everything.
        await work(20)
        async with grpc.aio.insecure_channel(f"unix:{daemon.daemon.config.socket}", options=SMALL_WINDOW) as channel:
            third = Reader(RunningDaemon(daemon.daemon, channel))
            await third.until_idle()
            assert (third.num_snapshots, third.num_lost) == (1, 0)

            # It lags: the daemon goes on while nobody reads, until the ring has turned several times.
            behind = log.last_number
            while log.last_number - behind < LAG_EVENTS:
                await work(10)
            for scheduler in schedulers:
                await scheduler.session.step(completed_step=scheduler.session.next_step)
            while third.cursor.sequence < log.last_number:
                await third.read()
            assert third.num_lost >= 1 and third.num_snapshots == 1 + third.num_lost, "it is told, and starts over"
            assert third.index == await described(daemon) and len(third.index) > 50
            third.cancel()
        daemon.check()
