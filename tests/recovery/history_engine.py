"""A scheduler and its workers in a random history: the client's own table, and kernels that run later than asked."""

import itertools
from collections import deque
from functools import partial
from typing import Any

from kvhold.v1 import block_pb2
from kvhold_client.sequence import SequenceState
from kvhold_client.sequence_table import SequenceTable
from kvhold_client.shape import GroupShape, PoolShape
from kvhold_client.step_reply import StepReply
from kvhold_server.node.recovering import PoolRecovering
from kvhold_server.pool.restore import HeldSequence
from kvhold_server.sessions.session import OpenRequest
from kvhold_server.sessions.session_table import Opened
from tests.recovery.history_bytes import STATE_TOKENS, UNIT, Kernel, Run, Write, key
from tests.recovery.history_world import POOL, World


class Engine:
    """A scheduler with the client's table, and its workers' kernels, which run later."""

    def __init__(self, world: World, tenant: str) -> None:
        self.world = world
        self.tenant = tenant
        self.is_alive = True
        self.runs: dict[int, Run] = {}
        self.kernels: deque[Kernel] = deque()
        self.done_step = self._part = self._sent = 0
        self.num_hit_tokens = self.num_drawn_blocks = 0
        self._ids = itertools.count(1)
        groups = tuple(
            GroupShape(
                kind=group.kind.value,
                block_size_tokens=group.block_size_tokens,
                sliding_window_tokens=group.window_tokens,
            )
            for group in world.live.config.groups
        )
        shape = PoolShape(groups=groups, hash_size_bytes=32, hash_block_size_tokens=UNIT)
        self.table = SequenceTable(shape, send=self._send, max_silent_steps=2)
        self._took(world.node.open_session(OpenRequest(pool=POOL, tenant=tenant), ""))

    # ------------------------------------------------------------------------ session
    def _took(self, opened: Opened) -> None:
        self._node = self.world.node
        self.session_id, self.epoch, self.token = opened.session.session_id, opened.session.epoch, opened.resume_token
        self._stream = self._node.attach_stream(self.session_id, self.epoch)

    @property
    def has_unsaid_draws(self) -> bool:
        """Its tables have blocks of which the node has no answer that they are held."""
        return self.is_alive and self.table._builder.num_drawn_blocks > 0

    def keep_alive(self) -> None:
        self._node.keep_alive(self.session_id, self.epoch, self._stream)

    def resume_if_needed(self) -> None:
        """After a restart: says what it holds. It gets back all of it."""
        while self.is_alive and self._node is not self.world.node:
            held = [self._held(sequence) for sequence in self.table.held_sequences()]
            live = self.world.live
            request = OpenRequest(pool=POOL, tenant=self.tenant)
            opened: list[Opened] = []

            def act(request: OpenRequest = request, held: list[HeldSequence] = held, found: Any = opened) -> None:
                found.append(self.world.node.open_session(request, self.token, lambda live: held))

            if not self.world.guarded(act):
                continue
            self._took(opened[0])
            assert opened[0].must_reassert
            lost = opened[0].lost_sequence_ids
            assert not lost, "whoever tells the truth loses nothing"
            for said in held:
                assert live.pool.tables(opened[0].session.slot, said.sequence_id) == said.tables
            self.table.lose(lost)
            live.pool.check_invariants()

    def _held(self, said: Any) -> HeldSequence:
        return HeldSequence(
            sequence_id=said.sequence_id,
            num_tokens=said.num_tokens,
            num_prompt_tokens=said.num_prompt_tokens,
            publish_tokens=said.publish_tokens,
            tables=[table.copy() for table in said.tables],
            hashes=[said.hashes[at : at + 32] for at in range(0, len(said.hashes), 32)],
        )

    def close(self) -> None:
        self.run_kernels()
        self.resume_if_needed()
        node = self.world.node
        self.is_alive = False
        self.world.guarded(lambda: node.close_session(self.session_id, self.epoch, min(self.done_step, self._sent)))

    # -------------------------------------------------------------------------- steps
    def _send(self, request: block_pb2.StepRequest) -> StepReply:
        """As the client's session does it: once, however often the daemon dies."""
        request.step, request.part, request.completed_step = self.table.step, self._part, self.table.completed_step
        self._part += 1
        self.num_drawn_blocks += request.num_drawn_blocks
        while True:
            self.resume_if_needed()
            request.session_id, request.epoch = self.session_id, self.epoch
            replies: list[StepReply] = []
            try:
                if self.world.guarded(partial(self._ask, request, replies)):
                    self._sent = self.table.step
                    return replies[0]
            except PoolRecovering:
                self.world.pass_time(0.4)

    def _ask(self, request: block_pb2.StepRequest, replies: list[StepReply]) -> None:
        replies.append(self.world.answer(self.tenant, request))

    def step(self) -> None:
        """Some sequences end, some go on, some begin."""
        choice = self.world.choice
        self._begin()
        plan: list[tuple[Run, int]] = []
        for run in list(self.runs.values()):
            if choice.random() < 0.15 or len(run.tokens) > 100:
                self._finish(run)
            elif choice.random() < 0.1:
                self._admit_again(run)
            elif choice.random() < 0.8:
                plan.append((run, self._grow(run)))
        if len(self.runs) < 5 and choice.random() < 0.6:
            prompt = choice.randrange(6)
            num_tokens = choice.choice([choice.randint(1, 60), 8 * choice.randint(1, 6)])
            self._admit(self._new_run(prompt), num_tokens)
        self._carry_out(plan)

    def admit(self, prompt: int, num_tokens: int) -> int:
        """A step with one sequence more, and all kernels up to it. Returns the tokens that it hit."""
        before = self.num_hit_tokens
        self._begin()
        self._admit(self._new_run(prompt), num_tokens)
        self._carry_out([])
        self.run_kernels()
        return self.num_hit_tokens - before

    def _begin(self) -> None:
        self._part = 0
        self.table.begin_step(self.table.step + 1, self.done_step)

    def _new_run(self, prompt: int) -> Run:
        return Run(self.table.new_sequence(next(self._ids)), prompt)

    def _carry_out(self, plan: list[tuple[Run, int]]) -> None:
        """Asks the node; what these sequences and those admitted compute becomes a kernel."""
        table = self.table
        outcome = table.flush(token_budget=10_000)
        for ask in outcome.refused_extends:
            if ask.sequence.sequence_id in self.runs:
                self._finish(self.runs[ask.sequence.sequence_id])
        for sequence in outcome.not_admitted:
            self._finish(self.runs[sequence.sequence_id])
        for run in list(self.runs.values()):
            if run.sequence.state is SequenceState.LOST:
                del self.runs[run.sequence.sequence_id], table.sequences[run.sequence.sequence_id]
        writes = [self._computed(run, num) for run, num in plan if run.sequence.sequence_id in self.runs]
        for admission in outcome.admitted:
            run = self.runs[admission.sequence.sequence_id]
            run.compute(admission.hit_tokens, self.world.version)
            self.num_hit_tokens += admission.hit_tokens
            writes.append(self._computed(run, admission.granted_tokens))
        copies = [(c.group_id, c.source_block_id, c.target_block_id) for c in outcome.copies]
        self.kernels.append(Kernel(table.step, outcome.zero_block_ids, copies, writes, outcome.handoffs))

    def _computed(self, run: Run, num: int) -> Write:
        start = len(run.tokens)
        run.compute(num, self.world.version)
        return Write(run, [table.copy() for table in run.sequence.tables], start, start + num)

    def _finish(self, run: Run) -> None:
        self.table.finish(run.sequence, computed_tokens=len(run.tokens))
        del self.runs[run.sequence.sequence_id]

    def _grow(self, run: Run) -> int:
        """Asks for some tokens more, no further than the next place at which a state is kept."""
        start = len(run.tokens)
        num = self.world.choice.randint(1, STATE_TOKENS - start % STATE_TOKENS)
        self._tell_hashes(run, start + num)
        if start + num > run.sequence.quiet_tokens:
            self.table.extend(
                run.sequence, slots_needed=start + num, processed_tokens=start, publish_tokens=start + num
            )
        return num

    def _tell_hashes(self, run: Run, num_tokens: int) -> None:
        known = run.sequence.num_hashes
        more = [key(run.prompt, unit) for unit in range(known, num_tokens // UNIT)]
        run.sequence.add_hashes(b"".join(more), len(more))

    def _admit(self, run: Run, num_tokens: int) -> None:
        self._tell_hashes(run, num_tokens)
        self.runs[run.sequence.sequence_id] = run
        self.table.admit(run.sequence, num_tokens=num_tokens)

    def _admit_again(self, run: Run) -> None:
        """Preempted, and asked for again at once."""
        num_tokens = len(run.tokens)
        self.table.preempt(run.sequence, computed_tokens=num_tokens)
        self._admit(Run(run.sequence, run.prompt), num_tokens)

    def run_kernels(self, num: int | None = None) -> None:
        """The oldest ones, in their order; all of them by default."""
        for _ in range(len(self.kernels) if num is None else min(num, len(self.kernels))):
            kernel = self.kernels.popleft()
            if self.is_alive:
                kernel.execute(self.world.memory, self.world.kinds)
            self.done_step = kernel.step
