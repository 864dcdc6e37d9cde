"""`kvhold demo`: the whole job in about a minute.

1 plan     two real models: what would fit, and where it would lie
2 replay   two schedulers share one pool; every cached block that is read is checked byte by byte
3 crash    one scheduler is killed; its successor finds the cache as it was
"""

import argparse
from pathlib import Path

from kvhold_client.cli import replay
from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import FAILED, OK, CommandFailed
from kvhold_client.cli.plan_tables import print_plan
from kvhold_client.cli.units import format_share
from kvhold_client.client import Client
from kvhold_client.local_daemon import DaemonFailed, LocalDaemon
from kvhold_client.models import GIB, MODELS, model_plan_request
from kvhold_client.replay.summary import Summary, print_summary

PLANNED_MEMORY_BYTES = 40 * GIB
PUBLIC_TRACE = Path("../shared/traces/conversation_trace.jsonl")  # beside a checkout; not shipped
OWN_TRACE = Path(__file__).parent.parent / "replay" / "demo_trace.jsonl"
PUBLIC_SLICE = ("--limit", "300", "--max-prompt-tokens", "6000", "--max-output-tokens", "96")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--trace, --memory."""
    parser.add_argument(
        "--trace", type=Path, metavar="TRACE", help="default: a public one if it is there, else our own"
    )
    parser.add_argument("--memory", metavar="SIZE", help="of the pool (default: half of what is free, at most 4GiB)")


def run(args: argparse.Namespace, console: Console) -> int:
    """One daemon for all of it."""
    try:
        with LocalDaemon() as daemon:
            with Client(daemon.target) as client:
                for name in MODELS:
                    request = model_plan_request(name, memory_bytes=PLANNED_MEMORY_BYTES)
                    print_plan(console, MODELS[name].title, client.plan(request))
                    console.print()
            return _replay(args, console, daemon)
    except DaemonFailed as error:
        raise CommandFailed(str(error)) from None


def _replay(args: argparse.Namespace, console: Console, daemon: LocalDaemon) -> int:
    flags = _replay_flags(args)
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    chosen = parser.parse_args(flags)
    chosen.timeout = args.timeout
    console.heading(
        f"Two schedulers on one pool, trace {chosen.trace.name}; one is killed after {chosen.kill_one_after:g} s"
    )
    rows = replay.count_rows(chosen.trace, chosen.limit)
    summary = replay.run_schedulers(chosen, console, daemon.target, daemon.metrics_url, rows)
    console.print()
    print_summary(console, summary)
    console.print()
    _say_what_it_means(console, summary)
    return OK if summary.is_good else FAILED


def _replay_flags(args: argparse.Namespace) -> list[str]:
    trace = args.trace or (PUBLIC_TRACE if PUBLIC_TRACE.exists() else OWN_TRACE)
    flags = [str(trace), "--kill-one-after", "3", "--step-ms", "10", "--live", "5"]
    flags += ["--memory", args.memory] if args.memory else []
    return flags + (list(PUBLIC_SLICE) if trace == PUBLIC_TRACE else [])


def _say_what_it_means(console: Console, s: Summary) -> None:
    if not s.is_good:
        console.print(console.styled("Something is not as it should be: see above.", "red"))
        return
    hit = format_share(s.hit_tokens, s.query_tokens)
    console.print(console.styled("All good.", "green"))
    console.print(f"{hit} of the prompt tokens came from the cache instead of being computed.")
    if s.kill is None:
        return
    inherited = format_share(s.inherited_hit_tokens, s.inherited_query_tokens)
    console.print("One scheduler was killed with SIGKILL in the middle of its work. Its successor took over its")
    console.print(f"requests, found {inherited} of their tokens still cached, and no reader saw an unexpected byte.")
