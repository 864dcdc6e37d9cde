"""The naive model behind the verbs of recorded traces: checks it, and what deliberate differences are held to."""

from typing import Any

from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.values import Cleared, Event, Removed, Stored
from tests.conformance.blocks_core import Driver, Grant, Request, Row, StepEnd, label_hash
from tests.model.naive import NaivePool, Seq


class ModelDriver(Driver):
    """One naive pool and one session in it."""

    def open(self, config: PoolConfig) -> None:
        self.config = config
        self.pool = NaivePool(config)
        self.session = self.pool.open_session()
        self.step = 1
        self.pool.begin_step(self.session, 1)
        self.totals = dict.fromkeys(("requests", "queries", "hits", "p_requests", "p_queries", "p_hits"), 0)

    def begin_step(self) -> None:
        self.step += 1
        self.pool.begin_step(self.session, self.step)

    def end_step(self) -> StepEnd:
        pool = self.pool
        copies = [[source, target] for _, source, target in sorted(pool.copies, key=lambda copy: copy[0])]
        end = StepEnd(copies, pool.zero, [list(h) for h in pool.hand_offs])
        pool.copies, pool.zero, pool.hand_offs = [], [], []
        pool.complete(self.session, self.step)
        return end

    def lookup(self, request: Request) -> tuple[int, list[list[int]], int]:
        seq = Seq(request.sequence_id, list(map(label_hash, request.labels)))
        return self.pool.lookup(self.session, seq, len(request.tokens) - 1)

    def admit(self, request: Request, **item: Any) -> Grant:
        is_resumed = item.pop("is_resumed")
        answer = self.pool.admit(self.session, request.sequence_id, hashes=request.all_hashes(), **item)
        if answer is None:
            return Grant(None)
        if self.config.enable_caching and not item["skip_lookup"]:
            prefix = "p_" if is_resumed else ""
            self.totals[prefix + "requests"] += 1
            self.totals[prefix + "queries"] += item["num_tokens"]
            self.totals[prefix + "hits"] += answer[0]
        return Grant(answer[1], answer[0])

    def extend(self, request: Request, **item: Any) -> Grant:
        hashes = request.new_hashes()
        blocks = self.pool.extend(self.session, request.sequence_id, hashes=hashes, **item)
        if blocks is None:
            request.keep(hashes)
        return Grant(blocks)

    def publish(self, request: Request, tokens: int) -> None:
        seq = self.pool.sessions[self.session].seqs[request.sequence_id]
        seq.hashes = seq.hashes + request.new_hashes()
        self.pool.publish(self.session, seq, tokens)

    def free(self, request: Request) -> None:
        if request.sequence_id in self.pool.sessions[self.session].seqs:
            self.pool.free_sequence(self.session, request.sequence_id)

    def evict(self, blocks: list[int]) -> None:
        self.pool.evict(blocks)

    def reset(self) -> bool:
        return self.pool.reset()

    def num_common_prefix_blocks(self, request: Request) -> list[int]:
        seqs = self.pool.sessions[self.session].seqs
        common = []
        for group, table in zip(self.config.groups, seqs[request.sequence_id].tables, strict=True):
            num = 0
            is_full = group.kind.value in ("full_attention", "mla_attention", "sink_full_attention", "rswa")
            while is_full and self.config.enable_caching and num < len(table):
                if self.pool.blocks[table[num]].refs != len(seqs):
                    break
                num += 1
            common.append(num)
        return common

    def cached_tokens_estimate(self, request: Request) -> int:
        seq = self.pool.sessions[self.session].seqs[request.sequence_id]
        reach = []
        for gid in self.pool.cacheable:
            keys = [self.pool.blocks[b].keys for b in seq.tables[gid]]
            reach.append(max((k[0].tokens for k in keys if k), default=0))
        return min(reach, default=0)

    def block_ids_for(self, request: Request, tokens: int) -> list[list[int]]:
        seq = self.pool.sessions[self.session].seqs[request.sequence_id]
        ids = []
        for group, table in zip(self.config.groups, seq.tables, strict=True):
            is_whole = group.kind.value in ("mamba", "cross_attention")
            ids.append(list(table) if is_whole else table[: -(-tokens // group.block_size_tokens)])
        return ids

    def statistics(self) -> dict[str, int]:
        return dict(self.totals)

    def events(self) -> list[Event]:
        events, self.pool.events = self.pool.events, []
        return [self.shown(event) for event in events] if self.config.report_events else []

    def shown(self, event: list[Any]) -> Event:
        if event[0] == "removed":
            return Removed(group=event[1], hashes=[event[2]], blocks=[], copies_left=[])
        if event[0] == "cleared":
            return Cleared()
        _, gid, hashes, parent, start, end, sid, kept = event
        return Stored(
            group=gid,
            hashes=hashes,
            blocks=[],
            indices=kept or [],
            start_tokens=start,
            end_tokens=end,
            parent=parent,
            session=self.session,
            sequence_id=sid,
            is_partial=kept is None,
        )

    def num_free(self) -> int:
        return len(self.pool.free)

    def state(self) -> Row:
        state = self.pool.state()
        state["tbl"] = {sid: tables for (_, sid), tables in state["tbl"].items() if any(tables)}
        return state
