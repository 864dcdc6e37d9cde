"""Replays recorded block traces operation by operation and compares results, events, free counts and state digests.

A trace is one scheduler's view of one pool. `Replay` keeps what a scheduler knows (tokens, computed, in flight) and
turns each recorded operation into one verb of a `Driver`; `CoreDriver` applies the verbs to a `Pool` in this process.

Hashes are the trace's labels, widened to 32 bytes, so that a driver for the wire can use them unchanged.
"""

import hashlib
import json
import struct
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig
from kvhold_server.pool.errors import BlocksInUse
from kvhold_server.pool.values import Cleared, Event, Removed, Status, Stored
from tests.conformance.blocks_expected import EXPECTED_DIFFERENCES
from tests.conformance.report import Outcome
from tests.model.by_hand import HandPool

Row = dict[str, Any]

KINDS = {
    "full": GroupKind.FULL,
    "sw": GroupKind.SLIDING_WINDOW,
    "chunk": GroupKind.CHUNKED_LOCAL,
    "mamba": GroupKind.MAMBA,
    "cross": GroupKind.CROSS_ATTENTION,
    "ring": GroupKind.RING,
    "kpool": GroupKind.KPOOL_TAIL,
    "rswa": GroupKind.RSWA,
}
EVENT_KINDS = {GroupKind.RSWA: "full_attention"}
NO_LIMIT = 2**31 - 1


def group_of(row: Row) -> GroupConfig:
    """A recorded group."""
    kind = KINDS[row["kind"]]
    return GroupConfig(
        kind=kind,
        block_size_tokens=row["bs"],
        window_tokens=row.get("win", 0),
        extra_retained_tokens=row.get("extra", 0),
        chunk_tokens=row.get("chunk", 0),
        mamba_mode=MambaMode(row.get("mode", "align")) if kind is GroupKind.MAMBA else MambaMode.NONE,
        num_speculative_blocks=row.get("spec", 0),
        num_checkpoint_blocks=row.get("ckpt", 0),
        checkpoint_alignment_tokens=row.get("ckpt_align") or 0,
        is_eagle=row.get("eagle", False),
    )


def config_of(row: Row) -> PoolConfig:
    """A recorded pool."""
    return PoolConfig(
        groups=tuple(map(group_of, row["groups"])),
        num_blocks=row["num_blocks"],
        hash_unit_tokens=row["hash_block_size"],
        scheduler_block_tokens=row["scheduler_block_size"],
        max_model_len=row["max_model_len"],
        max_in_flight_tokens=row["max_in_flight_tokens"],
        enable_caching=row["enable_caching"],
        use_eagle=row["use_eagle"],
        num_prefill_lookahead_tokens=row["num_prefill_lookahead"],
        retention_interval_tokens=row["retention_interval"],
        keep_shared_prefix_checkpoints=row["shared_prefix_checkpoint"],
        report_events=row["events"],
        num_retained_boundary_units=0,
    )


def label_hash(label: int) -> bytes:
    """A label as a digest of 32 bytes."""
    return label.to_bytes(32, "big")


def label_of(digest: bytes) -> int:
    return int.from_bytes(digest, "big")


def tokens_of(segments: list[list[int]]) -> list[int]:
    return [(seed * 7919 + j * 104729 + 17) % 50021 for seed, start, n in segments for j in range(start, start + n)]


@dataclass(slots=True)
class Request:
    """What a scheduler knows of a request."""

    name: str
    sequence_id: int
    row: Row
    num_prompt_tokens: int
    tokens: list[int]
    labels: list[int]
    computed: int = 0
    in_flight: int = 0
    status: str = "W"
    num_preemptions: int = 0
    num_sent_hashes: int = 0

    def all_hashes(self) -> list[bytes]:
        self.num_sent_hashes = len(self.labels)
        return list(map(label_hash, self.labels))

    def new_hashes(self) -> list[bytes]:
        start, self.num_sent_hashes = self.num_sent_hashes, len(self.labels)
        return list(map(label_hash, self.labels[start:]))

    def keep(self, hashes: list[bytes]) -> None:
        """The item that carried these was refused: they are sent again."""
        self.num_sent_hashes -= len(hashes)


