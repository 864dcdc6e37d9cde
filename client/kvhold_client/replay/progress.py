"""A progress line on a terminal; on a pipe, a line every few seconds."""

import time
from typing import TextIO

BAR_WIDTH = 28
LIVE_INTERVAL_S = 0.1
PIPE_INTERVAL_S = 5.0


class ProgressLine:
    """Writes to stderr, so that data on stdout stays clean. `finish` leaves the cursor on a new line."""

    def __init__(self, err: TextIO, total: int) -> None:
        self._err = err
        self._total = max(total, 1)
        self._is_live = err.isatty()
        self._last_s = -PIPE_INTERVAL_S
        self._wrote = False

    def update(self, done: int, text: str) -> None:
        """Draws at most ten times a second."""
        now = time.monotonic()
        if now - self._last_s < (LIVE_INTERVAL_S if self._is_live else PIPE_INTERVAL_S):
            return
        self._last_s, self._wrote = now, True
        share = min(done / self._total, 1.0)
        if self._is_live:
            bar = "█" * round(share * BAR_WIDTH)
            self._err.write(f"\r\x1b[K[{bar:·<{BAR_WIDTH}}] {100 * share:3.0f} %  {text}")
        else:
            self._err.write(f"{100 * share:3.0f} %  {text}\n")
        self._err.flush()

    def finish(self) -> None:
        """Ends the line."""
        if self._wrote and self._is_live:
            self._err.write("\r\x1b[K")
            self._err.flush()
