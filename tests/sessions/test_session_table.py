"""Opening, resuming, fencing, expiry: one behaviour a test. Times are made up; ids and tokens are counted."""

from itertools import count

import pytest

from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.ids import Epoch, PoolName, SessionId
from kvhold_server.sessions.errors import (
    BootIdMismatch,
    ResumeRefused,
    SessionFenced,
    TooManySessions,
    UnknownSession,
)
from kvhold_server.sessions.lease import LeaseTerms, SessionState
from kvhold_server.sessions.resume_tokens import token_digest
from kvhold_server.sessions.session import Credentials, EndCause, OpenRequest, Session
from kvhold_server.sessions.session_table import Opened, RestoredSession, SessionLimits, SessionTable

POOL = PoolName("p")
TERMS = LeaseTerms(lease_ttl_s=10.0, grace_s=5.0, unproven_grace_s=5.0, max_tick_s=1.0)
_numbers = count(1)


def credentials() -> Credentials:
    number = next(_numbers)
    return Credentials(session_id=SessionId(f"session-{number:08d}"), resume_token=f"token-{number}")


def make_table(**limits: int) -> SessionTable:
    return SessionTable(boot_id="boot", terms=TERMS, limits=SessionLimits(**limits))


def open_session(table: SessionTable, now_s: float = 0.0, **request: str | int) -> Opened:
    return table.open(OpenRequest(pool=POOL, **request), credentials(), now_s)  # type: ignore[arg-type]


def tick(table: SessionTable, start_s: float, end_s: float) -> dict[str, float]:
    """Runs the timer as the shell does; returns when each session expired."""
    expired: dict[str, float] = {}
    steps = round((end_s - start_s) * 4)
    for i in range(steps + 1):
        now_s = start_s + i / 4
        for session in table.expire(now_s):
            expired[session.session_id] = now_s
        table.check_invariants()
    return expired


def bury(table: SessionTable, session: Session, now_s: float) -> None:
    table.reaped(session.session_id)
    assert table.try_release(session.session_id, now_s).may_release
    table.released(session.session_id)
    table.check_invariants()


def test_an_open_session_is_its_callers() -> None:
    table = make_table()
    opened = open_session(table)
    assert opened.is_new and opened.session.epoch == 1
    assert table.require(opened.session.session_id, 1) is opened.session


def test_a_client_that_dies_before_its_first_request_is_noticed() -> None:
    """DMN-01: liveness starts at registration, not at first traffic."""
    table = make_table()
    opened = open_session(table)
    expired = tick(table, 0.0, 7.0)
    assert TERMS.grace_s < expired[opened.session.session_id] <= TERMS.grace_s + 1.0
    assert open_session(table, 7.0).is_new, "the same name may register again at once"


def test_an_idle_client_with_a_stream_is_kept() -> None:
    table = make_table()
    session = open_session(table).session
    stream = table.attach_stream(session.session_id, 1, 0.0)
    for minute in range(100):
        start_s = minute * 3.0
        assert tick(table, start_s, start_s + 3.0) == {}
        table.keepalive(session.session_id, 1, stream, start_s + 3.0)


def test_a_broken_stream_starts_the_grace_period_and_its_end_the_reaping() -> None:
    table = make_table()
    session = open_session(table).session
    stream = table.attach_stream(session.session_id, 1, 0.0)
    tick(table, 0.0, 2.0)
    table.stream_broken(session.session_id, stream, 2.0)
    assert session.state is SessionState.GRACE and table.grace_left_s(session, 3.0) == 4.0
    expired = tick(table, 2.0, 9.0)
    assert 7.0 < expired[session.session_id] <= 8.0
    assert session.end_cause is EndCause.EXPIRED
    assert table.dead() == [session]


def test_a_silent_stream_counts_as_broken_and_recovers_when_it_speaks_in_time() -> None:
    table = make_table()
    session = open_session(table).session
    stream = table.attach_stream(session.session_id, 1, 0.0)
    assert tick(table, 0.0, 12.0) == {}
    assert session.state is SessionState.GRACE
    table.keepalive(session.session_id, 1, stream, 12.0)
    assert session.state is SessionState.LIVE
    assert session.session_id in tick(table, 12.0, 29.0)


def test_attaching_again_ends_the_grace_period_and_makes_the_old_stream_irrelevant() -> None:
    table = make_table()
    session = open_session(table).session
    first = table.attach_stream(session.session_id, 1, 0.0)
    second = table.attach_stream(session.session_id, 1, 0.0)
    table.stream_broken(session.session_id, first, 1.0)
    assert session.state is SessionState.LIVE
    table.stream_broken(session.session_id, second, 1.0)
    assert session.state is SessionState.GRACE


