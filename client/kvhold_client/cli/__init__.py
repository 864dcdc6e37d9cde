"""The `kvhold` command line. `main` is the entry point; each command is a module of its own, loaded when it is used."""

from kvhold_client.cli.main import main

__all__ = ["main"]