@dataclass(slots=True)
class Grant:
    """Answer to an admission or an extend; None blocks = refused."""

    blocks: list[list[int]] | None
    hit_tokens: int = 0


@dataclass(slots=True)
class StepEnd:
    """What a step leaves for the workers; `hand_offs` name sequences by id."""

    copies: list[list[int]] = field(default_factory=list)
    zero: list[int] = field(default_factory=list)
    hand_offs: list[list[int]] = field(default_factory=list)


class Driver(ABC):
    """The verbs that a trace needs, for one pool and one session."""

    @abstractmethod
    def open(self, config: PoolConfig) -> None:
        """A fresh pool and a session in it."""

    @abstractmethod
    def begin_step(self) -> None:
        """The next scheduler step."""

    @abstractmethod
    def end_step(self) -> StepEnd:
        """The step is handed to the workers, and complete."""

    @abstractmethod
    def lookup(self, request: Request) -> tuple[int, list[list[int]], int]:
        """Hit tokens, blocks per group, junction."""

    @abstractmethod
    def admit(self, request: Request, **item: Any) -> Grant:
        """One admit item without a budget; `item` as in HandPool.admit. Raises KvholdError for a bad one."""

    @abstractmethod
    def extend(self, request: Request, **item: Any) -> Grant:
        """One extend item; `item` as in HandPool.extend."""

    @abstractmethod
    def publish(self, request: Request, tokens: int) -> None:
        """A publish item."""

    @abstractmethod
    def free(self, request: Request) -> None:
        """A free item; a sequence that holds nothing is none of its business."""

    @abstractmethod
    def evict(self, blocks: list[int]) -> None:
        """Drops hashes by block id."""

    @abstractmethod
    def reset(self) -> bool:
        """Resets the cache; False = refused."""

    @abstractmethod
    def num_common_prefix_blocks(self, request: Request) -> list[int]:
        """Per group."""

    @abstractmethod
    def cached_tokens_estimate(self, request: Request) -> int:
        """Of a running sequence."""

    @abstractmethod
    def block_ids_for(self, request: Request, tokens: int) -> list[list[int]]:
        """Per group."""

    @abstractmethod
    def statistics(self) -> dict[str, int]:
        """Running totals: requests, queries, hits, and the same of resumed ones with p_ before."""

    @abstractmethod
    def events(self) -> list[Event]:
        """Since last asked."""

    @abstractmethod
    def num_free(self) -> int:
        """Free blocks, cached ones included."""

    @abstractmethod
    def state(self) -> Row:
        """As in the traces' probes, hashes as bytes, tables by sequence id."""


