"""An engine with states, through a real daemon: where it must leave a state in the middle of a chunk is on the wire."""

import pytest

from kvhold_client.client import Client
from kvhold_client.pools import PoolRequest
from kvhold_client.results import StateHandoff
from tests.recovery.history_world import STATE_TOKENS, UNIT, plan_request

TEXT = [f"token {i}".encode().ljust(32) for i in range(7)]  # digests of its units


@pytest.mark.parametrize("over_grpc", [False, True])
def test_a_chunk_that_begins_inside_a_block_is_told_to_leave_the_state_at_its_end(
    client: Client, over_grpc: bool
) -> None:
    """Hit after 12 tokens, in the middle of the second block; computed to 27; another sequence hits 16."""
    assert (UNIT, STATE_TOKENS) == (4, 8)
    pool = client.open_pool(PoolRequest(name=f"states-{over_grpc}", plan=plan_request("fs", 16 << 10), model="tiny"))
    states: dict[int, int] = {}  # block → tokens that went into its state; all texts are alike
    with pool.open_session(local_transport=not over_grpc) as session:
        assert session.transport == ("grpc" if over_grpc else "local")
        g = next(i for i, group in enumerate(session.shape.groups) if group.kind == "mamba")
        table = session.table
        session.begin_step()
        first = table.new_sequence(1, b"".join(TEXT[:3]))
        table.admit(first, num_tokens=12)
        table.flush()
        states[first.tables[g][1]] = 12

        session.begin_step()
        table.finish(first)
        second = table.new_sequence(2, b"".join(TEXT[:6]))
        table.admit(second, num_tokens=27)
        outcome = table.flush()
        assert [admission.hit_tokens for admission in outcome.admitted] == [12]
        for copy in outcome.copies:
            if copy.group_id == g:
                states[copy.target_block_id] = states[copy.source_block_id]
        own = second.tables[g][1]
        assert states[own] == 12, "a copy of its own, to go on from"
        assert outcome.handoffs == [StateHandoff(sequence_id=2, group_id=g, block_id=own, boundary_tokens=16)]
        for told in outcome.handoffs:
            states[told.block_id] = told.boundary_tokens
        states[second.tables[g][3]] = 27

        session.begin_step()
        third = table.new_sequence(3, b"".join([*TEXT[:4], b"another".ljust(32)]))
        table.admit(third, num_tokens=22)
        outcome = table.flush()
        assert [admission.hit_tokens for admission in outcome.admitted] == [16]
        assert states[third.tables[g][1]] == 16
        for sequence in (second, third):
            table.finish(sequence)
        session.idle()
    client.delete_pool(pool.name, force=True)
