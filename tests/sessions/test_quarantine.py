"""When a dead session's blocks may be given to others."""

import pytest

from kvhold_server.domain.ids import PoolName, SessionId
from kvhold_server.sessions.errors import TooManyWatches
from kvhold_server.sessions.lease import LeaseTerms
from kvhold_server.sessions.quarantine import MAX_REASONS, DeathFacts, Evidence, Verdict, Witness, judge
from kvhold_server.sessions.worker_watch import CLIENT_RANK, WorkerWatch

TERMS = LeaseTerms(unproven_grace_s=5.0)
POOL, OTHER_POOL = PoolName("p"), PoolName("q")
RED, BLUE = SessionId("red"), SessionId("blue")


def verdict(*witnesses: Witness, now_s: float = 100.0, in_order: bool = False) -> Verdict:
    return judge(DeathFacts(ended_in_order=in_order, stream_ended_at_s=98.0, witnesses=witnesses), TERMS, now_s)


def witness(evidence: Evidence, what: str = "worker of rank 0", pid: int = 7) -> Witness:
    return Witness(what=what, pid=pid, evidence=evidence)


def test_all_proven_gone_releases_at_once() -> None:
    assert verdict(witness(Evidence.GONE), witness(Evidence.GONE)) == Verdict(may_release=True)


def test_a_running_worker_holds_the_blocks_for_ever_and_is_named() -> None:
    """R17: the scheduler is gone, a worker still runs."""
    answer = verdict(witness(Evidence.GONE, "client"), witness(Evidence.RUNNING), now_s=1e9)
    assert not answer.may_release
    assert answer.reason == "worker of rank 0 (pid 7) still runs"
    assert answer.retry_at_s is None


def test_an_unwatched_process_holds_the_blocks_until_stream_end_and_grace() -> None:
    answer = verdict(witness(Evidence.UNWATCHED, "client", pid=0))
    assert answer == Verdict(may_release=False, reason="client is not watched, 3.0 s to go", retry_at_s=103.0)
    assert verdict(witness(Evidence.UNWATCHED), now_s=103.0).may_release


def test_an_orderly_end_waits_for_nobody() -> None:
    assert verdict(witness(Evidence.RUNNING), in_order=True).may_release


def test_the_reason_is_bounded() -> None:
    answer = verdict(*[witness(Evidence.RUNNING, f"worker of rank {rank}") for rank in range(MAX_REASONS + 3)])
    assert answer.reason.endswith("and 3 more")


def test_without_any_watch_the_client_itself_is_the_unwatched_witness() -> None:
    watch = WorkerWatch()
    assert watch.witnesses(POOL, RED, 50.0) == (Witness(what="client", pid=0, evidence=Evidence.UNWATCHED),)


def test_each_process_testifies_for_its_own_session_only() -> None:
    watch = WorkerWatch()
    red = watch.add(pool=POOL, rank=0, session_id=RED, pid=11, is_watched=True, now_s=1.0)
    watch.add(pool=POOL, rank=0, session_id=BLUE, pid=12, is_watched=True, now_s=1.0)
    watch.add(pool=OTHER_POOL, rank=0, session_id=None, pid=13, is_watched=True, now_s=1.0)
    assert [w.pid for w in watch.witnesses(POOL, RED, 50.0)] == [0, 11]
    watch.gone(red.id)
    watch.gone(red.id)
    assert [w.pid for w in watch.witnesses(POOL, RED, 50.0)] == [0]
    watch.check_invariants()