class CoreDriver(Driver):
    """A pool in this process."""

    def __init__(self, *, check_every: int = 0) -> None:
        self.check_every = check_every
        self.num_checks = 0

    def open(self, config: PoolConfig) -> None:
        self.pool = HandPool(config)
        self.session = self.pool.open_session()
        self.step = 1
        self.pool.begin_step(self.session, self.step)

    def begin_step(self) -> None:
        self.step += 1
        self.pool.begin_step(self.session, self.step)

    def end_step(self) -> StepEnd:
        output = self.pool.end_step(self.session)
        self.pool.complete(self.session, self.step)
        return StepEnd(
            [[copy.source, copy.target] for copy in output.copies],
            output.zero_blocks,
            [[h.sequence_id, h.group, h.block, h.boundary_tokens] for h in output.hand_offs],
        )

    def lookup(self, request: Request) -> tuple[int, list[list[int]], int]:
        hit = self.pool.lookup(
            self.session, num_tokens=len(request.tokens), hashes=list(map(label_hash, request.labels))
        )
        return hit.hit_tokens, hit.blocks, hit.boundary_tokens

    def admit(self, request: Request, **item: Any) -> Grant:
        answer = self.pool.admit(
            self.session, request.sequence_id, token_budget=NO_LIMIT, hashes=request.all_hashes(), **item
        )
        return Grant(answer.new_blocks if answer.status is Status.OK else None, answer.hit_tokens)

    def extend(self, request: Request, **item: Any) -> Grant:
        hashes = request.new_hashes()
        answer = self.pool.extend(self.session, request.sequence_id, hashes=list(hashes), **item)
        if answer.status is not Status.OK:
            request.keep(hashes)
            return Grant(None)
        return Grant(answer.new_blocks)

    def publish(self, request: Request, tokens: int) -> None:
        hashes = request.new_hashes()
        self.pool.publish(self.session, request.sequence_id, publish_tokens=tokens, hashes=hashes)

    def free(self, request: Request) -> None:
        if request.sequence_id in self.pool.tenures.sessions[self.session].sequences:
            self.pool.free(self.session, request.sequence_id)

    def evict(self, blocks: list[int]) -> None:
        self.pool.evict(blocks)

    def reset(self) -> bool:
        try:
            self.pool.reset()
        except BlocksInUse:
            return False
        return True

    def num_common_prefix_blocks(self, request: Request) -> list[int]:
        return self.pool.num_common_prefix_blocks(self.session, request.sequence_id)

    def cached_tokens_estimate(self, request: Request) -> int:
        return self.pool.cached_tokens_estimate(self.session, request.sequence_id)

    def block_ids_for(self, request: Request, tokens: int) -> list[list[int]]:
        return self.pool.block_ids_for(self.session, request.sequence_id, tokens)

    def statistics(self) -> dict[str, int]:
        total = self.pool.prefix_statistics()
        return {
            "requests": total.requests,
            "queries": total.query_tokens,
            "hits": total.hit_own_tokens + total.hit_shared_tokens,
            "p_requests": total.resumed_requests,
            "p_queries": total.resumed_query_tokens,
            "p_hits": total.resumed_hit_tokens,
        }

    def events(self) -> list[Event]:
        return self.pool.take_events()

    def num_free(self) -> int:
        self.num_checks += 1
        if self.check_every and self.num_checks % self.check_every == 0:
            self.pool.check_invariants()
        return self.pool.counts().available

    def state(self) -> Row:
        state = self.pool.describe()
        return {
            "fq": state.free_order,
            "ref": state.refs,
            "cache": state.cache,
            "tbl": {sequence_id: tables for (_, sequence_id), tables in state.tables.items() if any(tables)},
            "pri": state.primaries,
        }


