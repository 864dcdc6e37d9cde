"""`kvhold completion bash|zsh|fish`: a script that completes commands and their flags.

bash   source <(kvhold completion bash)
zsh    source <(kvhold completion zsh)
fish   kvhold completion fish | source
"""

import argparse
from collections.abc import Callable, Mapping
from importlib import import_module

from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import OK

COMMON_FLAGS = ("--help", "--output", "--target", "--timeout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="for which shell")


def run(args: argparse.Namespace, console: Console) -> int:
    """Prints the script."""
    console.print(SCRIPTS[args.shell](flags_by_command()))
    return OK


def flags_by_command() -> dict[str, tuple[str, ...]]:
    """Command → its long flags, read from the commands themselves."""
    commands = import_module("kvhold_client.cli.main").COMMANDS
    found: dict[str, tuple[str, ...]] = {}
    for name, command in commands.items():
        if command.takes_rest:
            found[name] = ("--help",)
            continue
        parser = argparse.ArgumentParser(add_help=False)
        import_module(f"kvhold_client.cli.{command.module}").add_arguments(parser)
        own = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        found[name] = tuple(sorted({*own, *COMMON_FLAGS}))
    return found


def _bash(flags: Mapping[str, tuple[str, ...]]) -> str:
    cases = "\n".join(f'    {name}) words="{" ".join(own)}" ;;' for name, own in flags.items())
    return f"""_kvhold() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(flags)}" -- "$current"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _kvhold kvhold"""


def _zsh(flags: Mapping[str, tuple[str, ...]]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(flags)


def _fish(flags: Mapping[str, tuple[str, ...]]) -> str:
    lines = ["complete -c kvhold -f", f'complete -c kvhold -n __fish_use_subcommand -a "{" ".join(flags)}"']
    for name, own in flags.items():
        lines += [f'complete -c kvhold -n "__fish_seen_subcommand_from {name}" -l {flag[2:]}' for flag in own]
    return "\n".join(lines)


SCRIPTS: dict[str, Callable[[Mapping[str, tuple[str, ...]]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
