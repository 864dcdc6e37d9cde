"""The node under a clock that the test moves: lives and deaths of sessions, in slices, without a wire."""

import itertools
import logging
from dataclasses import dataclass, field

import pytest

from kvhold_server.domain.ids import PoolName
from kvhold_server.domain.pool_config import GroupConfig, GroupKind
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.memory.fake import FakeBackend
from kvhold_server.node.identity import PoolOptions, PoolOverrides
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.node import Node
from kvhold_server.node.node_values import Shell
from kvhold_server.node.opening import Opening, OpenPoolCommand
from kvhold_server.node.step_values import StepCommand
from kvhold_server.pool.values import AdmitColumns, StepInput
from kvhold_server.quarantine_log import QuarantineLog
from kvhold_server.sessions.errors import SessionFenced
from kvhold_server.sessions.lease import LeaseTerms, SessionState
from kvhold_server.sessions.session import OpenRequest, Session

POOL = PoolName("p")
NUM_BLOCKS = 20_001


@dataclass(slots=True)
class World:
    """A node and its time."""

    now_s: float = 100.0
    node: Node = field(init=False)

    def __post_init__(self) -> None:
        secrets = itertools.count()
        self.node = Node(
            shell=Shell(boot_id="b", clock=lambda: self.now_s, new_secret=lambda: f"secret-{next(secrets)}"),
            backends={"fake": FakeBackend()},
            default_backend="fake",
            terms=LeaseTerms(lease_ttl_s=10.0, grace_s=5.0, unproven_grace_s=5.0, max_tick_s=1e9),
            limits=ServiceLimits(),
        )
        group = GroupConfig(kind=GroupKind.FULL, block_size_tokens=16)
        overrides = PoolOverrides(groups=(group,), num_blocks=NUM_BLOCKS, max_model_len_tokens=10**6)
        options = PoolOptions(backend="fake", overrides=overrides)
        opening = self.node.begin_open_pool(OpenPoolCommand(name=POOL, plan=None, options=options))
        assert isinstance(opening, Opening)
        self.node.finish_open_pool(opening, (), self.node.make_pool(opening, ()))

    @property
    def live(self) -> LivePool:
        return self.node.pools[POOL]

    def session(self) -> Session:
        return self.node.open_session(OpenRequest(pool=POOL), "").session

    def admit(self, session: Session, num_blocks: int, step: int = 1) -> None:
        """One sequence of so many blocks, all hashed, the step complete or not."""
        hashes = [bytes([session.order]) + i.to_bytes(31, "big") for i in range(num_blocks)]
        items = StepInput(step=step, token_budget=10**9)
        items.admit = AdmitColumns(
            sequence_ids=[1], num_tokens=[16 * num_blocks], hash_counts=[num_blocks], hashes=hashes
        )
        self.node.step(session, StepCommand(part=0, items=items))

    def tick_until_idle(self) -> int:
        """Number of slices."""
        return next(i for i in itertools.count(1) if not self.node.tick())


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(("num_blocks", "is_sliced"), [(10, False), (12_000, True)])
def test_closing_gives_everything_back_at_once_or_in_slices(world: World, num_blocks: int, is_sliced: bool) -> None:
    session = world.session()
    world.admit(session, num_blocks)
    closed = world.node.close_session(session.session_id, 1, 1)
    assert (closed.num_sequences, closed.num_blocks) == (1, num_blocks)
    assert world.node.session_use(session).num_sequences == is_sliced
    assert (world.tick_until_idle() > 10) == is_sliced
    counts = world.live.pool.counts()
    assert (counts.cached, counts.held, counts.quarantined, counts.fenced) == (num_blocks, 0, 0, 0)
    assert not world.node.sessions.sessions() and not world.live.members
    assert world.live.totals.num_reaped_sessions == 0
    world.live.pool.check_invariants()
    world.node.sessions.check_invariants()


