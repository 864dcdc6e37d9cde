"""A few recorded traces through a daemon: the same answers as in process, operation by operation."""

from pathlib import Path

import grpc
import pytest

from kvhold_client import LocalDaemon
from tests.conformance.blocks_grpc import check_file

TRACES = (
    "blocks_full_basic",
    "blocks_sw_scripted",
    "blocks_mamba_scripted_partial",
    "blocks_full_spec_decode_inflight",
)


@pytest.mark.parametrize("name", TRACES)
def test_the_wire_changes_nothing(shared_dir: Path, name: str) -> None:
    path = shared_dir / "vectors" / "blocks" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name}")
    with LocalDaemon("--grace-period-s", "600") as daemon, grpc.insecure_channel(daemon.target) as channel:
        outcomes = list(check_file(path, channel))
    assert len(outcomes) > 20
    assert [outcome for outcome in outcomes if outcome.differences] == []
