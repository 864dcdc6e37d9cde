"""Random lives of many sessions against a model that is written for clarity: lists, no indexes, no states."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvhold_server.domain.ids import PoolName, SessionId
from kvhold_server.sessions.errors import ResumeRefused, SessionFenced, TooManySessions, UnknownSession
from kvhold_server.sessions.lease import LeaseTerms, SessionState
from kvhold_server.sessions.session import Credentials, OpenRequest, StreamId
from kvhold_server.sessions.session_table import SessionLimits, SessionTable
from kvhold_server.sessions.worker_watch import Watch

TERMS = LeaseTerms(lease_ttl_s=4.0, grace_s=2.0, unproven_grace_s=3.0, max_tick_s=1.0)
MAX_SESSIONS = 4
MAX_ENDS = 2
POOL = PoolName("p")


@dataclass
class Life:
    """What the model knows of one session."""

    id: str
    epoch: int
    tokens: list[str]  # good for a resume
    stream: StreamId | None = None  # up
    heard_s: float = 0.0
    alone_since_s: float = 0.0  # without a stream
    died_s: float | None = None
    workers: list[Watch] = field(default_factory=list)


class SessionLives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(
            terms=TERMS, limits=SessionLimits(max_sessions=MAX_SESSIONS, max_remembered_ends=MAX_ENDS)
        )
        self.now_s = 0.0
        self.made = 0
        self.lives: list[Life] = []
        self.ended: list[Life] = []

    def fresh(self) -> Credentials:
        self.made += 1
        return Credentials(session_id=SessionId(f"s{self.made}"), resume_token=f"t{self.made}")

    def open_lives(self) -> list[Life]:
        return [life for life in self.lives if life.died_s is None]

    @rule()
    def open(self) -> None:
        fresh = self.fresh()
        try:
            opened = self.table.open(OpenRequest(pool=POOL), fresh, self.now_s)
        except TooManySessions:
            assert len(self.lives) == MAX_SESSIONS
            return
        assert len(self.lives) < MAX_SESSIONS
        self.lives.append(Life(opened.session.session_id, 1, [opened.resume_token], alone_since_s=self.now_s))

    @rule(number=st.integers(1, 60))
    def resume(self, number: int) -> None:
        token, fresh = f"t{number}", self.fresh()
        owner = next((life for life in self.open_lives() if token in life.tokens), None)
        try:
            opened = self.table.resume(POOL, token, fresh, self.now_s)
        except ResumeRefused:
            assert owner is None
            return
        assert owner is not None and opened.session.session_id == owner.id
        owner.epoch += 1
        owner.tokens = [token, fresh.resume_token]
        owner.stream, owner.alone_since_s = None, self.now_s

    @rule(number=st.integers(1, 12), lag=st.integers(0, 2))
    def call(self, number: int, lag: int) -> None:
        """A mutating call with the current or an older epoch: yours, fenced or unknown, nothing else."""
        key = f"s{number}"
        life = next((life for life in self.lives if life.id == key), None)
        epoch = (life.epoch if life else 1) - lag
        expected: type[Exception] | None = None
        if life is None:
            expected = SessionFenced if key in [end.id for end in self.ended[-MAX_ENDS:]] else UnknownSession
        elif lag or life.died_s is not None:
            expected = SessionFenced
        try:
            self.table.require(key, epoch)
        except (SessionFenced, UnknownSession) as error:
            assert type(error) is expected
        else:
            assert expected is None and life is not None
            life.tokens = life.tokens[-1:]

    @precondition(lambda self: self.open_lives())
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(self.open_lives()))
        life.stream = self.table.attach_stream(life.id, life.epoch, self.now_s)
        life.heard_s, life.tokens = self.now_s, life.tokens[-1:]

    @precondition(lambda self: any(life.stream for life in self.open_lives()))
    @rule(data=st.data(), breaks=st.booleans())
    def stream_event(self, data: st.DataObject, breaks: bool) -> None:
        life = data.draw(st.sampled_from([life for life in self.open_lives() if life.stream]))
        assert life.stream is not None
        if breaks:
            self.table.stream_broken(life.id, life.stream, self.now_s)
            life.stream, life.alone_since_s = None, self.now_s
        else:
            self.table.keepalive(life.id, life.epoch, life.stream, self.now_s)
            life.heard_s = self.now_s

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), stream=st.integers(0, 6))
    def another_stream_breaks(self, data: st.DataObject, stream: int) -> None:
        """One that was replaced, or never was: it changes nothing."""
        life = data.draw(st.sampled_from(self.lives))
        if life.stream != stream:
            self.table.stream_broken(life.id, StreamId(stream), self.now_s)

    @precondition(lambda self: self.open_lives())
    @rule(data=st.data())
    def worker_maps(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(self.open_lives()))
        life.workers.append(
            self.table.watch.add(
                pool=POOL, rank=0, session_id=SessionId(life.id), pid=1, is_watched=True, now_s=self.now_s
            )
        )

    @precondition(lambda self: any(life.workers for life in self.lives))
    @rule(data=st.data())
    def worker_ends(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from([life for life in self.lives if life.workers]))
        self.table.watch.gone(life.workers.pop().id)

    @precondition(lambda self: self.open_lives())
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(self.open_lives()))
        assert self.table.kill(life.id, self.now_s) is not None
        self._died(life)

    @rule(ticks=st.integers(1, 8))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += 0.5
            due = [
                life.id
                for life in self.open_lives()
                if life.stream is None and self.now_s - life.alone_since_s > TERMS.grace_s
            ]
            for life in self.open_lives():
                if life.stream is not None and self.now_s - life.heard_s > TERMS.lease_ttl_s:
                    life.stream, life.alone_since_s = None, self.now_s
            assert sorted(session.session_id for session in self.table.expire(self.now_s)) == sorted(due)
            for life in self.lives:
                if life.id in due:
                    self._died(life)

    @rule()
    def clean_up(self) -> None:
        for session in self.table.dead():
            life = next(life for life in self.lives if life.id == session.session_id)
            if session.state is SessionState.REAPING:
                self.table.reaped(session.session_id)
            verdict = self.table.try_release(session.session_id, self.now_s)
            waited = self.now_s - life.alone_since_s >= TERMS.unproven_grace_s
            assert verdict.may_release == (waited and not life.workers)
            assert bool(verdict.reason) != verdict.may_release
            if verdict.may_release:
                self.table.released(session.session_id)
                self.lives.remove(life)
                self.ended.append(life)

    def _died(self, life: Life) -> None:
        life.died_s = self.now_s
        life.alone_since_s = self.now_s if life.stream is not None else life.alone_since_s
        life.stream, life.tokens = None, []

    @invariant()
    def agrees(self) -> None:
        self.table.check_invariants()
        assert [session.session_id for session in self.table.sessions()] == [life.id for life in self.lives]
        for session, life in zip(self.table.sessions(), self.lives, strict=True):
            assert session.epoch == life.epoch
            if life.died_s is None:
                assert session.state is (SessionState.LIVE if life.stream is not None else SessionState.GRACE)
            else:
                assert session.state in (SessionState.REAPING, SessionState.WAITING)


TestSessionLives = SessionLives.TestCase
TestSessionLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
