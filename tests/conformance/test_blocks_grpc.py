"""A few recorded traces through a daemon's gRPC, steps as calls and on a stream; `run.py blocks` replays them all."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvhold_client import LocalDaemon
from kvhold_client.calls import CallSettings
from kvhold_client.step_senders import StreamSteps
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


@pytest.fixture(scope="module")
def streamed(channel: grpc.Channel) -> Iterator[StreamSteps]:
    steps = StreamSteps(channel, CallSettings(target="the daemon"))
    yield steps
    assert steps.transport == "grpc", "it was a stream all the time"
    steps.close()


@pytest.mark.parametrize("way", ["unary", "stream"])
@pytest.mark.parametrize("name", TRACES)
def test_a_recorded_trace_is_reproduced_over_the_wire(
    shared_dir: Path, channel: grpc.Channel, streamed: StreamSteps, name: str, way: str
) -> None:
    path = shared_dir / "vectors" / "blocks" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name}")
    outcomes = list(check_file(path, channel, streamed.call if way == "stream" else None))
    assert len(outcomes) == TRACES[name], "every operation, and the index at the end"
    assert [outcome for outcome in outcomes if outcome.differences] == []