def test_a_worker_without_a_session_testifies_for_every_session_that_died_after_it_came() -> None:
    """R16 and R17 together: it attached before its scheduler existed, so it might be anyone's."""
    watch = WorkerWatch()
    early = watch.add(pool=POOL, rank=1, session_id=None, pid=21, is_watched=True, now_s=10.0)
    watch.add(pool=POOL, rank=1, session_id=None, pid=22, is_watched=True, now_s=60.0)
    found = watch.witnesses(POOL, RED, 50.0)
    assert [(w.pid, w.evidence) for w in found[1:]] == [(21, Evidence.RUNNING)]
    assert found[1].what == "worker of rank 1 that named no session"
    watch.bind(early.id, BLUE)
    assert watch.witnesses(POOL, RED, 50.0)[1:] == ()
    assert [w.pid for w in watch.witnesses(POOL, BLUE, 50.0)[1:]] == [21]
    watch.check_invariants()


def test_a_client_that_proved_its_pid_is_waited_for_and_its_end_is_remembered() -> None:
    watch = WorkerWatch()
    client = watch.add(pool=POOL, rank=CLIENT_RANK, session_id=RED, pid=31, is_watched=True, now_s=1.0)
    assert watch.witnesses(POOL, RED, 50.0) == (Witness(what="client", pid=31, evidence=Evidence.RUNNING),)
    watch.gone(client.id)
    assert watch.witnesses(POOL, RED, 50.0) == (Witness(what="client", pid=31, evidence=Evidence.GONE),)
    watch.forget_session(POOL, RED)
    assert watch.witnesses(POOL, RED, 50.0)[0].evidence is Evidence.UNWATCHED
    watch.check_invariants()


def test_exports_by_name_do_not_pile_up_and_watches_are_bounded() -> None:
    watch = WorkerWatch(max_watches=2)
    for now_s in range(100):
        watch.add(pool=POOL, rank=0, session_id=None, pid=0, is_watched=False, now_s=now_s)
    watch.add(pool=POOL, rank=0, session_id=RED, pid=9, is_watched=True, now_s=1.0)
    with pytest.raises(TooManyWatches):
        watch.add(pool=POOL, rank=0, session_id=RED, pid=10, is_watched=True, now_s=1.0)
    assert watch.num_mappings(POOL) == 1, "nobody knows whether the one by name still maps it"
    watch.drop_pool(POOL)
    assert watch.num_mappings(POOL) == 0
    watch.check_invariants()


def test_an_export_by_name_that_becomes_a_watched_mapping_is_no_longer_unwatched() -> None:
    """The reply to an export offers both ways; the one that is taken counts."""
    watch = WorkerWatch()
    for _ in range(2):
        watch.add(pool=POOL, rank=0, session_id=RED, pid=0, is_watched=False, now_s=1.0)
    first = watch.add(pool=POOL, rank=0, session_id=RED, pid=11, is_watched=True, now_s=2.0)
    assert Evidence.UNWATCHED in [w.evidence for w in watch.witnesses(POOL, RED, 50.0)[1:]], "one export is still open"
    second = watch.add(pool=POOL, rank=0, session_id=RED, pid=12, is_watched=True, now_s=2.0)
    assert [w.evidence for w in watch.witnesses(POOL, RED, 50.0)[1:]] == [Evidence.RUNNING, Evidence.RUNNING]
    watch.check_invariants()
    watch.gone(first.id)
    watch.gone(second.id)
    watch.client_gone(RED, 11)
    assert [w.evidence for w in watch.witnesses(POOL, RED, 50.0)] == [Evidence.GONE]
    watch.check_invariants()


def test_a_mapping_that_outlives_its_session_testifies_for_the_next_session_of_its_process() -> None:
    watch = WorkerWatch()
    mapping = watch.add(pool=POOL, rank=0, session_id=RED, pid=11, is_watched=True, now_s=1.0)
    watch.forget_session(POOL, RED)
    assert watch.num_mappings(POOL) == 1
    assert [w.pid for w in watch.witnesses(POOL, BLUE, 50.0, 11)[1:]] == [11]
    assert watch.witnesses(POOL, BLUE, 50.0, 12)[1:] == (), "of another process"
    watch.gone(mapping.id)
    assert watch.witnesses(POOL, BLUE, 50.0, 11)[1:] == ()
    watch.check_invariants()
