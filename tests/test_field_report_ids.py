"""Every row of the collected field reports about blocks, hits, hashes, events, metrics and speed has a test."""

import json
import re
from pathlib import Path

import pytest

AREAS = ("POOL", "HIT", "HASH", "EVT", "MET", "PERF")
TESTS = Path(__file__).resolve().parent


def ids_in_tests() -> set[str]:
    """Ids that a test's name or docstring has, as in EVT-04 or test_evt_04_…"""
    pattern = re.compile(rf"\b(?:test_)?({'|'.join(AREAS)})[-_](\d\d)(?!\d)", re.IGNORECASE)
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        if path != Path(__file__).resolve():
            found |= {f"{area.upper()}-{number}" for area, number in pattern.findall(path.read_text())}
    return found


@pytest.mark.parametrize("area", AREAS)
def test_each_report_has_a_test(shared_dir: Path, area: str) -> None:
    path = shared_dir / "field_reports.jsonl"
    if not path.exists():
        pytest.skip("the collected reports are not here")
    with path.open() as lines:
        reported = {row["id"] for row in map(json.loads, lines) if row["id"].startswith(f"{area}-")}
    assert reported and reported <= ids_in_tests(), sorted(reported - ids_in_tests())
