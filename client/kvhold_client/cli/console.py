"""Where commands write: data to stdout, messages to stderr; tables for people, JSON for programs.

Colour only on a terminal, and never with NO_COLOR set (https://no-color.org).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


@dataclass(slots=True, kw_only=True)
class Console:
    """Two streams and whether they take colour."""

    out: TextIO
    err: TextIO
    color: bool = False

    @classmethod
    def for_streams(cls, out: TextIO, err: TextIO, environ: Mapping[str, str]) -> "Console":
        """Decides about colour."""
        return cls(out=out, err=err, color=out.isatty() and not environ.get("NO_COLOR"))

    @property
    def is_live(self) -> bool:
        """A person watches stdout."""
        return self.out.isatty()

    def print(self, text: str = "") -> None:
        """A line of data."""
        self.out.write(text + "\n")
        self.out.flush()

    def note(self, text: str) -> None:
        """A line about what is going on."""
        self.err.write(text + "\n")
        self.err.flush()

    def error(self, text: str) -> None:
        """Why it did not work."""
        prefix = self.styled("kvhold:", "red") if self.err.isatty() else "kvhold:"
        self.note(f"{prefix} {text}")

    def json(self, value: Any) -> None:
        """One JSON document."""
        self.print(json.dumps(plain(value), indent=2))

    def styled(self, text: str, style: str) -> str:
        """With colour if there is any."""
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if self.color else text

    def heading(self, text: str) -> None:
        """A line above a table."""
        self.print(self.styled(text, "bold"))

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Columns aligned: numbers to the right, as are columns that hold nothing but numbers and sizes."""
        for line in table_lines(headers, rows):
            self.print(line)


def table_lines(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A table as text."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(header), *(len(row[i]) for row in cells)]) for i, header in enumerate(headers)]
    right = [bool(cells) and all(_is_numeric(row[i]) for row in cells) for i in range(len(headers))]
    return [_line(row, widths, right) for row in [[header.upper() for header in headers], *cells]]


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(row, widths, right, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _is_numeric(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in ("-", "+", "")


def plain(value: Any) -> Any:
    """Dataclasses, tuples and bytes as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value
