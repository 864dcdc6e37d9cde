"""The recorded block traces through a running daemon's gRPC: the same replay, another driver.

After every operation results, free counts and the digest of free list, references, index and tables (DescribeBlocks)
are compared with the recorded ones, and what WatchEvents told with what the recorded events imply (blocks_events.py).
Three questions that an engine asks its own tables (common prefix, estimate, clipped tables) are answered from the dump.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from kvhold.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    block_pb2,
    block_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.pool_config import GroupKind, PoolConfig
from kvhold_server.pool.values import Event
from tests.conformance.blocks_core import (
    CoreDriver,
    Driver,
    Grant,
    Replay,
    Request,
    Row,
    StepEnd,
    compare,
    label_hash,
    replay_manager,
    rows_in,
)
from tests.conformance.blocks_events import ExpectedChanges, StreamReader
from tests.conformance.report import Outcome

StepCall = Callable[[block_pb2.StepRequest], block_pb2.StepResponse]

POOL = "conformance"
OK = block_pb2.ITEM_STATUS_OK
REFUSALS = (block_pb2.ITEM_STATUS_OUT_OF_BLOCKS, block_pb2.ITEM_STATUS_STATE_NOT_READY, block_pb2.ITEM_STATUS_NO_BUDGET)
HASH_BYTES = 32
FULL_KINDS = (GroupKind.FULL, GroupKind.RSWA)  # of those in the traces
INDIVISIBLE_KINDS = (GroupKind.MAMBA, GroupKind.CROSS_ATTENTION)
# Pool.admit's names where the wire's differ.
WIRE_NAMES = {"budget_overhead": "budget_overhead_tokens", "alignment": "alignment_tokens"}


class ItemFailed(KvholdError):
    """An item has a status of its own."""

    def __init__(self, status: int, problem: str) -> None:
        self.status = status
        self.problem = problem

    def __str__(self) -> str:
        return f"{block_pb2.ItemStatus.Name(self.status)} {self.problem}"  # type: ignore[arg-type]


class WireDriver(Driver):
    """A simulated pool of a daemon and one session in it. The daemon's grace period must outlast the replay."""

    def __init__(self, channel: grpc.Channel, step: StepCall | None = None) -> None:
        """`step`: another way to send steps than a call for each."""
        self._pools = pool_pb2_grpc.PoolServiceStub(channel)
        self._sessions = session_pb2_grpc.SessionServiceStub(channel)
        self._blocks = block_pb2_grpc.BlockServiceStub(channel)
        self._call_step = step or self._blocks.Step
        self._admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.channel = channel
        self._dump: admin_pb2.DescribeBlocksResponse | None = None  # as of the last call that changed anything

    # ------------------------------------------------------------------ verbs
    def open(self, config: PoolConfig) -> None:
        self._pools.DeletePool(pool_pb2.DeletePoolRequest(name=POOL, force=True))
        self._pools.OpenPool(pool_pb2.OpenPoolRequest(name=POOL, options=options_of(config)))
        session = self._sessions.OpenSession(session_pb2.OpenSessionRequest(pool=POOL))
        self._head = {"session_id": session.session_id, "epoch": session.epoch}
        self._config = config
        self._dump = None
        self.stream = StreamReader(self.channel, POOL)
        self._step, self._part, self._completed = 1, 0, 0
        self._end = StepEnd()
        self._copies: list[tuple[int, int, int]] = []  # group, source, target
        self._tables: dict[int, list[list[int]]] = {}

    def close(self) -> None:
        """Takes the pool away, so that nobody waits for its session."""
        self.stream.close()
        self._pools.DeletePool(pool_pb2.DeletePoolRequest(name=POOL, force=True))

    def begin_step(self) -> None:
        self._step += 1
        self._part = 0

    def end_step(self) -> StepEnd:
        end, self._end = self._end, StepEnd()
        end.copies = [[source, target] for _, source, target in sorted(self._copies, key=lambda copy: copy[0])]
        self._copies.clear()
        self._completed = self._step
        self._send()
        self.begin_step()  # what comes between two steps belongs to the next
        return end

    def lookup(self, request: Request) -> tuple[int, list[list[int]], int]:
        hashes = b"".join(map(label_hash, request.labels))
        items = block_pb2.LookupItems(
            num_tokens=[len(request.tokens)],
            num_hashes=[len(request.labels)],
            hashes=hashes,
            include_block_ids=True,
        )
        found = self._send(lookup=items).lookup
        return found.hit_tokens[0], self._cut(found.num_blocks, found.block_ids), found.shared_prefix_boundary_tokens[0]

    def admit(self, request: Request, **item: Any) -> Grant:
        hashes = request.all_hashes()
        preempted_before = item.pop("is_resumed")
        if preempted_before:  # the daemon knows by itself: the sequence was freed as preempted
            assert request.num_preemptions
        columns = {WIRE_NAMES.get(name, name): [value] for name, value in item.items()}
        items = block_pb2.AdmitItems(
            sequence_ids=[request.sequence_id], num_hashes=[len(hashes)], hashes=b"".join(hashes), **columns
        )
        response = self._send(admit=items)
        answer = response.admit
        if answer.statuses[0] in REFUSALS:
            return Grant(None, answer.hit_tokens[0])
        self._check(answer.statuses[0], response)
        tables = self._cut(answer.num_blocks, answer.block_ids)
        self._tables[request.sequence_id] = tables
        copied = set(response.copies.target_block_ids)  # the last hit, if only a part of it was: a block of its own
        loaded = answer.hit_tokens[0] + item["num_external_tokens"]  # blocks to be loaded are no new ones in the traces
        new = []
        for group, table, num_hit in zip(self._config.groups, tables, answer.num_hit_blocks, strict=True):
            known = max(num_hit, -(-loaded // group.block_size_tokens)) if item["num_external_tokens"] else num_hit
            new.append([block for i, block in enumerate(table) if i >= known or block in copied])
        return Grant(new, answer.hit_tokens[0])

    def extend(self, request: Request, **item: Any) -> Grant:
        hashes = request.new_hashes()
        columns = {name: [value] for name, value in item.items()}
        items = block_pb2.ExtendItems(
            sequence_ids=[request.sequence_id], num_hashes=[len(hashes)], hashes=b"".join(hashes), **columns
        )
        response = self._send(extend=items)
        if response.extend.statuses[0] in REFUSALS:
            request.keep(hashes)
            return Grant(None)
        self._check(response.extend.statuses[0], response)
        return Grant(self._cut(response.extend.num_new_blocks, response.extend.block_ids))

    def publish(self, request: Request, tokens: int) -> None:
        hashes = request.new_hashes()
        self._dump = None
        self._part += 1
        self._blocks.Publish(
            block_pb2.PublishRequest(
                **self._head,
                step=self._step,
                part=self._part,
                completed_step=self._completed,
                sequence_ids=[request.sequence_id],
                publish_tokens=[tokens],
                num_hashes=[len(hashes)],
                hashes=b"".join(hashes),
            )
        )

    def free(self, request: Request) -> None:
        if self._tables.pop(request.sequence_id, None) is not None:
            self._send(free=block_pb2.FreeItems(sequence_ids=[request.sequence_id], preempted=[True]))

    def evict(self, blocks: list[int]) -> None:
        self._dump = None
        self._admin.EvictBlocks(admin_pb2.EvictBlocksRequest(pool=POOL, block_ids=[block for block in blocks if block]))

    def reset(self) -> bool:
        self._dump = None
        try:
            self._admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(pool=POOL))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                return False
            raise
        return True

    # -------------------------------------------------------------- questions
    def statistics(self) -> dict[str, int]:
        stats = self._pools.GetPool(pool_pb2.GetPoolRequest(name=POOL)).pool.prefix_stats
        return {
            "requests": stats.num_requests,
            "queries": stats.query_tokens,
            "hits": stats.hit_own_tokens + stats.hit_shared_tokens,
            "p_requests": stats.num_preempted_requests,
            "p_queries": stats.preempted_query_tokens,
            "p_hits": stats.preempted_hit_tokens,
        }

    def num_free(self) -> int:
        counts = self._described().counts
        return int(counts.num_free_blocks + counts.num_cached_blocks)

    def state(self) -> Row:
        dump = self._described()
        primaries = [(block.block_id, key) for block in dump.blocks for key in block.keys if key.primary]
        return {
            "fq": list(dump.free_order),
            "ref": [block.num_holders for block in dump.blocks[1:]],
            "cache": [(entry.block_hash, entry.group_id, list(entry.block_ids)) for entry in dump.index],
            "tbl": {sequence_id: rows for sequence_id, rows in self._all_tables().items() if any(rows)},
            "pri": [(block, key.block_hash, key.group_id, key.num_tokens) for block, key in primaries],
        }

    def visible_index(self) -> set[tuple[int, bytes]]:
        """(group, hash) of whole blocks that everybody can hit."""
        sizes = [group.block_size_tokens for group in self._config.groups]
        return {
            (key.group_id, key.block_hash)
            for block in self._described().blocks
            for key in block.keys
            if key.primary and not block.provisional and not key.num_tokens % sizes[key.group_id]
        }

    def num_common_prefix_blocks(self, request: Request) -> list[int]:
        dump, tables = self._described(), self._all_tables()
        common = []
        for group, table in zip(self._config.groups, tables[request.sequence_id], strict=True):
            shared = [dump.blocks[block].num_holders == len(tables) for block in table]
            is_full = group.kind in FULL_KINDS and self._config.enable_caching
            common.append([*shared, False].index(False) if is_full else 0)
        return common

    def cached_tokens_estimate(self, request: Request) -> int:
        blocks = self._described().blocks
        reach = [
            max((key.num_tokens for block in table for key in blocks[block].keys if key.primary), default=0)
            for group, table in zip(self._config.groups, self._all_tables()[request.sequence_id], strict=True)
            if group.prefix_cacheable
        ]
        return min(reach, default=0)

    def block_ids_for(self, request: Request, tokens: int) -> list[list[int]]:
        rows = zip(self._config.groups, self._all_tables()[request.sequence_id], strict=True)
        return [
            table if group.kind in INDIVISIBLE_KINDS else table[: -(-tokens // group.block_size_tokens)]
            for group, table in rows
        ]

    def events(self) -> list[Event]:
        raise AssertionError("the stream has other events than the pool")

    # ---------------------------------------------------------------- private
    def _described(self) -> admin_pb2.DescribeBlocksResponse:
        if self._dump is None:
            request = admin_pb2.DescribeBlocksRequest(
                pool=POOL, max_blocks=10_000, include_free_order=True, include_tables=True, include_index=True
            )
            self._dump = self._admin.DescribeBlocks(request)
            assert not self._dump.next_start_block_id, "recorded pools are small"
        return self._dump

    def _all_tables(self) -> dict[int, list[list[int]]]:
        return {table.sequence_id: self._cut(table.num_blocks, table.block_ids) for table in self._described().tables}

    def _send(self, **parts: Any) -> block_pb2.StepResponse:
        self._dump = None
        self._part += 1
        request = block_pb2.StepRequest(
            **self._head, step=self._step, part=self._part, completed_step=self._completed, **parts
        )
        response = self._call_step(request)
        copies = response.copies
        self._copies += zip(copies.group_ids, copies.source_block_ids, copies.target_block_ids, strict=True)
        self._end.zero += response.zero_block_ids
        hand = response.handoffs
        rows = zip(hand.sequence_ids, hand.group_ids, hand.block_ids, hand.boundary_tokens, strict=True)
        self._end.hand_offs += map(list, rows)
        return response

    def _check(self, status: int, response: block_pb2.StepResponse) -> None:
        if status != OK:
            raise ItemFailed(status, response.problems[0].message if response.problems else "")

    def _cut(self, counts: Any, blocks: Any) -> list[list[int]]:
        """One item's block ids, group by group."""
        rows, start = [], 0
        for count in counts:
            rows.append(list(blocks[start : start + count]))
            start += count
        return rows


class RecordingCore(CoreDriver):
    """The pool in this process; keeps its latest events as they are."""

    recent: Sequence[Event] = ()

    def events(self) -> list[Event]:
        events = super().events()
        self.recent = events
        return events


class WireReplay(Replay):
    """A replay whose events are those of the daemon's stream, which tells them when they are true for everybody."""

    driver: WireDriver

    def __init__(self, driver: WireDriver, header: Row) -> None:
        super().__init__(driver, header)
        self._core = RecordingCore()
        self._in_process = Replay(self._core, header)
        self._tells_each = self.auto_events and self.config.report_events
        self._expected = ExpectedChanges()
        self.auto_events = False

    def apply(self, row: Row) -> list[str]:
        self._core.recent = ()
        recorded = [d for d in self._in_process.apply(row) if d.startswith("events")]
        differences = super().apply(row) + recorded
        if not self._tells_each:
            return differences
        expected = self._expected.of(self._core.recent, is_complete=row["op"] == "endstep")
        told = self.driver.stream.read(len(expected))
        return differences + compare("WatchEvents", told, expected, key=sorted)

    def op_events(self, _row: Row) -> Iterator[str]:
        yield from ()  # of the pool in this process; the stream is compared at the end

    def finish(self) -> list[str]:
        """Everything is complete: the stream, a new snapshot and the daemon's index say the same."""
        self.driver.end_step()
        index = self.driver.visible_index()
        self.driver.stream.read(2**31)
        late = StreamReader(self.driver.channel, POOL)
        late.close()
        differences = compare("index of the stream", self.driver.stream.index, index)
        return differences + compare("index of a snapshot", late.index, index)


def options_of(config: PoolConfig) -> pool_pb2.PoolOptions:
    """The pool that a trace was recorded on, as a simulated pool."""
    options = pool_pb2.PoolOptions(
        enable_prefix_caching=config.enable_caching,
        hash_size_bytes=HASH_BYTES,
        eagle_group_ids=[i for i, group in enumerate(config.groups) if group.is_eagle],
        eagle_drop=config.use_eagle,
        num_prefill_lookahead_tokens=config.num_prefill_lookahead_tokens,
        retention_interval_tokens=config.retention_interval_tokens,
        shared_prefix_checkpoint=config.keep_shared_prefix_checkpoints,
        backend=pool_pb2.MEMORY_BACKEND_FAKE,
    )
    overrides = options.overrides
    overrides.scheduler_block_size_tokens = config.scheduler_block_tokens
    overrides.hash_block_size_tokens = config.hash_unit_tokens
    overrides.max_in_flight_tokens = config.max_in_flight_tokens or 0
    overrides.max_model_len_tokens = config.max_model_len
    overrides.num_blocks = config.num_blocks
    overrides.num_retained_boundary_units = config.num_retained_boundary_units
    for group in config.groups:
        overrides.groups.add(
            kind=group.kind.value,
            block_size_tokens=group.block_size_tokens,
            sliding_window_tokens=group.window_tokens,
            extra_retained_tokens=group.extra_retained_tokens,
            attention_chunk_size_tokens=group.chunk_tokens,
            mamba_cache_mode=group.mamba_mode.value,
            num_speculative_blocks=group.num_speculative_blocks,
            num_prefill_checkpoint_blocks=group.num_checkpoint_blocks,
            prefill_checkpoint_alignment_tokens=group.checkpoint_alignment_tokens,
        )
    return options


def check_file(path: Path, channel: grpc.Channel, step: StepCall | None = None) -> Iterator[Outcome]:
    """All operations of one manager trace, and the index at its end."""
    rows = rows_in(path)
    header = next(rows)
    name = header["scenario"]
    replay = WireReplay(WireDriver(channel, step), header)
    outcome = Outcome(name=name)
    for outcome in replay_manager(name, rows, header, replay):
        yield outcome
    if not outcome.differences:
        yield Outcome(name=f"{name}: index at the end", differences=tuple(replay.finish()))
    replay.driver.close()
