"""Random models of all kinds: the compact strategy keeps every invariant and never holds less than the modern one."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold_server.domain.plan import Strategy
from kvhold_server.planner.plan import plan
from kvhold_server.planner.request import CompactBounds, PlanRequest
from kvhold_server.rpc.plan_codec import encode_plan_response
from tests.conformance.plan_invariants import broken_invariants
from tests.planner.beside_modern import never_worse
from tests.property.test_plan_properties import cases, planned, requests, wire_request


@pytest.mark.slow
@pytest.mark.timeout(600)
@cases(600)
@given(requests(Strategy.COMPACT))
def test_compact_is_never_worse_than_modern_and_keeps_the_invariants(request: PlanRequest) -> None:
    made = never_worse(request)
    if made is not None:
        assert broken_invariants(wire_request(request), encode_plan_response(made)) == []


@cases(150)
@given(requests(Strategy.COMPACT), st.integers(1, 6), st.sampled_from([None, 64, 1024]))
def test_bounds_that_are_asked_for_hold(request: PlanRequest, groups: int, block: int | None) -> None:
    bounds = CompactBounds(max_num_groups=groups, max_block_size_tokens=block, keep_layout=True)
    bounded = dataclasses.replace(request, config=dataclasses.replace(request.config, compact=bounds))
    made = planned(bounded)
    if made is None or made.choice is None:
        return
    assert made.choice.chosen.num_groups <= groups
    assert made.layout is request.config.layout


@cases(150)
@given(requests(Strategy.COMPACT))
def test_the_choice_depends_on_the_request_only(request: PlanRequest) -> None:
    made = planned(request)
    if made is not None:
        assert plan(request) == made
