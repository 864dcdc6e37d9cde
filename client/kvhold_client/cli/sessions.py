"""`kvhold sessions`: who is connected, what they hold, and why blocks of the dead still wait."""

import argparse

from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import OK
from kvhold_client.cli.units import format_count, format_seconds
from kvhold_client.client import Client
from kvhold_client.results import SessionInfo

HEADERS = ("session", "pool", "client", "tenant", "state", "sequences", "held", "quarantined", "step", "age", "remark")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--pool."""
    parser.add_argument("--pool", default="", metavar="NAME", help="only those of this pool")


def run(args: argparse.Namespace, console: Console) -> int:
    """Lists."""
    with Client(args.target, timeout_s=args.timeout) as client:
        sessions = client.list_sessions(args.pool)
    if args.output == "json":
        console.json(sessions)
    elif sessions:
        console.table(HEADERS, [session_row(session) for session in sessions])
    else:
        console.note("no sessions")
    return OK


def session_row(session: SessionInfo) -> tuple[str, ...]:
    """One line of the table."""
    remark = session.quarantine_reason
    if session.state == "grace":
        remark = f"may resume for {format_seconds(session.grace_left_s)}"
    return (
        session.short_id,
        session.pool,
        session.client_name,
        session.tenant,
        session.state,
        format_count(session.num_sequences),
        format_count(session.num_held_blocks),
        format_count(session.num_quarantined_blocks),
        format_count(session.last_step),
        format_seconds(session.age_s),
        remark,
    )
