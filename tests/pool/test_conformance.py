"""The recorded 0.31 block traces against the core in this process: every result, event, free count and state digest."""

from pathlib import Path

import pytest

from tests.conformance.blocks_core import CoreDriver, check_file

VECTORS = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "vectors" / "blocks"
FILES = sorted(path.stem for path in VECTORS.glob("blocks_*.jsonl")) if VECTORS.is_dir() else []
OTHERS = ("blocks_hash_vectors",)  # hashes are the client's business


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in [*FILES, "blocks011_queue_lowlevel"] if name not in OTHERS])
def test_a_recorded_trace_is_reproduced(shared_dir: Path, name: str) -> None:
    outcomes = list(check_file(shared_dir / "vectors" / "blocks" / f"{name}.jsonl", CoreDriver(check_every=50)))
    failed = [(outcome.name, outcome.differences) for outcome in outcomes if outcome.differences]
    assert outcomes and not failed, failed[:3]
