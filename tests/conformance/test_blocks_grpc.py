"""A few recorded traces through a daemon's gRPC; `run.py blocks` replays all of them."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvhold_client import LocalDaemon
from tests.conformance.blocks_grpc import check_file

TRACES = {  # one of each: kinds, events by hand, loads from elsewhere, refusals, states with copies
    "blocks_full_basic": 72,
    "blocks_full_manual_events": 27,
    "blocks_full_spec_decode_inflight": 38,
    "blocks_hyb_scripted_eviction": 42,
    "blocks_mamba_scripted_partial": 164,
    "blocks_sw_scripted": 82,
}


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with LocalDaemon("--grace-period-s", "600") as daemon, grpc.insecure_channel(daemon.target) as channel:
        yield channel


@pytest.mark.parametrize("name", TRACES)
def test_a_recorded_trace_is_reproduced_over_the_wire(shared_dir: Path, channel: grpc.Channel, name: str) -> None:
    path = shared_dir / "vectors" / "blocks" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name}")
    outcomes = list(check_file(path, channel))
    assert len(outcomes) == TRACES[name], "every operation, and the index at the end"
    assert [outcome for outcome in outcomes if outcome.differences] == []
