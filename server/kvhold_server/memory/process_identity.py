"""Which process a number meant: numbers are used again, start times are not."""

from pathlib import Path


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since the machine booted; 0 if there is none, or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return 0 if fields[0] in ("Z", "X") else int(fields[19])
