"""`kvhold serve`: becomes the daemon. All its flags are the daemon's own: `kvhold serve --help` is answered by it."""

import argparse
import importlib.util
import os
import sys

from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import CommandFailed
from kvhold_client.local_daemon import daemon_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: arguments are handed on."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Replaces this process. Raises CommandFailed if the daemon is not installed."""
    if importlib.util.find_spec("kvhold_server") is None:
        raise CommandFailed("the daemon is not installed here: pip install 'kvhold[server]'")
    command = [sys.executable, "-m", "kvhold_server", "serve", *args.rest]
    console.out.flush()
    os.execve(sys.executable, command, daemon_environment())
