"""`kvhold version`: of this client, and of the daemon if one answers."""

import argparse
from importlib import import_module
from pathlib import Path

from kvhold_client import __version__
from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import OK
from kvhold_client.errors import Unreachable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Only the common ones."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Quick where there is no daemon to ask: gRPC is loaded only if there may be one."""
    daemon = {"target": args.target, "version": None, "boot_id": None}
    socket = args.target.removeprefix("unix:")
    if args.target_given or Path(socket).exists():
        client = import_module("kvhold_client.client").Client(args.target, timeout_s=args.timeout)
        with client:
            try:
                answer = client.capabilities()
                daemon |= {"version": answer.server_version, "boot_id": answer.boot_id}
            except Unreachable as error:
                console.note(str(error))
    if args.output == "json":
        console.json({"client": {"version": __version__}, "daemon": daemon})
        return OK
    console.print(f"client  {__version__}")
    console.print(f"daemon  {daemon['version'] or 'not running'} ({args.target})")
    return OK
