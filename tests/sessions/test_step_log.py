"""Exactly-once steps, against a model that remembers everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold_server.domain.errors import InvalidField
from kvhold_server.sessions.errors import StepOutOfOrder
from kvhold_server.sessions.step_log import MAX_PART, StepLog


def apply(log: StepLog, step: int, part: int = 0, completed: int = 0) -> object:
    stored = log.begin(step, part, completed)
    if stored is not None:
        return stored
    answer = f"{step}.{part}"
    log.finish(step, part, completed, answer)
    return answer


def test_a_repeated_step_gets_the_first_answer() -> None:
    log = StepLog()
    log.finish(5, 0, 4, "first")
    assert log.begin(5, 0, 4) == "first"
    assert log.begin(5, 0, 5) == "first", "also when the retry says something else: nothing of it is applied"
    assert log.completed_step == 4


def test_a_step_that_was_refused_in_between_may_be_sent_again() -> None:
    log = StepLog()
    assert log.begin(1) is None
    assert log.begin(1) is None


@pytest.mark.parametrize(("step", "part"), [(4, 0), (4, MAX_PART), (5, 0)])
def test_an_earlier_step_or_part_that_is_no_longer_remembered_is_refused(step: int, part: int) -> None:
    log = StepLog(max_answers=1)
    apply(log, 5, 1)
    with pytest.raises(StepOutOfOrder) as caught:
        log.begin(step, part)
    assert (caught.value.last_step, caught.value.last_part) == (5, 1)


def test_completed_steps_never_shrink_and_never_exceed_their_step() -> None:
    log = StepLog()
    apply(log, 7, completed=6)
    with pytest.raises(StepOutOfOrder):
        log.begin(8, 0, 5)
    with pytest.raises(InvalidField, match="completed_step: 9"):
        log.begin(8, 0, 9)
    assert log.begin(8, 0, 0) is None, "0 says nothing new"
    assert log.completed_step == 6


@pytest.mark.parametrize(
    ("step", "part", "completed"), [(0, 0, 0), (-1, 0, 0), (2**63, 0, 0), (1, -1, 0), (1, 1024, 0)]
)
def test_numbers_out_of_range_are_named(step: int, part: int, completed: int) -> None:
    with pytest.raises(InvalidField):
        StepLog().begin(step, part, completed)


def test_closing_completes_what_began_but_not_more() -> None:
    log = StepLog()
    apply(log, 3)
    assert not log.all_completed
    with pytest.raises(InvalidField):
        log.complete(4)
    log.complete(3)
    assert log.all_completed
    log.complete(0)
    assert log.completed_step == 3


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(0, 6)), max_size=60),
    st.integers(1, 4),
)
def test_every_pair_is_applied_at_most_once_and_answers_agree(
    requests: list[tuple[int, int, int]], max_answers: int
) -> None:
    log = StepLog(max_answers=max_answers)
    applied: dict[tuple[int, int], str] = {}  # in order of application
    completed = 0
    for step, part, said in requests:
        follows = (step, part) > max(applied, default=(0, 0))
        remembered = (step, part) in list(applied)[-max_answers:]
        acceptable = follows and said <= step and not 0 < said < completed
        try:
            answer = apply(log, step, part, said)
        except (StepOutOfOrder, InvalidField):
            assert not remembered and not acceptable
        else:
            assert remembered or acceptable
            if not remembered:
                assert (step, part) not in applied
                applied[step, part] = f"{step}.{part}"
                completed = max(completed, said)
            assert answer == applied[step, part]
        log.check_invariants()
        assert log.completed_step == completed
        assert (log.last_step, log.last_part) == max(applied, default=(0, 0))
