"""A naive model of the block pool, written from the rules and for reading: lists, scans, no index, no cost.

It answers the same verbs as the pool and must agree with it in every id, order, count and hit. It shares no code with
it but the configuration and the values that verbs return.

A block is a small record. A key is (group, hash, prefix length); the first key of a block is its primary one. Free
blocks stand in one plain list. Who may not take a freed block is a set of (session, step) per block.
"""

from dataclasses import dataclass, field
from typing import Any

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig

FULL_KINDS = (GroupKind.FULL, GroupKind.MLA, GroupKind.SINK_FULL, GroupKind.RSWA)
WINDOW_KINDS = (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA)
SCRATCH_KINDS = (GroupKind.RING, GroupKind.KPOOL_TAIL)


def up(a: int, b: int) -> int:
    return (a + b - 1) // b


@dataclass
class Key:
    group: int
    digest: bytes
    tokens: int
    session: int
    step: int


@dataclass
class Block:
    refs: int = 0
    keys: list[Key] = field(default_factory=list)
    fences: set[tuple[int, int, bool]] = field(default_factory=set)  # session, step, also for that session itself


@dataclass
class Seq:
    sid: int
    hashes: list[bytes]
    prompt: int = 0
    known: int = 0
    junction: int = 0
    tables: list[list[int]] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    tail: dict[int, int] = field(default_factory=dict)  # group → entry adopted in part
    pending: dict[int, tuple[int, int]] = field(default_factory=dict)  # mamba: entry keyed inside, tokens
    planned: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    checkpoint: dict[int, tuple[int, int] | None] = field(default_factory=dict)  # planned, and granted
    allocated: set[int] = field(default_factory=set)
    start: dict[int, int] = field(default_factory=dict)  # of the newest chunk
    end: dict[int, int] = field(default_factory=dict)
    untold: dict[int, set[int]] = field(default_factory=dict)  # entries inside chunks that were not published with them
    stale: bool = False


@dataclass
class Session:
    alive: bool = True
    reaped: bool = False
    step: int = 0
    completed: int = 0
    seqs: dict[int, Seq] = field(default_factory=dict)
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)  # step, group, source, target


