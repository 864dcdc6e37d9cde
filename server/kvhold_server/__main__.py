"""`python -m kvhold_server serve [flags]`. Exit codes: 0 stopped in order, 1 could not start, 2 bad configuration."""

import asyncio
import os
import sys
from collections.abc import Sequence

from kvhold_server.app import serve
from kvhold_server.config import ConfigError, load_config
from kvhold_server.domain.errors import KvholdError
from kvhold_server.logs import set_up_logging

USAGE = "usage: python -m kvhold_server serve [--help] [flags]"


def main(argv: Sequence[str]) -> int:
    """Runs the daemon. `argv` without the program's name."""
    if not argv or argv[0] != "serve":
        print(USAGE, file=sys.stderr)
        return 2
    try:
        config = load_config(argv[1:], os.environ)
    except ConfigError as error:
        print(f"kvhold serve: {error}", file=sys.stderr)
        return 2
    set_up_logging(config)
    try:
        asyncio.run(serve(config))
    except KvholdError as error:
        print(f"kvhold serve: {error.reason()}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
