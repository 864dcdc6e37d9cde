"""`kvhold status`: one screen, and an exit code for scripts: 0 well, 3 unreachable, 4 not ready."""

import argparse

from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import OK, UNHEALTHY
from kvhold_client.cli.pools import HEADERS, pool_row
from kvhold_client.client import Client
from kvhold_client.health import check_health
from kvhold_client.results import SessionInfo

SERVICES = ("liveness", "readiness")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Only the common ones."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Asks, shows, judges."""
    with Client(args.target, timeout_s=args.timeout) as client:
        capabilities = client.capabilities()
        health = {service: check_health(client, service) for service in SERVICES}
        pools, sessions = client.list_pools(), client.list_sessions()
    well = all(state == "SERVING" for state in health.values())
    if args.output == "json":
        console.json(
            {
                "target": args.target,
                "server_version": capabilities.server_version,
                "boot_id": capabilities.boot_id,
                "health": health,
                "num_sessions": len(sessions),
                "pools": pools,
            }
        )
        return OK if well else UNHEALTHY
    verdict = console.styled("ready", "green") if well else console.styled("NOT READY", "red")
    console.print(f"daemon    {verdict}  version {capabilities.server_version}  boot {capabilities.boot_id[:8]}")
    console.print(f"target    {args.target}")
    console.print("health    " + ", ".join(f"{service} {state}" for service, state in health.items()))
    console.print(f"memory    {', '.join(capabilities.memory_backends)}")
    console.print(f"sessions  {len(sessions)}" + _by_state(sessions))
    if pools:
        console.print()
        console.table(HEADERS, [pool_row(pool) for pool in pools])
    return OK if well else UNHEALTHY


def _by_state(sessions: list[SessionInfo]) -> str:
    states = [session.state for session in sessions]
    dead = {state: states.count(state) for state in ("grace", "quarantined") if state in states}
    return "".join(f", {count} {state}" for state, count in dead.items())
