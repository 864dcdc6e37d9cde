"""Exit codes, and the two errors that carry them."""

OK = 0
FAILED = 1
USAGE = 2
UNREACHABLE = 3
UNHEALTHY = 4


class UsageError(Exception):
    """The command line, the environment or a file on it cannot be used as it is."""


class CommandFailed(Exception):
    """The command did not do what it was for; the text says why."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
