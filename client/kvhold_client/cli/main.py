"""Finds the command, parses its flags, runs it, and turns what goes wrong into a message and an exit code.

    0 done   1 it failed   2 wrong usage   3 the daemon cannot be reached   4 the daemon is not healthy

A command is a module with `add_arguments(parser)` and `run(args, console) -> int`. Only the module of the command that
is asked for is imported, so that `kvhold --help` does not wait for gRPC. Values come from flags, then the environment
(KVHOLD_TARGET, KVHOLD_OUTPUT, KVHOLD_TIMEOUT_S), then defaults.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import Protocol, cast

from kvhold_client import __version__
from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import FAILED, OK, UNREACHABLE, USAGE, CommandFailed, UsageError
from kvhold_client.cli.units import parse_seconds
from kvhold_client.errors import KvholdError, Unreachable
from kvhold_client.target import SOCKET_VARIABLE, TARGET_VARIABLE, default_target

OUTPUT_VARIABLE = "KVHOLD_OUTPUT"
TIMEOUT_VARIABLE = "KVHOLD_TIMEOUT_S"
OUTPUTS = ("table", "json")
DEFAULT_TIMEOUT_S = 10.0
UNREACHABLE_HINT = "→ is it running? `kvhold doctor` finds what is in the way; --target or KVHOLD_TARGET names another"


class CommandModule(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, console: Console) -> int: ...


@dataclass(frozen=True, slots=True)
class Command:
    """One line of the help."""

    module: str
    summary: str
    takes_rest: bool = False  # hands its arguments on unread


COMMANDS: dict[str, Command] = {
    "serve": Command("serve", "run the daemon in the foreground", takes_rest=True),
    "plan": Command("plan", "what would be allocated for a model: groups, tensors, blocks, capacity"),
    "status": Command("status", "is the daemon well, and how full is it"),
    "pools": Command("pools", "list pools"),
    "sessions": Command("sessions", "list sessions"),
    "top": Command("top", "watch pools and sessions live"),
    "explain": Command("explain", "why a prompt hits no more than it does, and what more memory would give"),
    "doctor": Command("doctor", "check this machine and the way to the daemon, and say what to fix"),
    "config": Command("config", "what `serve` would be configured with, and where each value is from", takes_rest=True),
    "bridge": Command("bridge", "publish a pool's cache events over ZeroMQ, in an engine's format"),
    "completion": Command("completion", "a completion script for bash, zsh or fish"),
    "replay": Command("replay", "replay a request trace through scheduler processes, with real bytes"),
    "demo": Command("demo", "the whole job in two minutes: plan, replay, lose a scheduler, keep the cache"),
    "version": Command("version", "versions of client and daemon"),
}


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    env = os.environ if environ is None else environ
    console = Console.for_streams(sys.stdout, sys.stderr, env)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        console.print(_help())
        return OK if arguments else USAGE
    if arguments[0] in ("-V", "--version"):
        console.print(f"kvhold {__version__}")
        return OK
    name, *rest = arguments
    if name not in COMMANDS:
        console.error(f"unknown command {name!r}; `kvhold --help` lists them")
        return USAGE
    return _run(name, rest, env, console)


def _run(name: str, rest: list[str], env: Mapping[str, str], console: Console) -> int:
    command = COMMANDS[name]
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end_in_order)  # or a daemon and schedulers started here would be left behind
    module = cast(CommandModule, import_module(f"kvhold_client.cli.{command.module}"))
    try:
        if command.takes_rest:
            return module.run(argparse.Namespace(rest=rest), console)
        return module.run(_parse(name, command, module, rest, env), console)
    except SystemExit as stop:  # argparse: 0 after --help, 2 after wrong usage; 143 after SIGTERM
        return int(stop.code or 0)
    except UsageError as error:
        console.error(str(error))
        return USAGE
    except Unreachable as error:
        console.error(f"{error}\n{UNREACHABLE_HINT}")
        return UNREACHABLE
    except (KvholdError, CommandFailed) as error:
        console.error(str(error))
        return error.exit_code if isinstance(error, CommandFailed) else FAILED
    except BrokenPipeError:  # `kvhold pools | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return OK
    except KeyboardInterrupt:
        return 130


def _parse(
    name: str, command: Command, module: CommandModule, rest: list[str], env: Mapping[str, str]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"kvhold {name}", description=command.summary, allow_abbrev=False)
    common = parser.add_argument_group("common")
    common.add_argument("--target", metavar="T", help="unix:/path/to/socket or host:port (KVHOLD_TARGET)")
    common.add_argument("-o", "--output", choices=OUTPUTS, help="table for people, json for programs (KVHOLD_OUTPUT)")
    common.add_argument(
        "--timeout", type=parse_seconds, metavar="S", help="seconds to wait for an answer (KVHOLD_TIMEOUT_S)"
    )
    module.add_arguments(parser)
    args = parser.parse_args(rest)
    args.output = args.output or env.get(OUTPUT_VARIABLE, "table")
    if args.output not in OUTPUTS:
        raise UsageError(f"{OUTPUT_VARIABLE} = {args.output!r}: must be one of {', '.join(OUTPUTS)}")
    if args.timeout is None:
        args.timeout = _timeout(env)
    args.target_given = bool(args.target or env.get(TARGET_VARIABLE) or env.get(SOCKET_VARIABLE))
    args.target = args.target or default_target(env)
    return args


def _end_in_order(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _timeout(env: Mapping[str, str]) -> float:
    text = env.get(TIMEOUT_VARIABLE)
    try:
        return parse_seconds(text) if text else DEFAULT_TIMEOUT_S
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{TIMEOUT_VARIABLE}: {error}") from None


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: kvhold COMMAND [flags]",
            "",
            "kvhold owns the memory of KV caches on this node: it plans it, hands it out, and keeps it warm.",
            "",
            *lines,
            "",
            "`kvhold COMMAND --help` explains one. Exit codes: 0 done, 1 failed, 2 usage, 3 unreachable, 4 unhealthy.",
        )
    )
