"""Replays recorded inputs through kvhold and compares what comes out.

    python tests/conformance/run.py hashes FILE...    hashers of the client library
    python tests/conformance/run.py plan FILE...      PlanService of a running daemon (started here unless --endpoint)
    python tests/conformance/run.py blocks FILE...    block pool

Prints each difference shortly and closes with `N passed, N failed, N skipped`; exits 0 if nothing failed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.conformance import hashes
from tests.conformance.report import Outcome, Report


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file. A header's release is handed on to the rows after it."""
    release = ""
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SystemExit(f"{path}:{number}: not JSON: {error}") from None
            if row.get("type") == "header":
                release = row.get("vllm", "")
            yield {"vllm": release, **row}


def run_hashes(arguments: argparse.Namespace) -> Iterator[Outcome | None]:
    for path in arguments.files:
        yield from map(hashes.check, rows_of(path))


MODES: dict[str, Callable[[argparse.Namespace], Iterator[Outcome | None]]] = {
    "hashes": run_hashes,
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--endpoint", help="of a running daemon, such as unix:/run/kvhold/kvhold.sock")
    arguments = parser.parse_args(argv)
    report = Report(out=sys.stdout)
    for outcome in MODES[arguments.mode](arguments):
        if outcome is not None:
            report.add(outcome)
    return report.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
