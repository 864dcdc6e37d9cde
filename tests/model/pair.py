"""A pool and its naive model side by side: every verb goes to both, and everything that can be seen must be equal."""

import random
from dataclasses import dataclass, field
from typing import Any

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig
from kvhold_server.pool.errors import BlocksInUse, NeverFits
from kvhold_server.pool.values import Bound, ExtendColumns, Status, StepInput, StepOutput
from tests.model.by_hand import HandPool
from tests.model.naive import NaivePool, Seq

BIG = 2**31 - 1


def full(size: int = 4, **more: Any) -> GroupConfig:
    return GroupConfig(kind=GroupKind.FULL, block_size_tokens=size, **more)


def window(size: int, tokens: int, **more: Any) -> GroupConfig:
    return GroupConfig(kind=GroupKind.SLIDING_WINDOW, block_size_tokens=size, window_tokens=tokens, **more)


def chunked(size: int, tokens: int) -> GroupConfig:
    return GroupConfig(kind=GroupKind.CHUNKED_LOCAL, block_size_tokens=size, chunk_tokens=tokens)


def mamba(size: int, mode: MambaMode = MambaMode.ALIGN, **more: Any) -> GroupConfig:
    return GroupConfig(kind=GroupKind.MAMBA, block_size_tokens=size, mamba_mode=mode, **more)


def of_kind(kind: GroupKind, size: int = 4, **more: Any) -> GroupConfig:
    return GroupConfig(kind=kind, block_size_tokens=size, **more)


def pool_of(*groups: GroupConfig, unit: int = 4, block: int = 4, num_blocks: int = 24, **more: Any) -> PoolConfig:
    return PoolConfig(
        groups=groups,
        num_blocks=num_blocks,
        hash_unit_tokens=unit,
        scheduler_block_tokens=block,
        max_model_len=more.pop("max_model_len", 96),
        **more,
    )


