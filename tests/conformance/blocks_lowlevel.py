"""Replays the recorded files that are no manager traces: free list, block store, lookups, metrics, hit rates."""

import json
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.pool_config import GroupConfig, GroupKind, PoolConfig, resolve_block_sizes
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.free_list import FreeList
from kvhold_server.pool.hit_rate import HitObservation, HitRateWindow
from kvhold_server.pool.kinds.full import publish_partial
from kvhold_server.pool.lookup import hit_limit
from kvhold_server.pool.origin import Origin
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.values import Admitted, Cleared, Event, Removed, Stored
from tests.conformance.blocks_core import Row, compare, config_of, group_of, label_hash
from tests.conformance.report import Outcome
from tests.model.by_hand import HandPool

NO_LIMIT = 2**31 - 1


class QueueReplay:
    """The free list by itself. Its `take` is the recorded popleft_n."""

    def __init__(self, _header: Row) -> None:
        self.free = FreeList(0, 0)

    def apply(self, row: Row) -> list[str]:
        argument = row["arg"]
        if row["op"] in ("popleft_empty", "remove_not_queued"):
            self._init(0)
        verbs: dict[str, Callable[[], Any]] = {
            "init": lambda: self._init(argument),
            "popleft_n": lambda: self.free.take(argument)[0],
            "popleft": lambda: self.free.take(1)[0][0],
            "popleft_empty": lambda: self.free.take(1)[0][0],
            "remove": lambda: self.free.remove(argument),
            "remove_not_queued": lambda: self.free.remove(argument),
            "append": lambda: self.free.append([argument]),
            "append_n": lambda: self.free.append(argument),
            "prepend_n": lambda: self.free.prepend(argument),
        }
        try:
            out = verbs[row["op"]]()
        except (KvholdError, ValueError):
            out = "error"
        self.free.check_invariants()
        order = list(self.free.order())
        return compare("out", out, row["out"]) + compare("order", order, row["order"])

    def _init(self, num: int) -> None:
        self.free = FreeList(0, num)


