"""Replays recorded inputs through kvhold and compares what comes out.

    python tests/conformance/run.py hashes FILE...    hashers of the client library
    python tests/conformance/run.py plan FILE...      PlanService of a running daemon (started here unless --endpoint)
    python tests/conformance/run.py blocks FILE...    manager traces through a daemon; others: pool, hashers
    python tests/conformance/run.py blocks-core FILE...    the same without a daemon

`blocks` with --endpoint needs a daemon whose grace period is longer than the replay.

Prints each difference shortly and closes with `N passed, N failed, N skipped`; exits 0 if nothing failed.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from kvhold.v1 import plan_pb2_grpc
from kvhold_client import LocalDaemon
from tests.conformance import blocks_core, blocks_grpc, hashes, plan
from tests.conformance.report import Outcome, Report

RPC_TIMEOUT_S = 120.0
CHECK_INVARIANTS_EVERY = 10  # operations
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


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


@contextlib.contextmanager
def daemon_at(endpoint: str | None) -> Iterator[str]:
    """Where to connect: the endpoint given, or a daemon of our own for as long as the block lasts."""
    if endpoint is not None:
        yield endpoint
        return
    with LocalDaemon("--grace-period-s", "3600") as daemon:
        yield daemon.target


def answer_of(stub: plan_pb2_grpc.PlanServiceStub, row: dict[str, Any]) -> plan.Answer:
    """What the daemon says to a recorded input."""
    try:
        return plan.Answer(reply=stub.Plan(plan.to_request(row), timeout=RPC_TIMEOUT_S))
    except grpc.RpcError as error:
        return plan.Answer(code=error.code().name, text=error.details() or "")


def run_plan(arguments: argparse.Namespace) -> Iterator[Outcome | None]:
    with (
        daemon_at(arguments.endpoint) as target,
        grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel,
    ):
        stub = plan_pb2_grpc.PlanServiceStub(channel)
        for path in arguments.files:
            for row in rows_of(path):
                differences = plan.check(row, answer_of(stub, row))
                yield Outcome(name=f"{row['id']} ({row['verdict']})", differences=tuple(differences))


def run_blocks(arguments: argparse.Namespace) -> Iterator[Outcome | None]:
    with (
        daemon_at(arguments.endpoint) as target,
        grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel,
    ):
        for path in arguments.files:
            if blocks_core.is_manager_trace(path):
                yield from blocks_grpc.check_file(path, channel)
            else:
                yield from check_lowlevel(path)


def run_blocks_core(arguments: argparse.Namespace) -> Iterator[Outcome | None]:
    for path in arguments.files:
        yield from check_lowlevel(path)


def check_lowlevel(path: Path) -> Iterator[Outcome | None]:
    """A file for the pool in this process, or for the hashers."""
    if blocks_core.is_hash_file(path):
        yield from map(hashes.check, rows_of(path))
    else:
        yield from blocks_core.check_file(path, blocks_core.CoreDriver(check_every=CHECK_INVARIANTS_EVERY))


MODES: dict[str, Callable[[argparse.Namespace], Iterator[Outcome | None]]] = {
    "hashes": run_hashes,
    "plan": run_plan,
    "blocks": run_blocks,
    "blocks-core": run_blocks_core,
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