class Replay:
    """One manager trace against one driver."""

    def __init__(self, driver: Driver, header: Row) -> None:
        self.driver = driver
        self.config = config_of(header["config"])
        self.watermark = int(header["config"]["watermark"] * header["config"]["num_blocks"])
        self.auto_events = header["config"]["auto_events"]
        self.requests: dict[str, Request] = {}
        self.by_id: dict[int, Request] = {}
        self.last_statistics: dict[str, int] = {}
        self.looked_up: str | None = None  # the request that was looked up by the operation before this one
        self.observed: list[Any] = []  # by the last operation: every value that was compared
        driver.open(self.config)

    def compare(self, what: str, ours: Any, recorded: Any, *, key: Any = None) -> list[str]:
        self.observed.append((what, ours if key is None else key(ours)))
        return compare(what, ours, recorded, key=key)

    def apply(self, row: Row) -> list[str]:
        """Differences between what was recorded and what the driver answers."""
        self.observed = []
        if row["op"] == "probe":
            return self.compare_state(row["state"])
        differences = list(getattr(self, f"op_{row['op']}")(row))
        self.looked_up = row["r"] if row["op"] == "lookup" else None
        if self.auto_events:
            differences += self.compare(
                "events", self.shown(self.driver.events()), row.get("ev", []), key=order_of_removed
            )
        differences += self.compare("free", self.driver.num_free(), row["free"])
        return differences + self.compare("digest", self.digest(), row["d"])

    # ------------------------------------------------------------ operations
    def op_req(self, row: Row) -> Iterator[str]:
        request = Request(row["r"], len(self.by_id) + 1, row, row["np"], tokens_of(row["toks"]), list(row.get("h", [])))
        self.requests[row["r"]] = self.by_id[request.sequence_id] = request
        yield from ()

    def op_append(self, row: Row) -> Iterator[str]:
        request = self.requests[row["r"]]
        request.tokens += tokens_of(row["toks"])
        request.labels += row.get("h", [])
        yield from ()

    def op_rollback(self, row: Row) -> Iterator[str]:
        request = self.requests[row["r"]]
        request.computed = max(0, request.computed - row["n"])
        yield from ()

    def op_land(self, row: Row) -> Iterator[str]:
        self.requests[row["r"]].in_flight -= row["n"]
        yield from ()

    def op_lookup(self, row: Row) -> Iterator[str]:
        request = self.requests[row["r"]]
        if request.row.get("skip"):
            hit, blocks, junction = 0, [[] for _ in self.config.groups], 0
        else:
            hit, blocks, junction = self.driver.lookup(request)
        answer = {"hit": hit, "blocks": blocks} | ({"junction": junction} if junction else {})
        yield from self.compare("lookup", answer, {k: v for k, v in row["out"].items() if k != "junction" or v})

    def op_alloc(self, row: Row) -> Iterator[str]:
        request = self.requests[row["r"]]
        if row["st"] != request.status:
            yield f"status {request.status} instead of {row['st']}"
        try:
            grant = self.extend(request, row) if request.status == "R" else self.admit(request, row)
        except KvholdError as error:
            grant = Grant(None)
            if "err" not in row and row["out"] is not None:
                yield f"error {error}"
        yield from self.compare("blocks", grant.blocks, row["out"])
        if grant.blocks is None:
            return
        advance = row.get("adv", row["new"])
        if request.status != "R":
            if "hit" in row:
                yield from self.compare("hit", grant.hit_tokens, row["hit"])
            request.computed += grant.hit_tokens + row.get("ext", 0)
            request.status = "R"
        request.computed += advance
        if row.get("fly"):
            request.in_flight += advance

    def extend(self, request: Request, row: Row) -> Grant:
        config = self.config
        if row["new"] == 0:
            return Grant(None)  # no scheduler asks for nothing
        main = min(request.computed, config.max_model_len) + row["new"]
        slots = min(main + row.get("la", 0), config.max_model_len)
        return self.driver.extend(
            request,
            slots_needed=slots,
            num_lookahead_tokens=max(0, slots - main),
            processed_tokens=max(0, request.computed - request.in_flight),
            computed_tokens=request.computed,
            publish_tokens=0 if row.get("delay") else min(main, len(request.tokens)),
            num_encoder_tokens=row.get("enc", 0),
            reserved_blocks=row.get("reserved", 0),
        )

    def admit(self, request: Request, row: Row) -> Grant:
        # A recorded admission with an old lookup takes what that one found. Ours looks up again, and may be capped.
        is_old = "hit" in row and self.looked_up != request.name
        return self.driver.admit(
            request,
            num_tokens=len(request.tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            max_new_tokens=row["new"],
            max_hit_tokens=row["hit"] if is_old else -1,
            num_lookahead_tokens=row.get("la", 0),
            num_external_tokens=row.get("ext", 0),
            num_encoder_tokens=row.get("enc", 0),
            full_sequence_must_fit=row.get("full", False),
            watermark_blocks=self.watermark if row.get("sched", True) else 0,
            reserved_blocks=row.get("reserved", 0),
            defer_publish=row.get("delay", False),
            skip_lookup="hit" not in row or request.row.get("skip", False),
            is_resumed=request.num_preemptions > 0,
        )

    def op_cache(self, row: Row) -> Iterator[str]:
        self.driver.publish(self.requests[row["r"]], row["n"])
        yield from ()

    def op_free(self, row: Row) -> Iterator[str]:
        self.driver.free(self.requests[row["r"]])
        yield from ()

    def op_preempt(self, row: Row) -> Iterator[str]:
        request = self.requests[row["r"]]
        self.driver.free(request)
        request.computed, request.in_flight, request.status = 0, 0, "P"
        request.num_preemptions += 1
        yield from ()

    def op_reset(self, row: Row) -> Iterator[str]:
        done = self.driver.reset()
        yield from self.compare("reset", done, row["out"])

    def op_stats(self, row: Row) -> Iterator[str]:
        now = self.driver.statistics()
        answer = {name: now[name] - self.last_statistics.get(name, 0) for name in now}
        self.last_statistics = now
        yield from self.compare("stats", answer, {k: v for k, v in row["out"].items() if k != "reset"})

    def op_common(self, row: Row) -> Iterator[str]:
        yield from self.compare("common", self.driver.num_common_prefix_blocks(self.requests[row["r"]]), row["out"])

    def op_evict(self, row: Row) -> Iterator[str]:
        self.driver.evict(row["ids"])
        yield from ()

    def op_skipped(self, row: Row) -> Iterator[str]:
        self.driver.extend(self.requests[row["r"]], slots_needed=0, processed_tokens=row["n"])
        yield from ()

    def op_est(self, row: Row) -> Iterator[str]:
        yield from self.compare("est", self.driver.cached_tokens_estimate(self.requests[row["r"]]), row["out"])

    def op_clipped(self, row: Row) -> Iterator[str]:
        yield from self.compare("clipped", self.driver.block_ids_for(self.requests[row["r"]], row["n"]), row["out"])

    def op_step(self, _row: Row) -> Iterator[str]:
        self.driver.begin_step()
        yield from ()

    def op_endstep(self, row: Row) -> Iterator[str]:
        end = self.driver.end_step()
        hand_offs = [[self.by_id[sid].name, *rest] for sid, *rest in end.hand_offs]
        yield from self.compare("endstep", {"copies": end.copies, "zero": end.zero, "offload": hand_offs}, row["out"])

    def op_events(self, row: Row) -> Iterator[str]:
        yield from self.compare("events", self.shown(self.driver.events()), row["out"], key=order_of_removed)

    # ---------------------------------------------------------------- events
    def shown(self, events: list[Event]) -> list[Row]:
        """Events in the form of the traces."""
        rows: list[Row] = []
        for event in events:
            match event:
                case Stored():
                    rows.append(self.shown_stored(event))
                case Removed():
                    rows += [{"t": "removed", "h": [label_of(h)], "g": event.group} for h in event.hashes]
                case Cleared():
                    rows.append({"t": "cleared"})
        return rows

    def shown_stored(self, event: Stored) -> Row:
        request = self.by_id[event.sequence_id]
        group = self.config.groups[event.group]
        size = self.config.hash_unit_tokens if event.is_partial else group.block_size_tokens
        tokens = request.tokens[event.start_tokens : event.end_tokens]
        row: Row = {
            "t": "stored",
            "h": list(map(label_of, event.hashes)),
            "p": None if event.parent is None else label_of(event.parent),
            "bs": size,
            "n": len(tokens),
            "tok": tokens,
            "g": event.group,
            "kind": EVENT_KINDS.get(group.kind, group.kind.value),
        }
        if group.kind is GroupKind.SLIDING_WINDOW:
            row["win"] = group.window_tokens
        if lora := request.row.get("lora"):
            row |= {"lora_id": lora[1], "lora_name": lora[0]}
        if session := request.row.get("session"):
            row["session"] = session
        starts = [event.start_tokens] if event.is_partial else [i * size for i in event.indices]
        keys = [extra_keys(request, start, start + size) for start in starts]
        if any(keys):
            row["xk"] = keys
        return row

    # ----------------------------------------------------------------- state
    def state(self) -> Row:
        state = self.driver.state()
        return {
            "fq": state["fq"],
            "ref": state["ref"],
            "cache": sorted([label_of(key), gid, blocks] for key, gid, blocks in state["cache"]),
            "tbl": {self.by_id[sid].name: tables for sid, tables in state["tbl"].items()},
        }

    def digest(self) -> str:
        text = json.dumps(self.state(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def compare_state(self, recorded: Row) -> list[str]:
        state = self.state()
        differences = []
        for name in ("fq", "ref", "cache", "tbl"):
            differences += self.compare(name, state[name], recorded[name])
        ours = [[b, label_of(key), gid, tokens] for b, key, gid, tokens in self.driver.state()["pri"]]
        return differences + self.compare("pri", ours, recorded["pri"])


def extra_keys(request: Request, start: int, end: int) -> list[Any] | None:
    """Extra keys of one reported block, untagged."""
    keys: list[Any] = []
    if lora := request.row.get("lora"):
        keys.append(lora[0])
    for identifier, offset, length in request.row.get("mm", []):
        if offset < end and offset + length > start:
            keys.append([identifier, offset - start])
    if (salt := request.row.get("salt")) and start == 0:
        keys.append(salt)
    return keys or None


def order_of_removed(rows: list[Row]) -> list[Row]:
    """Sorts neighbouring removals, whose order is open where a block had several hashes."""
    ordered: list[Row] = []
    run: list[Row] = []
    for row in [*rows, None]:
        if row is not None and row["t"] == "removed":
            run.append(row)
            continue
        ordered += sorted(run, key=lambda r: (r["g"], r["h"]))
        run = []
        if row is not None:
            ordered.append(dict(row))
    for row in ordered:
        if "tok" in row:
            row["crc"] = zlib.crc32(struct.pack(f"<{len(row['tok'])}I", *row.pop("tok")))
    return ordered


def compare(what: str, ours: Any, recorded: Any, *, key: Any = None) -> list[str]:
    if key is not None:
        ours, recorded = key(ours), key(recorded)
    return [] if ours == recorded else [f"{what}: {ours} instead of {recorded}"]


def replay_manager(name: str, rows: Iterator[Row], header: Row, replay: Replay) -> Iterator[Outcome]:
    """Every operation of one trace.

    Where ours differs on purpose, its answers (results, events, counts, state) must be those of the naive model
    instead, and the operation must be listed. After any other difference the rest would compare two different
    histories.
    """
    from tests.model.driver import ModelDriver

    expected = EXPECTED_DIFFERENCES.get(name)
    reference = Replay(ModelDriver(), header) if expected else None
    if reference:
        reference.auto_events = replay.auto_events
    for row in rows:
        title = f"{name}:{row['i']} {row['op']}"
        differences = replay.apply(row)
        if expected and reference:
            reference.apply(row)
            if replay.observed != reference.observed:
                yield Outcome(
                    name=title, differences=(f"{replay.observed} instead of the model's {reference.observed}",)
                )
                return
            if bool(differences) != expected.covers(row["i"]):
                differences = differences or ["was expected to differ"]
            elif differences:
                yield Outcome(name=title, deviation=f"{name}: {expected.reason}")
                continue
        yield Outcome(name=title, differences=tuple(differences))
        if differences:
            return


def rows_in(path: Path) -> Iterator[Row]:
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)


def is_manager_trace(path: Path) -> bool:
    """Whether operations of a scheduler were recorded, on a pool of their own."""
    return "config" in next(rows_in(path))


def is_hash_file(path: Path) -> bool:
    """Whether inputs and outputs of hashers were recorded."""
    return str(next(rows_in(path))["scenario"]) == "hash_vectors"


def check_file(path: Path, driver: Driver) -> Iterator[Outcome]:
    """All operations of one file."""
    rows = rows_in(path)
    header = next(rows)
    if "config" in header:
        yield from replay_manager(header["scenario"], rows, header, Replay(driver, header))
        return
    from tests.conformance.blocks_lowlevel import replay_lowlevel, replay_of

    replay = replay_of(header, path.resolve().parent.parent.parent / "traces")
    if replay is not None:
        yield from replay_lowlevel(replay, header["scenario"], rows)


if __name__ == "__main__":
    from tests.conformance.report import Report

    report = Report(out=sys.stdout)
    for argument in sys.argv[1:]:
        for outcome in check_file(Path(argument), CoreDriver(check_every=10)):
            report.add(outcome)
    sys.exit(report.close())