class StoreReplay:
    """The block store by itself."""

    def __init__(self, header: Row) -> None:
        self.unit = header["hash_block_size"]
        self.store = BlockStore(num_blocks=header["num_blocks"], num_groups=4)
        self.origins = {group: Origin(group, 1, 1) for group in range(4)}
        for origin in self.origins.values():
            origin.is_public = True
        self.fired: list[int] = []

    def apply(self, row: Row) -> list[str]:
        self.fired = []
        out = getattr(self, f"op_{row['op']}")(row)
        events = self.store.prefixes.take_events()
        state = self.state()
        differences = compare("out", out, row["out"]) + compare("events", self.shown(events), row["ev"], key=in_order)
        for name, value in row["state"].items():
            differences += compare(name, state[name], value)
        if "watcher_fired" in row:
            differences += compare("told", self.fired, row["watcher_fired"])
        return differences

    def op_init(self, _row: Row) -> None:
        pass

    def op_get_new(self, row: Row) -> Any:
        try:
            return self.store.take(row["n"], 1)
        except KvholdError:
            return "error"

    def op_lookup_touch(self, row: Row) -> list[int] | None:
        block = self.store.prefixes.find(row["g"], bytes.fromhex(row["hash"]), 1)
        if not block:
            return None
        self.store.hold([block])
        return [block]

    def op_free_rev(self, row: Row) -> None:
        self.store.let_go(row["ids"][::-1], None)

    def op_evict(self, row: Row) -> None:
        for block in row["ids"]:
            self.store.drop_keys(block)

    def op_cache_full(self, row: Row) -> None:
        hashes = [bytes.fromhex(h) for h in row["hashes"]]
        size, group, start, end = row["bs"], row["g"], row["cached"], row["full"]
        if start >= end:
            return
        stride = size // self.unit
        kept = [i for i in range(start, end) if row["ids"][i] and (row["mask"] is None or row["mask"][i - start])]
        view = hashes[stride - 1 :: stride]
        for i in kept:
            block = row["ids"][i]
            self.store.drop_keys(block)
            self.store.prefixes.publish(group, [block], [view[i]], self.origins[group], [(i + 1) * size])
        self._stored(group, [view[i] for i in kept], view[start - 1] if start else None, (end - start) * size, size)

    def op_cache_partial(self, row: Row) -> str:
        """As the partial publishing of a group, with a stand-in for the group and its turn."""
        hashes = [bytes.fromhex(h) for h in row["hashes"]]
        sequence = Sequence(1, 4)
        sequence.hashes = hashes
        stand_in = _StandIn(self.store, row["g"], row["bs"], self.unit, self.origins[row["g"]])
        publish_partial(stand_in, sequence, row["id"], row["ntok"], stand_in, replace=False)  # type: ignore[arg-type]
        return row["hashes"][row["ntok"] // self.unit - 1]

    def op_reset(self, _row: Row) -> bool:
        if self.store.free.count != self.store.num_blocks - 1:
            return False
        self.store.clear()
        assert self.store.prefixes.events is not None
        self.store.prefixes.events.append(Cleared())
        return True

    def op_get_new_then_unpin(self, row: Row) -> None:
        blocks = self.store.take(len(row["ids"]), 1)
        assert blocks == row["ids"], blocks
        self.store.unpin(blocks, self.fired_later)

    def fired_later(self, block: int) -> None:
        self.fired.append(block)

    def _stored(self, group: int, hashes: list[bytes], parent: bytes | None, tokens: int, size: int) -> None:
        assert self.store.prefixes.events is not None
        self.store.prefixes.events.append(
            Stored(
                group=group,
                hashes=hashes,
                blocks=[],
                indices=[],
                start_tokens=0,
                end_tokens=tokens,
                parent=parent,
                session=size,
                sequence_id=0,
            )
        )

    def shown(self, events: list[Event]) -> list[Any]:
        rows: list[Any] = []
        for event in events:
            match event:
                case Stored():
                    hashes = [int.from_bytes(h[-8:], "big") for h in event.hashes]
                    parent = None if event.parent is None else int.from_bytes(event.parent[-8:], "big")
                    num_tokens = event.end_tokens - event.start_tokens
                    size = self.unit if event.is_partial else event.session
                    rows.append(["stored", event.group, hashes, parent, size, num_tokens])
                case Removed():
                    rows += [["removed", event.group, [int.from_bytes(h[-8:], "big")]] for h in event.hashes]
                case Cleared():
                    rows.append(["cleared"])
        return rows

    def state(self) -> Row:
        store = self.store
        cache = [
            [key.hex(), gid, store.copies[gid].get(key, [block])]
            for gid, index in enumerate(store.index)
            for key, block in index.items()
        ]
        pri = [
            [block, key.hex(), store.origin_of[block].group, store.key_tokens[block]]  # type: ignore[union-attr]
            for block, key in enumerate(store.key_of)
            if key is not None
        ]
        return {"fq": list(store.free.order()), "ref": store.refs, "cache": sorted(cache), "pri": pri}


class _StandIn:
    """What `publish_partial` reads of a group and of a turn."""

    def __init__(self, store: BlockStore, gid: int, block_tokens: int, unit: int, origin: Origin) -> None:
        self.prefixes = store.prefixes
        self.gid = gid
        self.block_tokens = block_tokens
        self.pool = self
        self.hash_unit_tokens = unit
        self.session = 1
        self._origin = origin

    def origin(self, _group: int) -> Origin:
        return self._origin


def in_order(rows: list[Any]) -> list[Any]:
    """Removals of one operation as a set."""
    return sorted((r for r in rows if r[0] == "removed"), key=str) + [r for r in rows if r[0] != "removed"]


class ResidencyReplay:
    """Lives of blocks, with a clock set from outside."""

    def __init__(self, header: Row) -> None:
        assert header["sample_rate"] == 1.0
        self.store = BlockStore(num_blocks=header["num_blocks"], num_groups=1, sample_every=1)
        self.residency = self.store.residency

    def apply(self, row: Row) -> list[str]:
        self.residency.now_s = row["t"] / 1e9
        blocks = row.get("ids", [])
        match row["op"]:
            case "get_new":
                self.residency.handed_out(blocks, [(blocks, None)])
            case "touch":
                self.residency.touched([(blocks, None)])
            case "evict":
                for block in blocks:
                    self.residency.ended(block)
            case "reset":
                self.residency.forget()
        samples = [
            [round(s.lifetime_s, 6), round(s.idle_s, 6), [round(gap, 6) for gap in s.reuse_gaps_s]]
            for s in self.residency.take_samples()
        ]
        recorded = [[round(a, 6), round(b, 6), [round(g, 6) for g in gaps]] for a, b, gaps in row["samples"]]
        return compare("samples", samples, recorded) + compare("tracked", self.residency.watched, row["tracked"])


class HitRateReplay:
    """The hit rate window."""

    def __init__(self, _header: Row) -> None:
        self.window = HitRateWindow()

    def apply(self, row: Row) -> list[str]:
        if row["op"] == "new":
            self.window = HitRateWindow(row["max_recent_requests"])
            return []
        self.window.observe(
            HitObservation(
                requests=row["requests"],
                query_tokens=row["queries"],
                hit_tokens=row["hits"],
                was_reset=row["reset"],
            )
        )
        window = self.window
        return (
            compare("rate", window.rate, row["rate"])
            + compare("sums", [window.requests, window.query_tokens, window.hit_tokens], row["agg"])
            + compare("entries", len(window), row["entries"])
            + compare("empty", len(window) == 0, row["empty"])
        )


class GranularityReplay:
    """Scheduler block and hash unit of several groups."""

    def __init__(self, _header: Row) -> None:
        pass

    def apply(self, row: Row) -> list[str]:
        groups = tuple(map(group_of, row["groups"]))
        try:
            sizes: Any = list(
                resolve_block_sizes(
                    groups,
                    prefix_match_unit_tokens=row["unit"],
                    enable_caching=row["caching"],
                    hashes_needed=row["caching"],
                )
            )
        except KvholdError:
            sizes = "error"
        return compare("sizes", sizes, row["out"])


class LookupReplay:
    """Lookups over random holes: each case is a fresh pool in which entry k of `pop` sits in block k + 1."""

    def __init__(self, _header: Row) -> None:
        self.configs: dict[str, PoolConfig] = {}

    def apply(self, row: Row) -> list[str]:
        if row["op"] == "config":
            self.configs[row["name"]] = config_of(row["config"])
            return []
        pool = HandPool(self.configs[row["name"]])
        session = pool.open_session()
        blocks = pool.store.take(len(row["pop"]), session)
        origins = [Origin(gid, session, 1) for gid in range(len(pool.config.groups))]
        for origin in origins:
            origin.is_public = True
        for block, (label, gid) in zip(blocks, row["pop"], strict=True):
            size = pool.config.groups[gid].block_size_tokens
            pool.store.prefixes.publish(gid, [block], [label_hash(label)], origins[gid], [size])
        differences: list[str] = []
        for case in row["out"]:
            differences += self._compare_case(pool, session, case)
        return differences

    @staticmethod
    def _compare_case(pool: HandPool, session: int, case: Row) -> list[str]:
        sequence = Sequence(1, len(pool.config.groups))
        sequence.hashes = [label_hash(label) for label in range(case["n"] // pool.config.hash_unit_tokens)]
        hit = pool.groups.lookup(sequence, session, hit_limit(case["n"], -1))
        answer = {"n": case["n"], "hit": hit.tokens, "blocks": hit.blocks}
        if hit.boundary_tokens or "junction" in case:
            answer["junction"] = hit.boundary_tokens
        return compare("lookup", answer, case)


def full_pool(num_blocks: int, block: int) -> tuple[HandPool, int]:
    """A pool of one full group, and a session."""
    pool = HandPool(
        PoolConfig(
            groups=(GroupConfig(kind=GroupKind.FULL, block_size_tokens=block),),
            num_blocks=num_blocks,
            hash_unit_tokens=block,
            scheduler_block_tokens=block,
            max_model_len=1 << 30,
            report_events=False,
        )
    )
    session = pool.open_session()
    pool.begin_step(session, 1)
    return pool, session


def admit_next(pool: HandPool, session: int, live: deque[int], conc: int, i: int, request: Row) -> Admitted:
    """Admits request `i` of a trace; at most `conc` hold blocks, the oldest make room."""
    if len(live) == conc:
        pool.free(session, live.popleft())
    length = request["input_length"]
    hashes = [h.to_bytes(8, "big") for h in request["hash_ids"][: length // pool.config.hash_unit_tokens]]
    pool.complete(session, pool.tenures.sessions[session].step)
    answer = pool.admit(session, i + 1, num_tokens=length, token_budget=NO_LIMIT, hashes=hashes)
    while answer.status:
        pool.free(session, live.popleft())
        answer = pool.admit(session, i + 1, num_tokens=length, token_budget=NO_LIMIT)
    live.append(i + 1)
    return answer


class MooncakeTraceReplay:
    """The first rows of the same trace, block by block: [row, length, hit, hit blocks, new blocks, free after]."""

    def __init__(self, header: Row, traces: Path) -> None:
        self.conc = header["conc"]
        self.pool, self.session = full_pool(header["num_blocks"], header.get("block", 512))
        self.live: deque[int] = deque()
        with (traces / "conversation_trace.jsonl").open() as lines:
            self.trace = [json.loads(line) for line in lines]

    def apply(self, row: Any) -> list[str]:
        i, _length, hit, hit_blocks, new_blocks, num_free = row
        answer = admit_next(self.pool, self.session, self.live, self.conc, i, self.trace[i])
        count = answer.hit_counts[0]
        return (
            compare("hit", answer.hit_tokens, hit)
            + compare("hit blocks", answer.tables[0][:count], ids_of(hit_blocks))
            + compare("new blocks", answer.new_blocks[0], ids_of(new_blocks))
            + compare("free", self.pool.counts().available, num_free)
        )


def ids_of(runs: list[list[int]]) -> list[int]:
    """[start, count, step] runs as ids."""
    return [start + k * step for start, count, step in runs for k in range(count)]


class MooncakeReplay:
    """Hit totals of a public trace; the rule is in the file's header."""

    def __init__(self, header: Row, traces: Path) -> None:
        self.block = header["block"]
        with (traces / "conversation_trace.jsonl").open() as lines:
            self.trace = [json.loads(line) for line in lines]

    def apply(self, row: Row) -> list[str]:
        pool, session = full_pool(row["num_blocks"], self.block)
        live: deque[int] = deque()
        ours = {"skipped": 0, "query_tokens": 0, "hit_tokens": 0, "hit_blocks": 0, "full_blocks": 0, "crc": 0}
        for i, request in enumerate(self.trace):
            length = request["input_length"]
            if -(-length // self.block) > row["num_blocks"] - 1:
                ours["skipped"] += 1
                continue
            answer = admit_next(pool, session, live, row["conc"], i, request)
            ours["query_tokens"] += length
            ours["hit_tokens"] += answer.hit_tokens
            ours["hit_blocks"] += answer.hit_tokens // self.block
            ours["full_blocks"] += length // self.block
            ours["crc"] = zlib.crc32(struct.pack("<3I", i, answer.hit_tokens, answer.new_blocks[0][0]), ours["crc"])
        ours["free_end"] = pool.counts().available
        return [d for name in ours for d in compare(name, ours[name], row[name])]


REPLAYS: dict[str, Callable[[Row], Any]] = {
    "queue_lowlevel": QueueReplay,
    "pool_lowlevel": StoreReplay,
    "residency_metrics": ResidencyReplay,
    "hit_rate_window": HitRateReplay,
    "hash_granularity": GranularityReplay,
}


def replay_of(header: Row, traces: Path) -> Any:
    """The replay for a file that is no manager trace; None if there is none."""
    name = header["scenario"]
    if name.startswith("lookup_fuzz"):
        return LookupReplay(header)
    if name == "mooncake_hitrate":
        return MooncakeReplay(header, traces)
    if name == "mooncake_trace":
        return MooncakeTraceReplay(header, traces)
    return REPLAYS[name](header) if name in REPLAYS else None


def replay_lowlevel(replay: Any, name: str, rows: Iterator[Row]) -> Iterator[Outcome]:
    for i, row in enumerate(rows):
        yield Outcome(
            name=f"{name}:{i} {row['op'] if isinstance(row, dict) else ''}", differences=tuple(replay.apply(row))
        )
