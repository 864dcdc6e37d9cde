"""`python -m kvhold_client` is the `kvhold` command."""

import sys

from kvhold_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
