"""Random lives of many sessions on one node, against a model simple enough to be obviously right.

The model knows for each session whether it may act, since when it is silent, and how many blocks each sequence holds.
After every event the node must agree: who is fenced, how many blocks are held, and that nothing is lost.
"""

import random
from copy import deepcopy
from dataclasses import dataclass, field

import pytest

from kvhold_server.domain.errors import KvholdError
from kvhold_server.node.errors import StepContentsDiffer
from kvhold_server.node.step_values import StepAnswer, StepCommand
from kvhold_server.pool.values import AdmitColumns, ExtendColumns, FreeColumns, Status, StepInput
from kvhold_server.sessions.errors import ResumeRefused, SessionFenced
from kvhold_server.sessions.session import OpenRequest, StreamId
from tests.node.test_node import NUM_BLOCKS, POOL, World

LEASE_S, GRACE_S = 10.0, 5.0


@dataclass(slots=True)
class Known:
    """What the model remembers of a session."""

    session_id: str
    token: str
    epoch: int = 1
    is_open: bool = True
    stream: StreamId | None = None
    heard_at_s: float = 0.0
    silent_since_s: float = 0.0
    step: int = 0
    blocks: dict[int, int] = field(default_factory=dict)  # sequence → blocks
    last: tuple[StepInput, StepAnswer] | None = None


class Story:
    """One node, one model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World()
        self.sessions: list[Known] = []
        self.next_sequence = 1

    # ----------------------------------------------------------------- events
    def open(self) -> None:
        opened = self.world.node.open_session(OpenRequest(pool=POOL), "")
        known = Known(opened.session.session_id, opened.resume_token, silent_since_s=self.world.now_s)
        self.sessions.append(known)

    def attach(self, known: Known) -> None:
        known.stream = self.world.node.attach_stream(known.session_id, known.epoch)
        known.heard_at_s = self.world.now_s

    def speak(self, known: Known) -> None:
        if known.stream is not None:
            self.world.node.keep_alive(known.session_id, known.epoch, known.stream)
            known.heard_at_s = self.world.now_s

    def hang_up(self, known: Known) -> None:
        if known.stream is not None:
            self.world.node.stream_broken(known.session_id, known.stream)
            known.stream, known.silent_since_s = None, self.world.now_s

    def resume(self, known: Known) -> None:
        opened = self.world.node.open_session(OpenRequest(pool=POOL), known.token)
        assert opened.session.session_id == known.session_id and opened.session.epoch == known.epoch + 1
        known.epoch, known.token = opened.session.epoch, opened.resume_token
        known.stream, known.silent_since_s = None, self.world.now_s

    def close(self, known: Known) -> None:
        closed = self.world.node.close_session(known.session_id, known.epoch, known.step)
        assert (closed.num_sequences, closed.num_blocks) == (len(known.blocks), sum(known.blocks.values()))
        known.is_open = False
        known.blocks.clear()

    def admit(self, known: Known) -> None:
        count = self.random.randint(1, 40)
        items = self.items(known)
        columns = AdmitColumns(sequence_ids=[self.next_sequence], num_tokens=[16 * count], skip_lookup=[True])
        items.admit = columns
        if self.apply(known, items).output.admit_status == [Status.OK]:
            known.blocks[self.next_sequence] = count
        self.next_sequence += 1

    def extend(self, known: Known) -> None:
        if known.blocks:
            sequence, count = self.random.choice(list(known.blocks.items()))
            count += self.random.randint(-2, 5)
            items = self.items(known)
            items.extend = ExtendColumns(sequence_ids=[sequence], slots_needed=[16 * count], processed_tokens=[0])
            assert self.apply(known, items).output.extend_status == [Status.OK]
            known.blocks[sequence] = max(count, known.blocks[sequence])

    def free(self, known: Known) -> None:
        if known.blocks:
            sequence = self.random.choice(list(known.blocks))
            items = self.items(known)
            items.free = FreeColumns(sequence_ids=[sequence])
            assert self.apply(known, items).output.free_counts == [known.blocks.pop(sequence)]

    def repeat(self, known: Known) -> None:
        """A retried step gets the first answer, and nothing happens."""
        if known.last is not None:
            before = self.world.live.pool.counts()
            session = self.world.node.fenced(known.session_id, known.epoch)
            again = self.world.node.step(session, StepCommand(part=0, items=deepcopy(known.last[0])))
            assert again.replayed and again.output is known.last[1].output
            other = deepcopy(known.last[0])
            other.free.sequence_ids.append(10**9)
            with pytest.raises(StepContentsDiffer):
                self.world.node.step(session, StepCommand(part=0, items=other))
            assert self.world.live.pool.counts() == before

    def items(self, known: Known) -> StepInput:
        known.step += 1
        return StepInput(step=known.step, completed_step=known.step - 1, token_budget=10**9)

    def apply(self, known: Known, items: StepInput) -> StepAnswer:
        session = self.world.node.fenced(known.session_id, known.epoch)
        as_sent = deepcopy(items)
        answer = self.world.node.step(session, StepCommand(part=0, items=items))
        known.last = (as_sent, answer)
        return answer

    def pass_time(self) -> None:
        world = self.world
        world.now_s += self.random.uniform(0, 4)
        for known in self.sessions:
            if not known.is_open:
                continue
            if known.stream is not None:
                if world.now_s - known.heard_at_s > LEASE_S:
                    known.stream, known.silent_since_s = None, world.now_s
            elif world.now_s - known.silent_since_s > GRACE_S:
                known.is_open = False
                known.blocks.clear()
        world.tick_until_idle()

    # ----------------------------------------------------------------- checks
    def check(self) -> None:
        node, counts = self.world.node, self.world.live.pool.counts()
        held = sum(sum(known.blocks.values()) for known in self.sessions)
        assert counts.held + counts.quarantined == held
        assert counts.free + counts.cached + held == NUM_BLOCKS - 1
        for known in self.sessions:
            if known.is_open:
                assert node.fenced(known.session_id, known.epoch).session_id == known.session_id
                use = node.session_use(node.fenced(known.session_id, known.epoch))
                assert (use.num_sequences, use.num_held_blocks) == (len(known.blocks), sum(known.blocks.values()))
            else:
                with pytest.raises(SessionFenced):
                    node.fenced(known.session_id, known.epoch)
                with pytest.raises(ResumeRefused):
                    node.open_session(OpenRequest(pool=POOL), known.token)
            if known.epoch > 1:
                with pytest.raises(SessionFenced):
                    node.fenced(known.session_id, known.epoch - 1)
        node.sessions.check_invariants()


@pytest.mark.parametrize("seed", range(12))
def test_the_node_agrees_with_the_model_after_every_event(seed: int) -> None:
    story = Story(seed)
    acts = [story.attach, story.speak, story.speak, story.hang_up, story.resume, story.admit, story.admit, story.admit]
    acts += [story.extend, story.extend, story.free, story.repeat]
    for turn in range(250):
        open_ones = [known for known in story.sessions if known.is_open]
        chance = story.random.random()
        if not open_ones or (chance < 0.06 and len(open_ones) < 8):
            story.open()
        elif chance < 0.16:
            story.pass_time()
        elif chance < 0.18:
            story.close(story.random.choice(open_ones))
        else:
            try:
                story.random.choice(acts)(story.random.choice(open_ones))
            except KvholdError as error:
                raise AssertionError(f"turn {turn}: {error.reason()}: {error}") from error
        story.check()
        if turn % 25 == 0:
            story.world.live.pool.check_invariants()
    assert sum(not known.is_open for known in story.sessions) > 2, "some of them died"