CONFIGS: dict[str, PoolConfig] = {
    "full": pool_of(full()),
    "full_bulk": pool_of(full(1), unit=1, block=1, num_blocks=200),  # long enough for what is done in bulk
    "full_low_reserved": pool_of(full(), num_reserved_low_blocks=5, num_blocks=28),
    "full_eagle": pool_of(full(), use_eagle=True),
    "full_uncached": pool_of(full(), enable_caching=False),
    "mla_sink": pool_of(of_kind(GroupKind.MLA), of_kind(GroupKind.SINK_FULL), num_blocks=40),
    "rswa": pool_of(of_kind(GroupKind.RSWA, window_tokens=8)),
    "window5": pool_of(window(4, 5)),
    "window8_retained": pool_of(window(4, 8, extra_retained_tokens=4), use_eagle=True),
    "window1": pool_of(full(), window(4, 1), num_blocks=36),
    "window9_sparse": pool_of(window(4, 9), retention_interval_tokens=0),
    "window9_flight": pool_of(window(4, 9), max_in_flight_tokens=12),
    "chunk": pool_of(chunked(4, 8)),
    "full_chunk": pool_of(full(), chunked(4, 8), num_blocks=36),
    "full_window": pool_of(full(), window(4, 8), num_blocks=36),
    "full_window_eagle": pool_of(full(), window(4, 8), num_blocks=40, use_eagle=True),
    "full8_window4": pool_of(full(8), window(4, 8), unit=4, block=8, num_blocks=40),
    "full4_window8": pool_of(full(4), window(8, 9), unit=4, block=8, num_blocks=40),
    "full_two_windows": pool_of(full(), window(4, 6, is_eagle=True), window(4, 13), num_blocks=48, use_eagle=True),
    "full_same_windows": pool_of(full(), window(4, 8), window(4, 8), num_blocks=48),
    "full_window_ret16": pool_of(full(), window(4, 8), num_blocks=36, retention_interval_tokens=16),
    "full_window_lookahead": pool_of(
        full(), window(4, 8), num_blocks=40, use_eagle=True, num_prefill_lookahead_tokens=3
    ),
    "windows_only": pool_of(window(4, 6), window(8, 12), unit=4, block=8, num_blocks=36),
    "full_ring": pool_of(full(), of_kind(GroupKind.RING), num_blocks=28),
    "full_kpool": pool_of(full(), of_kind(GroupKind.KPOOL_TAIL, window_tokens=4), num_blocks=28),
    "full_cross": pool_of(full(), of_kind(GroupKind.CROSS_ATTENTION), num_blocks=36, enable_caching=False),
    "mamba_none": pool_of(
        full(16), mamba(96, MambaMode.NONE, num_speculative_blocks=1), unit=16, block=96, enable_caching=False
    ),
    "mamba_all": pool_of(full(16), mamba(16, MambaMode.ALL), unit=16, block=16, num_blocks=24),
    "mamba_align": pool_of(full(16), mamba(16), unit=16, block=16, num_blocks=24),
    "mamba_fine": pool_of(full(16), mamba(16), unit=4, block=16, num_blocks=26),
    "mamba_fine_tight": pool_of(full(16), mamba(16), unit=4, block=16, num_blocks=11, max_model_len=64),
    "mamba_fine_small": pool_of(full(4), mamba(16), unit=4, block=16, num_blocks=48),
    "mamba_spec_eagle": pool_of(
        full(16, is_eagle=True), mamba(16, num_speculative_blocks=2), unit=4, block=16, num_blocks=34, use_eagle=True
    ),
    "mamba_checkpoint": pool_of(
        full(16),
        mamba(16, num_checkpoint_blocks=1, checkpoint_alignment_tokens=4),
        unit=4,
        block=16,
        num_blocks=34,
        retention_interval_tokens=0,
    ),
    "mamba_checkpoint_eagle": pool_of(
        full(16, is_eagle=True),
        mamba(16, num_checkpoint_blocks=1, checkpoint_alignment_tokens=16),
        unit=16,
        block=16,
        num_blocks=34,
        use_eagle=True,
    ),
    "mamba_checkpoint_fine_eagle": pool_of(
        full(16, is_eagle=True),
        mamba(16, num_checkpoint_blocks=1, checkpoint_alignment_tokens=4),
        unit=4,
        block=16,
        num_blocks=34,
        use_eagle=True,
    ),
    "mamba_window_junction": pool_of(
        full(16),
        mamba(16),
        window(4, 9),
        unit=4,
        block=16,
        num_blocks=60,
        keep_shared_prefix_checkpoints=True,
        retention_interval_tokens=32,
    ),
}


@dataclass(slots=True)
class Client:
    """What a scheduler knows of one of its sequences."""

    sid: int
    digests: list[bytes]  # of all units of the longest text it may grow to
    num_tokens: int
    num_prompt: int
    computed: int = 0
    sent: int = 0


@dataclass(slots=True)
class Engine:
    """One session."""

    serial: int
    step: int = 1
    completed: int = 0
    running: dict[int, Client] = field(default_factory=dict)


