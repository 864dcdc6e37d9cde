"""`kvhold config show [--origin] [flags of serve]`: what a daemon started like this would use, and where it is said.

The answer is the daemon's own; this command only asks its package, as `kvhold serve` does.
"""

import argparse
import importlib.util
import os
import subprocess
import sys

from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import OK, USAGE, CommandFailed
from kvhold_client.local_daemon import daemon_environment

USE = "usage: kvhold config show [--origin] [flags of serve]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: arguments are handed on."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Exit code of the daemon's answer. Raises CommandFailed if it is not installed."""
    if args.rest[:1] in (["-h"], ["--help"]) or {"-h", "--help"} & set(args.rest[1:]):
        console.print(
            f"{USE}\n\nOne `name = value` a line, as a file for --config has it. `kvhold serve --help`: the flags."
        )
        return OK
    if not args.rest or args.rest[0] != "show":
        console.error(USE)
        return USAGE
    if importlib.util.find_spec("kvhold_server") is None:
        raise CommandFailed("the daemon is not installed here: pip install 'kvhold[server]'")
    console.out.flush()
    command = [sys.executable, "-m", "kvhold_server", "config", *args.rest]
    return subprocess.run(command, env=daemon_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}).returncode
