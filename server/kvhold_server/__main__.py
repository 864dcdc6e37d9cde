"""`python -m kvhold_server serve [flags]`. Exit codes: 0 stopped in order, 1 could not start, 2 bad configuration."""

import asyncio
import os
import sys
from collections.abc import Sequence

from kvhold_server.app import serve
from kvhold_server.config import ConfigError, check_listeners, load_config, load_with_origins
from kvhold_server.domain.errors import KvholdError
from kvhold_server.logs import set_up_logging
from kvhold_server.memory.descriptor_limit import raise_descriptor_limit

USAGE = "usage: python -m kvhold_server serve [--help] [flags] | config show [--origin] [flags]"


def main(argv: Sequence[str]) -> int:
    """Runs the daemon. `argv` without the program's name."""
    if list(argv[:2]) == ["config", "show"]:
        return show_config([flag for flag in argv[2:] if flag != "--origin"], with_origin="--origin" in argv)
    if not argv or argv[0] != "serve":
        print(USAGE, file=sys.stderr)
        return 2
    try:
        config = load_config(argv[1:], os.environ)
        check_listeners(config)
    except ConfigError as error:
        print(f"kvhold serve: {error}", file=sys.stderr)
        return 2
    set_up_logging(config)
    raise_descriptor_limit()
    try:
        asyncio.run(serve(config))
    except ConfigError as error:
        print(f"kvhold serve: {error}", file=sys.stderr)
        return 2
    except KvholdError as error:
        print(f"kvhold serve: {error.reason()}: {error}", file=sys.stderr)
        return 1
    return 0


def show_config(flags: Sequence[str], *, with_origin: bool) -> int:
    """Prints what a daemon started with these flags here would use."""
    try:
        loaded = load_with_origins(flags, os.environ)
    except ConfigError as error:
        print(f"kvhold config: {error}", file=sys.stderr)
        return 2
    try:
        print("\n".join(loaded.lines(with_origin=with_origin)), flush=True)
    except BrokenPipeError:  # `kvhold config show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