def test_resuming_fences_the_old_epoch() -> None:
    """DMN-15: the former owner wakes up and finds that it lost."""
    table = make_table()
    opened = open_session(table)
    resumed = table.resume(POOL, opened.resume_token, credentials(), 1.0)
    assert resumed.session is opened.session and resumed.session.epoch == 2 and not resumed.is_new
    with pytest.raises(SessionFenced) as caught:
        table.require(opened.session.session_id, 1)
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    assert caught.value.why == "the session was resumed since"
    with pytest.raises(SessionFenced, match="nobody was ever given this epoch, the newest is 2"):
        table.require(opened.session.session_id, 3)
    with pytest.raises(SessionFenced):
        table.close(opened.session.session_id, 1, 0, 1.0)
    with pytest.raises(SessionFenced):
        table.attach_stream(opened.session.session_id, 1, 1.0)
    assert table.require(opened.session.session_id, 2) is opened.session


def test_an_old_stream_cannot_end_a_resumed_session() -> None:
    table = make_table()
    opened = open_session(table)
    session = opened.session
    old = table.attach_stream(session.session_id, 1, 0.0)
    table.resume(POOL, opened.resume_token, credentials(), 1.0)
    table.attach_stream(session.session_id, 2, 1.0)
    table.stream_broken(session.session_id, old, 2.0)
    assert session.state is SessionState.LIVE


def test_a_resume_whose_answer_was_lost_can_be_repeated_until_the_new_epoch_is_used() -> None:
    table = make_table()
    opened = open_session(table)
    table.resume(POOL, opened.resume_token, credentials(), 1.0)  # the answer is lost
    again = table.resume(POOL, opened.resume_token, credentials(), 2.0)
    assert again.session.epoch == 3
    table.check_invariants()
    table.require(again.session.session_id, 3)
    with pytest.raises(ResumeRefused):
        table.resume(POOL, opened.resume_token, credentials(), 3.0)
    assert table.resume(POOL, again.resume_token, credentials(), 3.0).session.epoch == 4
    table.check_invariants()


def test_wrong_tokens_pools_and_the_dead_are_not_resumed() -> None:
    table = make_table()
    opened = open_session(table)
    with pytest.raises(ResumeRefused, match="another pool"):
        table.resume(PoolName("q"), opened.resume_token, credentials(), 0.0)
    with pytest.raises(ResumeRefused):
        table.resume(POOL, opened.session.session_id, credentials(), 0.0)
    table.kill(opened.session.session_id, 0.0)
    with pytest.raises(ResumeRefused):
        table.resume(POOL, opened.resume_token, credentials(), 0.0)
    assert opened.session.epoch == 1


def test_a_retried_open_returns_the_same_session_until_it_is_used() -> None:
    table = make_table()
    first = open_session(table, request_id="r1", client_name="c")
    retried = open_session(table, request_id="r1", client_name="c")
    assert retried.session is first.session and retried.resume_token == first.resume_token and not retried.is_new
    assert open_session(table, request_id="r1", client_name="d").session is not first.session
    table.attach_stream(first.session.session_id, 1, 0.0)
    with pytest.raises(InvalidField, match="request_id"):
        open_session(table, request_id="r1", client_name="c")


def test_sessions_are_bounded_in_all_and_per_tenant_and_refusals_leave_no_trace() -> None:
    table = make_table(max_sessions=3, max_sessions_per_tenant=2)
    for _ in range(2):
        open_session(table, tenant="red")
    with pytest.raises(TooManySessions, match="tenant red"):
        open_session(table, tenant="red")
    open_session(table, tenant="blue")
    with pytest.raises(TooManySessions, match="all tenants"):
        open_session(table, tenant="green")
    assert len(table.sessions()) == 3
    table.check_invariants()


@pytest.mark.parametrize(
    ("field", "value"),
    [("client_name", "x" * 129), ("tenant", ""), ("tenant", "x" * 65), ("request_id", "x" * 65)],
)
def test_texts_are_bounded(field: str, value: str) -> None:
    table = make_table()
    with pytest.raises(InvalidField, match=field):
        open_session(table, **{field: value})
    assert table.sessions() == []


def test_the_late_call_of_an_ended_session_is_fenced_and_of_an_unknown_one_unknown() -> None:
    table = make_table(max_remembered_ends=1)
    session = open_session(table).session
    table.kill(session.session_id, 0.0)
    with pytest.raises(SessionFenced, match="killed"):
        table.require(session.session_id, 1)
    bury(table, session, 100.0)
    with pytest.raises(SessionFenced, match="killed"):
        table.require(session.session_id, 1)
    with pytest.raises(UnknownSession) as caught:
        table.require("a-guessed-session-id", 1)
    assert caught.value.short_id == "a-guesse", "errors never repeat a whole id"
    second = open_session(table).session
    table.kill(second.session_id, 100.0)
    bury(table, second, 200.0)
    with pytest.raises(UnknownSession):
        table.require(session.session_id, 1)