class Pair:
    """Applies operations to both, and compares."""

    def __init__(
        self, config: PoolConfig, *, max_sessions: int = 3, check_every: int = 1, tells_stored: bool = True
    ) -> None:
        self.config = config
        self.pool = HandPool(config)
        self.pool.store.prefixes.tells_stored = tells_stored
        self.model = NaivePool(config)
        self.engines: dict[int, Engine] = {}
        self.dead: list[int] = []
        self.max_sessions = max_sessions
        self.check_every = check_every
        self.next_sid = 1
        self.num_operations = 0

    # ------------------------------------------------------------ one random operation
    def random_operation(self, rng: random.Random) -> None:
        """Weights favour what schedulers do all the time."""
        self.num_operations += 1
        if not self.engines or (len(self.engines) < self.max_sessions and rng.random() < 0.02):
            self.open_session()
            return
        engine = rng.choice(list(self.engines.values()))
        verb = rng.choices(
            (
                self.admit,
                self.extend,
                self.free,
                self.next_step,
                self.complete,
                self.upkeep,
                self.end_session,
                self.late,
                self.grow_together,
            ),
            (22, 40, 12, 14, 8, 3, 0.7, 2, 8),
        )[0]
        verb(engine, rng)

    def random_text(self, rng: random.Random) -> list[bytes]:
        """Hashes of a text that shares a beginning with others: a few trees of prefixes."""
        unit = self.config.hash_unit_tokens
        num = self.config.max_model_len // unit
        root, branch = rng.randrange(3), rng.randrange(3)
        split = rng.randrange(num + 1)
        return [
            f"{root}/{branch if i >= split else ''}/{split if i >= split else ''}/{i}".encode().ljust(16, b".")
            for i in range(num)
        ]

    def open_session(self) -> None:
        serial = self.pool.open_session()
        assert serial == self.model.open_session()
        self.engines[serial] = Engine(serial)
        self.begin(self.engines[serial])
        self.compare()

    def begin(self, engine: Engine) -> None:
        self.pool.begin_step(engine.serial, engine.step, engine.completed)
        self.model.begin_step(engine.serial, engine.step, engine.completed)

    def next_step(self, engine: Engine, rng: random.Random) -> None:
        self.compare_copies(self.pool.end_step(engine.serial))
        engine.step += 1
        engine.completed = max(engine.completed, engine.step - rng.choice((1, 1, 2, 3)))
        self.begin(engine)
        self.compare()

    def compare_copies(self, output: StepOutput) -> None:
        copies = [(c.group, c.source, c.target) for c in output.copies]
        model = self.model
        ours = {(c.group, c.source, c.target) for c in output.copies}
        assert copies == sorted((c for c in model.copies if c in ours), key=lambda c: c[0]), (copies, model.copies)
        model.copies = [c for c in model.copies if c not in ours]

    def complete(self, engine: Engine, rng: random.Random) -> None:
        engine.completed = rng.randint(engine.completed, engine.step)
        self.pool.complete(engine.serial, engine.completed)
        self.model.complete(engine.serial, engine.completed)
        if engine.completed == engine.step:  # what comes next belongs to a step that is not complete
            self.next_step(engine, rng)
        self.compare()

    def late(self, engine: Engine, rng: random.Random) -> None:
        """Reads, and publishes late."""
        digests = self.random_text(rng)
        num = rng.randint(1, self.config.max_model_len)
        digests = digests[: num // self.config.hash_unit_tokens]
        hit = self.pool.lookup(engine.serial, num_tokens=num, hashes=digests)
        model = self.model.lookup(engine.serial, Seq(0, digests), num - 1)
        assert (hit.hit_tokens, hit.blocks, hit.boundary_tokens) == model
        if engine.running:
            client = rng.choice(list(engine.running.values()))
            self.pool.publish(engine.serial, client.sid, publish_tokens=client.computed)
            self.model.publish(engine.serial, self.model.sessions[engine.serial].seqs[client.sid], client.computed)
        self.compare()

    def admit(self, engine: Engine, rng: random.Random) -> None:
        unit = self.config.hash_unit_tokens
        digests = self.random_text(rng)
        num_tokens = rng.randint(1, self.config.max_model_len)
        num_prompt = num_tokens if rng.random() < 0.8 else rng.randint(1, num_tokens)
        sid, self.next_sid = self.next_sid, self.next_sid + 1
        hashes = digests[: num_tokens // unit]
        item: dict[str, Any] = {
            "num_tokens": num_tokens,
            "num_prompt_tokens": num_prompt,
            "max_new_tokens": rng.choice((-1, unit, 2 * unit, 16, rng.randint(1, 40))),
            "max_hit_tokens": rng.choice((-1, -1, -1, -1, rng.randint(0, num_tokens))),
            "num_lookahead_tokens": rng.choice((0, 0, 0, 2, 5)),
            "full_sequence_must_fit": rng.random() < 0.2,
            "watermark_blocks": rng.choice((0, 0, 0, 2)),
            "reserved_blocks": rng.choice((0, 0, 0, 3)),
            "defer_publish": rng.random() < 0.05,
            "skip_lookup": rng.random() < 0.05,
            "num_encoder_tokens": rng.choice((0, 4, 9)),
        }
        if rng.random() < 0.05:
            item["num_external_tokens"] = rng.randint(0, num_tokens // 2)
            item["max_hit_tokens"] = num_tokens // 2
        try:
            answer = self.pool.admit(engine.serial, sid, token_budget=BIG, hashes=list(hashes), **item)
            ours = (answer.hit_tokens, answer.new_blocks) if answer.status is Status.OK else None
            assert answer.status is Status.OK or answer.bound is not Bound.NONE or not answer.new_tokens
        except NeverFits:
            answer, ours = None, None
        model = self.model.admit(engine.serial, sid, hashes=list(hashes), **item)
        assert ours == model, (ours, model, item)
        if answer is not None and ours is not None:
            computed = answer.hit_tokens + item.get("num_external_tokens", 0) + answer.new_tokens
            engine.running[sid] = Client(sid, digests, num_tokens, num_prompt, computed, len(hashes))
            assert answer.tables == self.model.sessions[engine.serial].seqs[sid].tables
            assert answer.boundary_tokens == self.model.sessions[engine.serial].seqs[sid].junction
        self.compare()

    def extend(self, engine: Engine, rng: random.Random) -> None:
        if not engine.running:
            return
        client = rng.choice(list(engine.running.values()))
        unit, top = self.config.hash_unit_tokens, self.config.max_model_len
        if client.computed >= client.num_tokens and client.num_tokens < top:
            client.num_tokens += 1
        new = min(client.num_tokens - client.computed, rng.choice((1, unit, 16, 40)))
        main = client.computed + new
        if new <= 0:
            return
        hashes = client.digests[client.sent : client.num_tokens // unit]
        slots = min(main + rng.choice((0, 0, 0, 3)), top)
        item = {
            "slots_needed": slots,
            "num_lookahead_tokens": slots - main,
            "processed_tokens": max(0, client.computed - rng.choice((0, 0, 1, 7))),
            "computed_tokens": client.computed,
            "publish_tokens": rng.choice((main, main, main, 0)),
            "num_encoder_tokens": rng.choice((0, 4)),
            "reserved_blocks": rng.choice((0, 0, 0, 2)),
        }
        answer = self.pool.extend(engine.serial, client.sid, hashes=list(hashes), **item)
        ours = answer.new_blocks if answer.status is Status.OK else None
        model = self.model.extend(engine.serial, client.sid, hashes=list(hashes), **item)
        assert ours == model, (ours, model, item)
        if ours is not None:
            client.computed = main
            client.sent += len(hashes)
        elif rng.random() < 0.7:  # preempt the last
            self.free_one(engine, list(engine.running.values())[-1], rng)
        self.compare()

    def grow_together(self, engine: Engine, rng: random.Random) -> None:
        """One step that extends many sequences, as the wire sends it: as if one after the other."""
        unit, top = self.config.hash_unit_tokens, self.config.max_model_len
        columns, mains, clients = ExtendColumns(), [], list(engine.running.values())
        rng.shuffle(clients)
        for client in clients:
            client.num_tokens = min(top, max(client.num_tokens, client.computed + rng.choice((0, 1, unit))))
            main = min(client.num_tokens, client.computed + rng.choice((1, unit, unit, 16)))
            hashes = client.digests[client.sent : client.num_tokens // unit]
            columns.sequence_ids.append(client.sid)
            columns.slots_needed.append(main)
            columns.processed_tokens.append(client.computed)
            columns.publish_tokens.append(main)
            columns.hash_counts.append(len(hashes))
            columns.hashes += hashes
            mains.append((client, main, hashes))
        self.compare_copies(self.pool.end_step(engine.serial))  # of the verbs before
        output = self.pool.step(
            engine.serial, StepInput(step=engine.step, completed_step=engine.completed, extend=columns)
        )
        num_groups, flat, tried = len(self.config.groups), output.extend_blocks, True
        at = 0
        for i, (client, main, hashes) in enumerate(mains):
            counts = output.extend_counts[i * num_groups : (i + 1) * num_groups]
            new = []
            for count in counts:
                new.append(flat[at : at + count])
                at += count
            if not tried:
                assert output.extend_status[i] == Status.NOT_TRIED
                continue
            model = self.model.extend(
                engine.serial,
                client.sid,
                hashes=list(hashes),
                slots_needed=main,
                processed_tokens=client.computed,
                publish_tokens=main,
            )
            tried = output.extend_status[i] == Status.OK
            assert (new if tried else None) == model, (new, model)
            if tried:
                client.computed = main
                client.sent += len(hashes)
        self.compare_copies(output)
        self.compare()

    def free(self, engine: Engine, rng: random.Random) -> None:
        if engine.running:
            self.free_one(engine, rng.choice(list(engine.running.values())), rng)
            self.compare()

    def free_one(self, engine: Engine, client: Client, rng: random.Random) -> None:
        own = rng.random() < 0.1
        computed = rng.choice((0, client.computed))
        del engine.running[client.sid]
        self.pool.free(engine.serial, client.sid, computed_tokens=computed, fence_own=own)
        self.model.free_sequence(engine.serial, client.sid, computed, own)

    def upkeep(self, engine: Engine, rng: random.Random) -> None:
        verb = rng.choice(("evict", "invalidate", "reset", "force"))
        if verb == "evict":
            blocks = rng.sample(range(self.config.num_blocks), 3)
            self.pool.evict(blocks)
            self.model.evict(blocks)
        elif verb == "invalidate" and engine.running:
            client = rng.choice(list(engine.running.values()))
            table = rng.choice(self.pool.tables(engine.serial, client.sid))
            blocks = [rng.choice(table)] if table else []
            self.pool.invalidate(engine.serial, client.sid, blocks)
            self.model.invalidate(engine.serial, client.sid, blocks)
        elif verb in ("reset", "force"):
            force = verb == "force" and rng.random() < 0.2
            try:
                self.pool.reset(force=force)
                done = True
            except BlocksInUse:
                done = False
            assert done == self.model.reset(force)
        self.compare()

    def end_session(self, engine: Engine, rng: random.Random) -> None:
        serial = engine.serial
        del self.engines[serial]
        if rng.random() < 0.3:
            self.pool.end_step(serial)
            self.pool.close_session(serial)
            self.model.close_session(serial)
            self.compare()
            return
        self.pool.kill_session(serial)
        self.model.kill_session(serial)
        try:
            self.pool.extend(serial, 1, slots_needed=1, processed_tokens=0)
        except KvholdError:
            pass
        else:
            raise AssertionError("a dead session was served")
        self.compare()
        while not self.pool.reap(serial, rng.choice((1, 300))):
            self.pool.check_invariants()
        self.model.reap(serial)
        self.dead.append(serial)
        self.compare()
        if len(self.dead) > 1 or rng.random() < 0.5:
            gone = self.dead.pop(0)
            while not self.pool.release_quarantine(gone, rng.choice((1, 300))):
                self.pool.check_invariants()
            self.model.release(gone)
            self.compare()

    # ------------------------------------------------------------ everything that can be seen
    def compare(self) -> None:
        self.pool.take_events()
        state, model = self.pool.describe(), self.model.state()
        assert state.free_order == model["fq"]
        assert state.refs == model["ref"]
        assert sorted([h, g, b] for h, g, b in state.cache) == model["cache"]
        assert state.tables == model["tbl"]
        assert [list(p) for p in state.primaries] == model["pri"]
        counts = self.pool.counts()
        ours = {name: getattr(counts, name) for name in ("free", "cached", "held", "quarantined")}
        assert ours == self.model.counts(), (ours, self.model.counts())
        for serial in self.engines:
            assert self.pool.available(serial) == self.model.available(serial), serial
        if self.num_operations % self.check_every == 0:
            self.pool.check_invariants()

    def drain(self) -> None:
        """Everybody leaves: every block must be free again."""
        for serial in list(self.engines):
            self.pool.close_session(serial)
            self.model.close_session(serial)
        for serial in self.dead:
            while not self.pool.release_quarantine(serial, 100):
                pass
            self.model.release(serial)
        self.engines, self.dead = {}, []
        self.compare()
        counts = self.pool.counts()
        assert counts.available == counts.total - 1 - counts.reserved and not counts.fenced and not counts.provisional
        self.pool.reset()
        assert not self.pool.describe().cache
