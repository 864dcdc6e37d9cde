"""Faster must not mean other: the yardstick's decisions, by all ways, on a trace with preemptions and on hybrid models.

The checksums of hybrid models were made by the incumbent, in process, with the same arguments.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "bench"))

from stage import Daemon, choose_cores, daemon, simulate  # noqa: E402

TRACE = REPO / "client" / "kvhold_client" / "replay" / "demo_trace.jsonl"
WAYS = ("kvhold_manager", "kvhold_pipelined", "kvhold_grpc", "kvhold_grpc_pipelined", "kvhold_grpc_unary")
PREEMPTING = ("--num-blocks", "1500", "--admission", "chunk", "--speedup", "12", "--requests", "183")
HYBRID = (
    ("full,sw:1024", "2200", "c63476d9a51beebd"),
    ("full,sw:1024,sw:512", "3200", "92021cec799ad0e2"),
)


@pytest.fixture(scope="module")
def live() -> Iterator[Daemon]:
    with daemon(choose_cores()) as running:
        yield running


def checksum(live: Daemon, way: str, *arguments: str) -> str:
    """Of one replay whose blocks are audited; a step ahead needs a gap to be prepared in."""
    gap = ("--gap-ms", "0.01", "--late-ms", "5") if way.endswith("pipelined") else ()
    cases = simulate(live, choose_cores(), way, ["--trace", str(TRACE), "--audit", *gap, *arguments])
    return str(cases["trace"]["checksum"])


@pytest.mark.parametrize("way", WAYS)
def test_decisions_are_those_of_a_manager_in_process(live: Daemon, way: str) -> None:
    expected = checksum(live, "dict_manager", *PREEMPTING)
    assert checksum(live, way, *PREEMPTING) == expected == "94499b9169303b83"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("groups", "num_blocks", "expected"), HYBRID, ids=[case[0] for case in HYBRID])
def test_decisions_on_hybrid_models_are_the_incumbents(
    live: Daemon, way: str, groups: str, num_blocks: str, expected: str
) -> None:
    arguments = ("--groups", groups, "--num-blocks", num_blocks, "--admission", "chunk", "--speedup", "20")
    assert checksum(live, way, *arguments, "--requests", "120") == expected