def test_closing_is_orderly_only_if_every_step_is_complete() -> None:
    table = make_table()
    early, orderly = open_session(table).session, open_session(table).session
    for session in (early, orderly):
        session.steps.finish(9, 0, 8, "answer")
    assert table.close(early.session_id, 1, 0, 1.0) is early
    assert table.close(orderly.session_id, 1, 9, 1.0) is orderly
    assert (early.end_cause, orderly.end_cause) == (EndCause.CLOSED_EARLY, EndCause.CLOSED)
    table.reaped(early.session_id)
    table.reaped(orderly.session_id)
    assert table.try_release(orderly.session_id, 1.0).may_release
    assert not table.try_release(early.session_id, 1.0).may_release
    assert "client is not watched" in table.quarantine_reason(early.session_id, 1.0)
    assert table.try_release(early.session_id, 6.0).may_release


def test_closing_twice_succeeds_and_changes_nothing() -> None:
    table = make_table()
    session = open_session(table).session
    assert table.close(session.session_id, 1, 0, 0.0) is session
    assert table.close(session.session_id, 1, 0, 0.0) is None
    bury(table, session, 0.0)
    assert table.close(session.session_id, 1, 0, 0.0) is None


def test_time_in_which_the_daemon_slept_counts_for_nobody() -> None:
    table = make_table()
    live, graced = open_session(table).session, open_session(table).session
    table.attach_stream(live.session_id, 1, 0.0)
    tick(table, 0.0, 1.0)
    assert table.expire(1000.0) == [], "stopped and continued: everyone's messages wait in the sockets"
    assert graced.session_id in tick(table, 1000.0, 1005.0)
    assert live.state is SessionState.LIVE


def test_a_restored_session_must_say_what_it_holds_before_it_acts() -> None:
    table = make_table()
    request = OpenRequest(pool=POOL, client_name="c")
    record = RestoredSession(
        session_id=SessionId("old-session"), request=request, epoch=Epoch(4), token_digest=token_digest("secret")
    )
    session = table.restore(record, 0.0)
    assert table.unasserted(POOL) == [session]
    with pytest.raises(BootIdMismatch):
        table.require("old-session", 4)
    resumed = table.resume(POOL, "secret", credentials(), 1.0)
    assert resumed.must_reassert and resumed.session.epoch == 5
    with pytest.raises(BootIdMismatch):
        table.require("old-session", 5)
    table.reasserted("old-session")
    assert table.require("old-session", 5) is session
    assert table.unasserted(POOL) == []
    table.check_invariants()


@pytest.mark.parametrize(
    ("steps_since", "completed_step", "cause"),
    [(0, 90, EndCause.CLOSED_EARLY), (1, 90, EndCause.CLOSED_EARLY), (1, 91, EndCause.CLOSED)],
)
def test_a_restored_session_closes_in_order_only_if_a_step_seen_here_is_complete(
    steps_since: int, completed_step: int, cause: EndCause
) -> None:
    table = make_table()
    record = RestoredSession(
        session_id=SessionId("old-session"),
        request=OpenRequest(pool=POOL),
        epoch=Epoch(1),
        token_digest=token_digest("t"),
    )
    session = table.restore(record, 0.0)
    table.resume(POOL, "t", credentials(), 0.0)
    table.reasserted("old-session")
    if steps_since:
        session.steps.finish(91, 0, 90, "answer")
    assert table.close("old-session", 2, completed_step, 1.0) is session
    assert session.end_cause is cause


def test_a_restored_session_that_never_comes_back_is_accounted_for_only_when_its_workers_are() -> None:
    table = make_table()
    record = RestoredSession(
        session_id=SessionId("old-session"), request=OpenRequest(pool=POOL), epoch=Epoch(1), token_digest=b"d" * 32
    )
    session = table.restore(record, 0.0)
    assert list(tick(table, 0.0, 6.0)) == ["old-session"]
    assert table.unasserted(POOL) == [session]
    bury(table, session, 6.0)
    assert table.unasserted(POOL) == []


def test_no_text_form_of_a_session_shows_its_secrets() -> None:
    opened = open_session(make_table())
    shown = repr(opened.session)
    assert opened.session.session_id not in shown and opened.resume_token not in shown


def test_a_client_that_is_proven_gone_is_not_waited_for() -> None:
    table = make_table()
    session = open_session(table, pid=7).session
    table.attach_stream(session.session_id, 1, 0.0)
    assert table.client_died(session.session_id, 8, 1.0) is None, "a worker of it, perhaps"
    assert table.client_died(session.session_id, 7, 1.0) is session
    assert table.client_died(session.session_id, 7, 1.0) is None
    assert session.end_cause is EndCause.DIED
    bury(table, session, 1.0)


def test_a_client_that_did_not_say_its_pid_keeps_its_grace() -> None:
    table = make_table()
    session = open_session(table).session
    assert table.client_died(session.session_id, 0, 1.0) is None
    assert session.state is SessionState.GRACE