class NaivePool:
    """See the module."""

    def __init__(self, config: PoolConfig) -> None:
        self.c = config
        self.blocks = [Block() for _ in range(config.num_blocks)]
        self.free = list(range(1 + config.num_reserved_low_blocks, config.num_blocks))
        self.order: dict[tuple[int, bytes], list[int]] = {}  # (group, hash) → blocks in the order in which they got it
        self.sessions: dict[int, Session] = {}
        self.num_sessions = 0
        self.events: list[list[Any]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.zero: list[int] = []
        self.hand_offs: list[tuple[int, int, int, int]] = []
        self.gained: dict[int, set[int]] = {}  # session → state blocks keyed in its current step
        flagged = any(g.is_eagle for g in config.groups)
        self.eagle = [g.is_eagle or (config.use_eagle and not flagged) for g in config.groups]
        self.cacheable = [i for i, g in enumerate(config.groups) if g.prefix_cacheable]
        unit = config.hash_unit_tokens
        self.fine = (
            config.enable_caching
            and len(config.groups) > 1
            and any(self._aligned(i) and config.groups[i].block_size_tokens > unit for i in self.cacheable)
            and all(
                config.groups[i].kind in (*FULL_KINDS, GroupKind.MAMBA) or config.groups[i].block_size_tokens == unit
                for i in self.cacheable
            )
        )
        self.align = unit if self.fine else config.scheduler_block_tokens
        self.partials = len(config.groups) > 1 and any(
            config.groups[i].block_size_tokens > unit for i in self.cacheable
        )

    def _aligned(self, gid: int) -> bool:
        group = self.c.groups[gid]
        return group.kind is GroupKind.MAMBA and group.mamba_mode is MambaMode.ALIGN

    # ------------------------------------------------------------ sessions
    def open_session(self) -> int:
        self.num_sessions += 1
        self.sessions[self.num_sessions] = Session()
        return self.num_sessions

    def close_session(self, s: int) -> None:
        self.complete(s, self.sessions[s].step)
        for seq in self.sessions[s].seqs.values():
            for table in seq.tables:
                self.let_go(table[::-1], None)
        del self.sessions[s]

    def kill_session(self, s: int) -> None:
        self.sessions[s].alive = False

    def reap(self, s: int) -> None:
        for block in self.blocks:
            if block.keys and block.keys[0].session == s and not self.public(block.keys[0]):
                self.drop_keys(self.blocks.index(block))
        self.sessions[s].reaped = True

    def release(self, s: int) -> None:
        dead = self.sessions[s]
        for block in self.blocks:
            block.fences = {f for f in block.fences if f[0] != s}
        for step in sorted({copy[0] for copy in dead.copies}):
            self._end_copies(dead, step)
        for seq in dead.seqs.values():
            for table in seq.tables:
                while table:
                    self.let_go(table[-256:][::-1], None)
                    del table[-256:]
        del self.sessions[s]

    def begin_step(self, s: int, step: int, completed: int = 0) -> None:
        session = self.sessions[s]
        if completed > session.completed:
            self.complete(s, min(completed, session.step))
        if step > session.step:
            session.step = step
            self.gained[s] = set()

    def complete(self, s: int, completed: int) -> None:
        session = self.sessions[s]
        for step in range(session.completed + 1, completed + 1):
            for block in self.blocks:
                block.fences = {f for f in block.fences if f[0] != s or f[1] > step}
            session.completed = step
            self._end_copies(session, step)

    def _end_copies(self, session: Session, step: int) -> None:
        ends = sorted((copy for copy in session.copies if copy[0] == step), key=lambda copy: copy[1])
        session.copies = [copy for copy in session.copies if copy[0] != step]
        self.let_go([block for _, _, source, target in ends for block in (source, target)], None)

    # ------------------------------------------------------------ blocks
    def available(self, s: int) -> int:
        return sum(not self.fenced(s, b) for b in self.free)

    def fenced(self, s: int, b: int) -> bool:
        return any(owner != s or own for owner, _, own in self.blocks[b].fences)

    def take(self, n: int, s: int) -> list[int]:
        got = [b for b in self.free if not self.fenced(s, b)][:n]
        assert len(got) == n
        for b in got:
            self.free.remove(b)
            self.drop_keys(b)
            assert self.blocks[b].refs == 0
            self.blocks[b].refs = 1
        return got

    def touch(self, blocks: list[int]) -> None:
        for b in blocks:
            if b:
                if not self.blocks[b].refs:
                    self.free.remove(b)
                self.blocks[b].refs += 1

    def let_go(self, blocks: list[int], by: tuple[int, int] | None, own: bool = False) -> None:
        front, back = [], []
        for b in blocks:
            if b == 0:
                continue
            if by:
                self.blocks[b].fences.add((*by, own))
            self.blocks[b].refs -= 1
            if self.blocks[b].refs == 0:
                (back if self.blocks[b].keys else front).append(b)
        self.free = front + self.free + back

    def drop_keys(self, b: int) -> None:
        for key in self.blocks[b].keys:
            self.order[key.group, key.digest].remove(b)
            self.events.append(["removed", key.group, key.digest])
        self.blocks[b].keys = []

    def add_key(self, b: int, key: Key) -> None:
        self.blocks[b].keys.append(key)
        self.order.setdefault((key.group, key.digest), []).append(b)

    def public(self, key: Key) -> bool:
        session = self.sessions.get(key.session)
        return session is None or key.step <= session.completed

    def find(self, s: int, gid: int, digest: bytes) -> int:
        for b in self.order.get((gid, digest), []):
            # A block's visibility is that of its primary key.
            if self.blocks[b].keys[0].session == s or self.public(self.blocks[b].keys[0]):
                return b
        return 0

    # ------------------------------------------------------------ lookup
    def lookup(self, s: int, seq: Seq, limit: int) -> tuple[int, list[list[int]], int]:
        groups = self.c.groups
        rows: list[list[int]] = [[] for _ in groups]
        if not self.c.enable_caching or not self.cacheable or limit <= 0:
            return 0, rows, 0
        if len(groups) == 1:
            found, n = self.find_class(s, seq, [0], limit, self.eagle[0], groups[0].block_size_tokens)
            return n, found, 0
        classes = self._classes()
        hit, longest, verified = limit, 0, set()
        answer: dict[int, tuple[list[list[int]], int]] = {}
        while True:
            cur = hit
            for i, gids in enumerate(classes):
                kind = groups[gids[0]].kind
                if kind in FULL_KINDS and i in answer:
                    cur = min(cur, answer[i][1])
                    continue
                drop = any(self.eagle[g] for g in gids) and i not in verified
                lim = cur
                if drop and kind is not GroupKind.MAMBA:
                    size = groups[gids[0]].block_size_tokens
                    unit = self.c.hash_unit_tokens
                    margin = unit if self.fine and kind in FULL_KINDS and size > unit else size
                    lim = min(cur + margin, limit)
                answer[i] = self.find_class(s, seq, gids, lim, drop, self.align)
                if drop:
                    verified.add(i)
                elif answer[i][1] < cur:
                    verified = set()
                cur = answer[i][1]
                longest = max(longest, cur)
            if cur >= hit:
                break
            hit = cur
            if len(classes) == 2 and groups[classes[0][0]].kind in FULL_KINDS:
                break
        for i, gids in enumerate(classes):
            for gid, row in zip(gids, answer[i][0], strict=True):
                is_full = groups[gid].kind in FULL_KINDS
                rows[gid] = row[: up(hit, groups[gid].block_size_tokens)] if is_full else row
        return hit, rows, longest if longest > hit else 0

    def _classes(self) -> list[list[int]]:
        classes: list[list[int]] = []
        for gid in self.cacheable:
            for members in classes:
                if self._same_spec(self.c.groups[gid], self.c.groups[members[0]]):
                    members.append(gid)
                    break
            else:
                classes.append([gid])
        full = [m for m in classes if self.c.groups[m[0]].kind in FULL_KINDS]
        return full + [m for m in classes if m not in full]

    @staticmethod
    def _same_spec(a: GroupConfig, b: GroupConfig) -> bool:
        names = [name for name in a.__dataclass_fields__ if name != "is_eagle"]
        return all(getattr(a, name) == getattr(b, name) for name in names)

    def find_class(
        self, s: int, seq: Seq, gids: list[int], limit: int, drop: bool, align: int
    ) -> tuple[list[list[int]], int]:
        group = self.c.groups[gids[0]]
        size, unit = group.block_size_tokens, self.c.hash_unit_tokens

        def at(end: int) -> list[int] | None:
            """Blocks that hold the prefix of `end` tokens, one per group."""
            if end // unit > len(seq.hashes):
                return None
            found = [self.find(s, gid, seq.hashes[end // unit - 1]) for gid in gids]
            return found if all(found) else None

        columns: list[list[int] | None] = []  # one entry per block: ids per group, or nulls
        nulls = [0] * len(gids)
        if group.kind in FULL_KINDS:
            while (len(columns) + 1) * size <= limit and (ids := at((len(columns) + 1) * size)):
                columns.append(ids)
            hit = len(columns) * size
            if align < size and size % align == 0:
                for end in range(min(hit + size - unit, limit // unit * unit), hit, -unit):
                    if ids := at(end):
                        columns.append(ids)
                        hit = end
                        break
            if drop and hit:
                hit -= min(align, size)
            hit -= hit % align
            columns = columns[: up(hit, size)]
        elif group.kind in WINDOW_KINDS:
            columns, hit = self._find_window(group, at, limit, drop, align, nulls)
        elif group.kind is GroupKind.CHUNKED_LOCAL:
            columns, hit = self._find_chunk(group, at, limit, nulls)
        else:
            step = unit if align < size else size
            hit = 0
            for end in range(limit // step * step, 0, -step):
                if end % align == 0 and (ids := at(end)):
                    held = [self.blocks[b] for b in ids if self.blocks[b].refs]
                    if end % size and any(block.keys[0].session != s for block in held):
                        continue  # its holder writes on, or has yet to copy it
                    columns = [nulls] * ((end - 1) // size) + [ids]
                    hit = end
                    break
        return [[(column or nulls)[k] for column in columns] for k in range(len(gids))], hit

    def _find_window(
        self, group: GroupConfig, at: Any, limit: int, drop: bool, align: int, nulls: list[int]
    ) -> tuple[list[Any], int]:
        """The longest end whose window is cached; an end near the start needs what there is."""
        size = group.block_size_tokens
        need = up(group.window_tokens - 1, size) + drop
        top = limit // size
        cached = [at((i + 1) * size) for i in range(top)]
        if need == 0:
            top -= top * size % align // size
            return [nulls] * top, top * size

        def cut(n: int) -> int:
            while n and size != align and n * size % align:
                n -= 1
            return n

        # The last run of `need` cached blocks whose right end may be the end of a hit.
        end = 0
        for right in range(top, need - 1, -1):
            is_end = size == align or (right - drop) * size % align == 0
            if is_end and all(cached[right - need : right]):
                end = right
                break
        if not end:
            # What is cached from the start, up to the right end at which a scan from the right would begin its run.
            lead = 0
            while lead < top and cached[lead]:
                lead += 1
            while lead and size != align and (lead - drop) * size % align:
                lead -= 1
            end = cut(lead)
            columns = list(cached[:end])
        else:
            columns = [nulls] * (end - need) + cached[end - need : end]
        if drop and columns:
            columns = columns[: cut(len(columns) - 1)]
        return columns, len(columns) * size

    def _find_chunk(self, group: GroupConfig, at: Any, limit: int, nulls: list[int]) -> tuple[list[Any], int]:
        size, chunk = group.block_size_tokens, group.chunk_tokens
        others = [self.c.groups[i] for i in self.cacheable]
        is_proven = any(
            g.kind in FULL_KINDS
            or g.kind is GroupKind.MAMBA
            or (g.kind in WINDOW_KINDS and up(g.window_tokens - 1, g.block_size_tokens))
            for g in others
        )
        if is_proven:
            start = limit // chunk * chunk // size
            columns: list[Any] = [nulls] * start
            while (len(columns) + 1) * size <= limit and (ids := at((len(columns) + 1) * size)):
                columns.append(ids)
            return columns, len(columns) * size
        for n in range(limit // size, 0, -1):
            start = n * size // chunk * chunk // size
            if at(n * size) and all(at((i + 1) * size) for i in range(start, n)):
                return [nulls] * start + [at((i + 1) * size) for i in range(start, n)], n * size
        return [], 0

    # ------------------------------------------------------------ need, grow
    def skip(self, gid: int, n: int) -> int:
        group = self.c.groups[gid]
        if group.kind in WINDOW_KINDS:
            return max(0, n - group.window_tokens + 1 - group.extra_retained_tokens)
        if group.kind is GroupKind.CHUNKED_LOCAL:
            return n // group.chunk_tokens * group.chunk_tokens
        return n - 1 if group.kind is GroupKind.MAMBA else 0

    def release_skipped(self, s: int, seq: Seq, n: int) -> None:
        by = (s, self.sessions[s].step)
        for gid, table in enumerate(seq.tables):
            group = self.c.groups[gid]
            size = group.block_size_tokens
            low, high = 0, self.skip(gid, n) // size
            if group.kind is GroupKind.RSWA:
                low, high = up(seq.prompt, size), max(seq.prompt, n - group.window_tokens) // size
            gone = [i for i in range(min(high, len(table)) - 1, low - 1, -1) if table[i]]
            self.let_go([table[i] for i in gone], by)
            for i in gone:
                table[i] = 0

    def need(self, seq: Seq, gid: int, hits: list[int], hit: int, total: int, slots: int, main: int, cap: bool) -> int:
        group = self.c.groups[gid]
        size, spec = group.block_size_tokens, group.num_speculative_blocks
        table = seq.tables[gid] if seq.tables else []
        admitted = bool(seq.tables)
        if group.kind in SCRATCH_KINDS:
            return 0 if table else 1
        if self._aligned(gid):
            if main <= 0:
                return 0
            extra = gid in seq.pending or (bool(hits) and hit % size != 0)
            length = len(hits) + len(table)
            loaded = 0
            if not admitted and total > hit:  # external tokens: nulls, and one block with the state at their end
                while length < up(total, size):
                    length += 1
                    loaded = 1 if length == up(total, size) else 0
            seq.planned[gid] = self._checkpoint(seq, gid, length, main, total)
            has_checkpoint = seq.planned[gid] is not None
            new = max(up(main, size) + spec - length, 0) + extra
            top = 1 + extra + has_checkpoint + (spec if gid not in seq.allocated or has_checkpoint else 0)
            return min(new, top) + loaded + sum(1 for b in hits if b and not self.blocks[b].refs)
        if group.kind is GroupKind.MAMBA:
            slots += spec * size
        required = up(slots, size)
        if admitted:
            return max(required - len(table), 0)
        if cap:
            flight = self.c.max_model_len if self.c.max_in_flight_tokens is None else self.c.max_in_flight_tokens
            if group.kind in WINDOW_KINDS:
                reach = group.window_tokens - 1 + group.extra_retained_tokens + flight
                required = min(required, up(min(reach, self.c.max_model_len), size) + 1)
            if group.kind is GroupKind.CHUNKED_LOCAL:
                required = min(required, up(min(group.chunk_tokens + flight, self.c.max_model_len), size))
        skipped = self.skip(gid, total) // size
        new = max(required - max(skipped, len(hits)), 0)
        evictable = sum(1 for b in hits[max(skipped, 0) :] if b and not self.blocks[b].refs)
        return new + evictable + (1 if hits and hit % size else 0)

    def _checkpoint(self, seq: Seq, gid: int, length: int, main: int, start: int) -> tuple[int, int] | None:
        group, unit = self.c.groups[gid], self.c.hash_unit_tokens
        q, size = group.checkpoint_alignment_tokens, group.block_size_tokens
        if not q or not group.num_checkpoint_blocks:
            return None
        at = (main - 1) // unit * unit - (unit if any(self.eagle) else 0)
        slot = up(main, size) - 2
        table = seq.tables[gid] if seq.tables else []
        if start % unit or not start + unit <= at < main or (at - start) % q or slot <= (start - 1) // size:
            return None
        if self.c.retention_interval_tokens == 0 and main < max(seq.prompt, seq.known - 1):
            return None
        speculative = gid in seq.allocated and slot >= length - group.num_speculative_blocks
        if slot < len(table) and table[slot] and not speculative:
            return None
        return slot, at

    def grow(self, s: int, seq: Seq, gid: int, slots: int, main: int, computed: int, zeroing: bool) -> list[int]:
        group, table = self.c.groups[gid], seq.tables[gid]
        size, spec = group.block_size_tokens, group.num_speculative_blocks
        step = self.sessions[s].step
        new: list[int] = []
        if self._aligned(gid):
            for i in range(seq.offered[gid], 0 if spec else len(table)):
                if table[i] and seq.start.get(gid, 0) < (i + 1) * size < seq.end.get(gid, 0):
                    seq.untold.setdefault(gid, set()).add(i)
            if main <= 0:
                seq.checkpoint[gid] = None
                return []
        wants_zero = zeroing and group.kind not in (GroupKind.MAMBA, GroupKind.RING)
        if gid in seq.tail:
            i = seq.tail.pop(gid)
            (own,) = self.take(1, s)
            self.blocks[own].refs += 1
            self.copies.append((gid, table[i], own))
            self.sessions[s].copies.append((step, gid, table[i], own))
            table[i] = own
            new.append(own)
            if group.kind is not GroupKind.MAMBA:
                self.zero.append(own)
        elif gid in seq.pending:
            i, tokens = seq.pending.pop(gid)
            (copy,) = self.take(1, s)
            keys, self.blocks[table[i]].keys = self.blocks[table[i]].keys, []
            for key in keys:
                self.order[key.group, key.digest].remove(table[i])
                self.add_key(copy, key)
            self.blocks[table[i]].refs += 1
            self.copies.append((gid, table[i], copy))
            self.sessions[s].copies.append((step, gid, table[i], copy))
            self.gained[s].add(copy)
            self.hand_offs.append((seq.sid, gid, copy, tokens))
        if group.kind in SCRATCH_KINDS:
            taken = [] if table else self.take(1, s)
            table += taken
        elif self._aligned(gid):
            seq.checkpoint[gid], seq.start[gid], seq.end[gid] = seq.planned[gid], computed, main
            return new + self._grow_states(s, seq, gid, main)
        else:
            if group.kind is GroupKind.MAMBA:
                slots += spec * size
            taken = self.take(max(up(slots, size) - len(table), 0), s)
            table += taken
        if wants_zero:
            self.zero += taken
        return new + taken

    def _grow_states(self, s: int, seq: Seq, gid: int, main: int) -> list[int]:
        group, table = self.c.groups[gid], seq.tables[gid]
        spec, before = group.num_speculative_blocks, len(seq.tables[gid])
        running = up(main, group.block_size_tokens) - 1  # entry of the running state
        has_checkpoint = seq.checkpoint.get(gid) is not None
        if running + 1 + spec > before or has_checkpoint:
            while len(table) < running - has_checkpoint:
                table.append(0)
            if gid in seq.allocated and not has_checkpoint:
                for i in range(max(before - spec, 0), before):
                    if i < running:
                        table.append(table[i])
                        table[i] = 0
            table += self.take(max(running + 1 + spec - len(table), 0), s)
        seq.allocated.add(gid)
        return table[before:]

    # ------------------------------------------------------------ publish
    def publish(self, s: int, seq: Seq, n: int) -> None:
        if not self.c.enable_caching or seq.stale:
            return
        c, unit = self.c, self.c.hash_unit_tokens
        if n // unit > len(seq.hashes):
            n = len(seq.hashes) * unit
        withheld = max(0, c.num_prefill_lookahead_tokens - 1)
        for gid in self.cacheable:
            size = c.groups[gid].block_size_tokens
            if len(c.groups) == 1:
                upto = max(0, n - withheld)
            else:
                upto = n if self.fine else n // c.scheduler_block_tokens * c.scheduler_block_tokens
                if self.eagle[gid]:
                    if not upto:
                        continue
                    final = max(0, n - withheld)
                    upto = min(final, final // self.align * self.align + size)
            self.publish_group(s, seq, gid, upto)

    def publish_group(self, s: int, seq: Seq, gid: int, n: int) -> None:
        group, table, unit = self.c.groups[gid], seq.tables[gid], self.c.hash_unit_tokens
        size = group.block_size_tokens
        exported, untold = seq.checkpoint.get(gid), seq.untold.get(gid, set())
        end = min(n // size, len(table))
        if end > seq.offered[gid]:
            start = seq.offered[gid]
            kept = [i for i in range(start, end) if table[i] and self.keeps(seq, gid, i)]
            stored = []
            for i in kept:
                self.drop_keys(table[i])
            for i in kept:
                digest = seq.hashes[(i + 1) * size // unit - 1]
                self.add_key(table[i], self.key(s, gid, digest, (i + 1) * size))
                stored.append(digest)
                if self._aligned(gid) and i not in untold:
                    self.gained[s].add(table[i])
            parent = seq.hashes[start * size // unit - 1] if start else None
            self.events.append(["stored", gid, stored, parent, start * size, end * size, seq.sid, kept])
            seq.offered[gid] = end
            if self._aligned(gid):
                for i in range(start, end):
                    if table[i] and i in untold:
                        self.drop_keys(table[i])
                    elif table[i] and self.blocks[table[i]].keys and not (exported and exported[0] == i):
                        self.gained[s].add(table[i])
                        self.hand_offs.append((seq.sid, gid, table[i], (i + 1) * size))
        if group.kind in FULL_KINDS and self.partials:
            tail = seq.prompt // unit * unit
            if 0 < tail <= n and tail % size and tail // size < len(table):
                self.publish_partial(s, seq, gid, table[tail // size], tail, False)
        if self._aligned(gid):
            self._publish_states(s, seq, gid, n, exported)

    def _publish_states(self, s: int, seq: Seq, gid: int, n: int, exported: tuple[int, int] | None) -> None:
        table, unit = seq.tables[gid], self.c.hash_unit_tokens
        size = self.c.groups[gid].block_size_tokens
        own_end = seq.prompt // unit * unit - (unit if any(self.eagle) else 0)
        if exported:
            seq.checkpoint[gid] = None
            i, at = exported
            early = self.c.retention_interval_tokens == 0 and n < seq.prompt
            late = i >= seq.offered[gid]
            if late or at // unit > len(seq.hashes) or (early and at not in (own_end, seq.junction)):
                self.drop_keys(table[i])
                return
            if at != (i + 1) * size:
                self.publish_partial(s, seq, gid, table[i], at, True)
            elif not self.blocks[table[i]].keys:
                return
            self.gained[s].add(table[i])
            self.hand_offs.append((seq.sid, gid, table[i], at))
            return
        wanted = n == own_end or (
            self.c.keep_shared_prefix_checkpoints and n == seq.junction and seq.start.get(gid, 0) < n <= seq.prompt
        )
        wanted = wanted and n == seq.end.get(gid)
        if self.partials and n % size and wanted and n // size < len(table) and table[n // size]:
            self.publish_partial(s, seq, gid, table[n // size], n, False)
            self.gained[s].add(table[n // size])
            seq.pending[gid] = (n // size, n)
            seq.offered[gid] = n // size

    def key(self, s: int, gid: int, digest: bytes, tokens: int) -> Key:
        return Key(gid, digest, tokens, s, self.sessions[s].step)

    def publish_partial(self, s: int, seq: Seq, gid: int, b: int, tokens: int, replace: bool) -> None:
        unit = self.c.hash_unit_tokens
        digest = seq.hashes[tokens // unit - 1]
        keys = self.blocks[b].keys
        known = any(key.digest == digest for key in keys)
        if replace:
            self.drop_keys(b)
            known = False
        elif not known and keys and keys[0].tokens < tokens:
            self.drop_keys(b)
        if not known:
            self.add_key(b, self.key(s, gid, digest, tokens))
            parent = seq.hashes[tokens // unit - 2] if tokens > unit else None
            self.events.append(["stored", gid, [digest], parent, tokens - unit, tokens, seq.sid, None])

    def keeps(self, seq: Seq, gid: int, i: int) -> bool:
        """May block `i` serve a hit that a later request can use?"""
        group, interval = self.c.groups[gid], self.c.retention_interval_tokens
        size, align, sb = group.block_size_tokens, self.align, self.c.scheduler_block_tokens
        ends = [seq.prompt - 1]
        if any(self.eagle):
            ends = [max((seq.prompt - 1) // sb * sb - sb, 0), max(seq.prompt // sb * sb - sb, 0)]
        if seq.junction:
            ends.append(seq.junction)
        if group.kind is GroupKind.MAMBA:
            if interval is None or (interval and interval // size <= 1):
                return True
            regular = bool(interval) and (i + 1) % (interval // size) == 0
            return regular or any(i == t // align * align // size - 1 for t in ends)
        if group.kind not in WINDOW_KINDS or align % size:
            return True
        shift = 1 if self.eagle[gid] else 0
        need = up(group.window_tokens - 1, size) + shift
        segment = align if interval is None else interval
        if segment:
            per = segment // size
            if need >= per or (i >= shift and (i - shift) % per >= per - need):
                return True
        if interval is None:
            return False
        for t in ends:
            for margin in range(self.c.num_retained_boundary_units + 1):
                last = (t // align - margin) * align // size + shift
                if last - need <= i < last:
                    return True
        return False

    # ------------------------------------------------------------ verbs
    def extend(
        self,
        s: int,
        sid: int,
        *,
        slots_needed: int,
        processed_tokens: int,
        publish_tokens: int = 0,
        hashes: list[bytes] | None = None,
        num_lookahead_tokens: int = 0,
        computed_tokens: int | None = None,
        num_encoder_tokens: int = 0,
        reserved_blocks: int = 0,
    ) -> list[list[int]] | None:
        seq = self.sessions[s].seqs[sid]
        slots = min(slots_needed, self.c.max_model_len)
        main = slots - num_lookahead_tokens
        computed = processed_tokens if computed_tokens is None else computed_tokens
        self.release_skipped(s, seq, processed_tokens)
        need = 0
        for gid, group in enumerate(self.c.groups):
            n = num_encoder_tokens if group.kind is GroupKind.CROSS_ATTENTION else slots
            need += self.need(seq, gid, [], 0, computed, n, main, False)
        if need > 0 and need > self.available(s) - reserved_blocks:
            return None
        seq.hashes = seq.hashes + (hashes or [])
        new = []
        for gid, group in enumerate(self.c.groups):
            n = num_encoder_tokens if group.kind is GroupKind.CROSS_ATTENTION else slots
            new.append(self.grow(s, seq, gid, n, main, computed, self.zeroing))
        if publish_tokens:
            self.publish(s, seq, publish_tokens)
        return new

    @property
    def zeroing(self) -> bool:
        return self.c.needs_zeroing or any(g.kind is GroupKind.MAMBA for g in self.c.groups)

    def admit(
        self,
        s: int,
        sid: int,
        *,
        num_tokens: int,
        hashes: list[bytes],
        num_prompt_tokens: int | None = None,
        token_budget: int = 2**31,
        max_hit_tokens: int = -1,
        max_new_tokens: int = -1,
        num_lookahead_tokens: int = 0,
        num_external_tokens: int = 0,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        watermark_blocks: int = 0,
        reserved_blocks: int = 0,
        defer_publish: bool = False,
        skip_lookup: bool = False,
    ) -> tuple[int, list[list[int]]] | None:
        """Hit tokens and new blocks; None = not admitted."""
        c = self.c
        seq = Seq(sid, list(hashes), num_tokens if num_prompt_tokens is None else num_prompt_tokens, num_tokens)
        limit = num_tokens - 1 if max_hit_tokens < 0 else min(num_tokens - 1, max_hit_tokens)
        hit, rows, seq.junction = self.lookup(s, seq, 0 if skip_lookup else limit)
        new = num_tokens - hit - num_external_tokens
        if 0 <= max_new_tokens < new:
            new = max_new_tokens
        new = max(0, min(new, token_budget))
        if not new and not hit and not num_external_tokens:
            return None
        total = min(hit + num_external_tokens, c.max_model_len)
        main = total + new
        slots = min(main + num_lookahead_tokens, c.max_model_len)

        def needs(slots: int, main: int, cap: bool) -> int:
            sum_ = 0
            for gid, group in enumerate(c.groups):
                if group.kind is GroupKind.CROSS_ATTENTION:
                    sum_ += self.need(seq, gid, [], 0, 0, num_encoder_tokens, 0, cap)
                else:
                    sum_ += self.need(seq, gid, rows[gid], hit, total, slots, main, cap)
            return sum_

        if full_sequence_must_fit:
            whole = min(num_tokens, c.max_model_len)
            if needs(whole, whole, True) + watermark_blocks > self.available(s):
                return None
        if any(row and row[-1] in self.gained[s] for row in rows):
            return None
        if needs(slots, main, False) + watermark_blocks > self.available(s) - reserved_blocks:
            return None
        seq.tables = [[] for _ in c.groups]
        seq.offered = [0] * len(c.groups)
        self.sessions[s].seqs[sid] = seq
        if num_external_tokens or any(rows):
            for gid, group in enumerate(c.groups):
                self._adopt(seq, gid, group, rows[gid], hit, total)
            for gid, group in enumerate(c.groups):
                if num_external_tokens and group.kind is not GroupKind.CROSS_ATTENTION:
                    size = group.block_size_tokens
                    count = 1 if group.kind in SCRATCH_KINDS else max(up(total, size) - len(seq.tables[gid]), 0)
                    seq.tables[gid] += self.take(count, s)
        out = []
        for gid, group in enumerate(c.groups):
            n = num_encoder_tokens if group.kind is GroupKind.CROSS_ATTENTION else slots
            out.append(self.grow(s, seq, gid, n, main, total, self.zeroing))
        if not defer_publish:
            self.publish(s, seq, min(main, num_tokens))
        return hit, out

    def _adopt(self, seq: Seq, gid: int, group: GroupConfig, row: list[int], hit: int, total: int) -> None:
        if group.kind in (*SCRATCH_KINDS, GroupKind.CROSS_ATTENTION):
            return
        size = group.block_size_tokens
        skipped = max(self.skip(gid, total) // size, 0)
        used = row[skipped:]
        self.touch(used)
        seq.tables[gid] = [0] * skipped + used
        seq.offered[gid] = len(seq.tables[gid])
        if used and hit % size and len(seq.tables[gid]) == up(hit, size):
            seq.offered[gid] -= 1
            seq.tail[gid] = len(seq.tables[gid]) - 1

    def free_sequence(self, s: int, sid: int, computed: int = 0, own: bool = False) -> None:
        seq = self.sessions[s].seqs[sid]
        if computed:
            self.publish(s, seq, computed)
        del self.sessions[s].seqs[sid]
        for table in seq.tables:
            self.let_go(table[::-1], (s, self.sessions[s].step), own)
        self.hand_offs = [h for h in self.hand_offs if h[0] != sid]

    def invalidate(self, s: int, sid: int, blocks: list[int]) -> None:
        seq = self.sessions[s].seqs[sid]
        for gid, table in enumerate(seq.tables):
            start = next((i for i, b in enumerate(table) if b and b in blocks), len(table))
            for b in table[start:]:
                if b:
                    self.drop_keys(b)
            seq.offered[gid] = min(seq.offered[gid], start)

    def evict(self, blocks: list[int]) -> None:
        for b in blocks:
            self.drop_keys(b)

    def reset(self, force: bool = False) -> bool:
        c = self.c
        if len(self.free) != c.num_blocks - 1 - c.num_reserved_low_blocks and not force:
            return False
        for block in self.blocks:
            block.keys = []
        self.order = {}
        for session in self.sessions.values():
            for seq in session.seqs.values():
                seq.stale = True
        self.events.append(["cleared"])
        return True

    # ------------------------------------------------------------ inspection
    def held_by(self, alive: bool) -> set[int]:
        held = set()
        for session in self.sessions.values():
            if (session.alive or not session.reaped) is alive:
                held |= {b for seq in session.seqs.values() for table in seq.tables for b in table if b}
                held |= {b for copy in session.copies for b in copy[2:]}
        return held

    def counts(self) -> dict[str, int]:
        cached = sum(bool(self.blocks[b].keys) for b in self.free)
        live = self.held_by(True)
        return {
            "free": len(self.free) - cached,
            "cached": cached,
            "held": len(live),
            "quarantined": len(self.held_by(False) - live),
        }

    def state(self) -> dict[str, Any]:
        return {
            "fq": list(self.free),
            "ref": [block.refs for block in self.blocks[1:]],
            "cache": sorted([digest, gid, blocks] for (gid, digest), blocks in self.order.items() if blocks),
            "tbl": {
                (s, sid): [list(t) for t in seq.tables]
                for s, session in self.sessions.items()
                for sid, seq in session.seqs.items()
            },
            "pri": [
                [b, block.keys[0].digest, block.keys[0].group, block.keys[0].tokens]
                for b, block in enumerate(self.blocks)
                if block.keys
            ],
        }