def test_the_dead_are_cleaned_up_in_slices_between_which_others_work(world: World) -> None:
    dead, other = world.session(), world.session()
    world.admit(dead, 12_000)
    world.now_s += 5.1
    world.node.attach_stream(other.session_id, 1)
    assert world.node.tick()
    with pytest.raises(SessionFenced):
        world.node.fenced(dead.session_id, 1)
    for step in itertools.count(1):
        world.node.step(world.node.fenced(other.session_id, 1), StepCommand(part=0, items=StepInput(step=step)))
        world.live.pool.check_invariants()
        if not world.node.tick():
            break
    assert step > 10
    counts = world.live.pool.counts()
    assert (counts.free, counts.cached, counts.held) == (NUM_BLOCKS - 1, 0, 0), (
        "nothing was complete, nothing is cached"
    )


def test_expiry_counts_from_the_end_of_the_stream(world: World) -> None:
    session = world.session()
    stream = world.node.attach_stream(session.session_id, 1)
    world.now_s += 9.0
    world.node.keep_alive(session.session_id, 1, stream)
    world.now_s += 9.0
    world.node.tick()
    world.node.fenced(session.session_id, 1)
    world.node.stream_broken(session.session_id, stream)
    world.now_s += 4.9
    world.node.tick()
    world.node.fenced(session.session_id, 1)
    world.now_s += 0.2
    world.node.tick()
    with pytest.raises(SessionFenced):
        world.node.fenced(session.session_id, 1)


def test_deleting_a_pool_by_force_leaves_nothing_of_its_sessions(world: World) -> None:
    session = world.session()
    world.admit(session, 100)
    live = world.node.begin_delete_pool(POOL, force=True)
    assert live is not None
    world.node.finish_delete_pool(live)
    world.tick_until_idle()
    world.now_s += 10
    world.tick_until_idle()
    assert not world.node.sessions.sessions()


def test_blocks_of_a_dead_session_wait_from_its_death_on_not_from_when_they_are_counted(world: World) -> None:
    """ListSessions must not show a session that holds nothing and waits for nothing before the slices get to it."""
    dead, other = world.session(), world.session()
    world.admit(dead, 5000)
    world.node.step(dead, StepCommand(part=0, items=StepInput(step=2, completed_step=1)))
    admit = AdmitColumns(sequence_ids=[7], num_tokens=[16 * 101], hash_counts=[100])
    admit.hashes = [bytes([dead.order]) + i.to_bytes(31, "big") for i in range(100)]
    world.node.step(other, StepCommand(part=0, items=StepInput(step=1, token_budget=10**9, admit=admit)))
    world.node.attach_stream(other.session_id, 1)
    world.now_s += 5.1
    for session in world.node.sessions.expire(world.now_s):
        world.node._ended(session)
    seen = {world.node.session_use(dead).num_quarantined_blocks}
    while dead.state is SessionState.REAPING:
        world.node._reaper.work(world.now_s)
        seen.add(world.node.session_use(dead).num_quarantined_blocks)
    assert seen == {4900}, "all but those that the other session holds as well, at every moment"


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_the_log_speaks_of_dead_sessions_whose_blocks_wait_and_of_no_other(
    world: World, num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    session = world.session()
    watch = world.node.worker_mapped(POOL, 0, session.session_id, 4711, is_watched=True)
    if num_blocks:
        world.admit(session, num_blocks)
    else:
        world.node.step(session, StepCommand(part=0, items=StepInput(step=1)))
    log = QuarantineLog(world.node)
    with caplog.at_level(logging.INFO):
        world.node.close_session(session.session_id, 1, 0)
        while session.state is not SessionState.WAITING:
            world.node.tick()
        log.look()
        world.node.worker_gone(watch)
        world.now_s += 10.0
        world.tick_until_idle()
        log.look()
    said = [record.message for record in caplog.records]
    assert len(said) == (2 if num_blocks else 0), said
    if num_blocks:
        assert "closed_early: 3 blocks wait" in said[0] and "is settled" in said[1]
