"""Request traces in Mooncake's format, and what their hash ids stand for.

One JSON object per line: `timestamp` (ms from the start), `input_length` and `output_length` (tokens), `hash_ids`: one
id for each 512 prompt tokens, the last one for what remains. Equal ids mean equal content, everything before included.

    hash_ids [0, 7]   700 tokens, 16-token blocks     unit 0: blocks 0..31 · unit 7: blocks 32..42 · the rest is private
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNIT_TOKENS = 512
MAX_LINE_BYTES = 1 << 20
MAX_TOKENS = 2**31 - 1


class TraceError(ValueError):
    """A line that is no request: file, line number, and what is wrong with it."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.line = line
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, *, limit: int | None = None) -> Iterator[TraceRow]:
    """Rows in file order, at most `limit`. Blank lines are skipped. Raises TraceError, OSError."""
    num = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and num >= limit:
                return
            if line.strip():
                yield _row(path, number, line)
                num += 1


def _row(path: Path, number: int, line: bytes) -> TraceRow:
    if len(line) > MAX_LINE_BYTES:
        raise TraceError(path, number, f"longer than {MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TraceError(path, number, f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TraceError(path, number, "not a JSON object")
    timestamp = fields.get("timestamp", 0)
    if not isinstance(timestamp, int | float) or isinstance(timestamp, bool) or not 0 <= timestamp < 1e15:
        raise TraceError(path, number, f"timestamp: {timestamp!r} must be milliseconds from the start")
    input_length = _tokens(path, number, fields, "input_length", low=1)
    output_length = _tokens(path, number, fields, "output_length", low=0)
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise TraceError(path, number, "hash_ids: must be a list of numbers 0..9223372036854775807")
    expected = -(-input_length // UNIT_TOKENS)
    if len(ids) != expected:
        raise TraceError(
            path, number, f"hash_ids: {len(ids)} ids, but {input_length} tokens have {expected} units of {UNIT_TOKENS}"
        )
    return TraceRow(timestamp_ms=timestamp, input_length=input_length, output_length=output_length, hash_ids=tuple(ids))


def _tokens(path: Path, number: int, fields: dict[str, object], name: str, *, low: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value <= MAX_TOKENS:
        raise TraceError(path, number, f"{name}: {value!r} must be a whole number {low}..{MAX_TOKENS}")
    return value


class UnitDigests:
    """Digests of the hash units of prompts. Remembers those of recent trace units: they repeat, that is the point."""

    def __init__(self, hash_block_size_tokens: int, hash_size_bytes: int, *, max_units: int = 4096) -> None:
        """Raises ValueError unless the unit of hashing divides the trace's."""
        if UNIT_TOKENS % hash_block_size_tokens:
            raise ValueError(f"hash units of {hash_block_size_tokens} tokens do not divide the trace's {UNIT_TOKENS}")
        self._per_unit = UNIT_TOKENS // hash_block_size_tokens
        self._unit_tokens = hash_block_size_tokens
        self._size = hash_size_bytes
        self._max_units = max_units
        self._known: dict[int, bytes] = {}

    def of_prompt(self, row: TraceRow) -> bytes:
        """Digests of the prompt's complete hash units, concatenated."""
        whole = b"".join(self._unit(unit) for unit in row.hash_ids)
        return whole[: row.input_length // self._unit_tokens * self._size]

    def _unit(self, unit: int) -> bytes:
        digests = self._known.pop(unit, None)
        if digests is None:
            digests = hashlib.shake_256(b"unit %d" % unit).digest(self._per_unit * self._size)
            if len(self._known) >= self._max_units:
                del self._known[next(iter(self._known))]
        self._known[unit] = digests
        return digests

    def of_generated(self, row_index: int, unit_index: int) -> bytes:
        """Digest of a unit that holds generated tokens: nobody else's."""
        return hashlib.shake_256(b"row %d unit %d" % (row_index, unit_index)).digest(self._size)
