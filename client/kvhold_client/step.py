"""Builds one Step message out of columns, and reads its answer back into columns. The hot path of the client.

Items are rows of numbers; `encode` turns them into columns and moves each into the message with one call, so that an
item costs one tuple. One builder is reused from step to step. An optional column stays out until some item needs it:

    extend(7, slots=33)                     sequence_ids [7]     slots_needed [33]      num_lookahead_tokens (absent)
    extend(9, slots=18, num_lookahead=2)    sequence_ids [7, 9]  slots_needed [33, 18]  num_lookahead_tokens [0, 2]
"""

from typing import Any, Protocol

from kvhold.v1 import block_pb2 as pb
from kvhold_client.step_reply import StepReply

# What an absent entry of an optional column means, where it is not 0 or false.
_DEFAULTS = {"expect_hit_tokens": -1, "max_hit_tokens": -1, "max_new_tokens": -1}


def _default(name: str, value: Any) -> Any:
    return _DEFAULTS.get(name, type(value)())


class Ahead(Protocol):
    """A step in two halves: what `submit` needs of a session."""

    def submit(self, request: pb.StepRequest) -> None:
        """Sends the request and returns. It must not change before `collect`."""

    def collect(self) -> StepReply:
        """Its answer. Raises what the step would."""


class Columns:
    """Items of one kind. A row has one value for each required column; rows are turned into columns once, in C."""

    __slots__ = ("hash_parts", "names", "optional", "rows")

    def __init__(self, *names: str) -> None:
        self.names = names  # of the required columns
        self.rows: list[tuple[int, ...]] = []
        self.optional: dict[str, list[Any]] = {}
        self.hash_parts: list[bytes | bytearray] = []

    def append(self, row: tuple[int, ...], hashes: bytes | bytearray, options: dict[str, Any]) -> None:
        """Adds an item; absent options keep the wire's default."""
        if hashes:
            self.hash_parts.append(hashes)
        for name, value in options.items():
            column = self.optional.setdefault(name, [])
            column.extend([_default(name, value)] * (len(self.rows) - len(column)))
            column.append(value)
        self.rows.append(row)

    def options_of(self, i: int) -> dict[str, Any]:
        """What was given for item i."""
        return {name: column[i] for name, column in self.optional.items() if i < len(column)}

    def clear(self) -> None:
        """Forgets all items; the lists stay."""
        if self.rows:
            self.rows.clear()
            self.optional.clear()
            self.hash_parts.clear()

    def fill(self, message: Any) -> None:
        """Moves everything into an Items message."""
        for name, values in zip(self.names, zip(*self.rows, strict=True), strict=True):
            getattr(message, name).extend(values)
        for name, column in self.optional.items():
            column.extend([_default(name, column[0])] * (len(self.rows) - len(column)))
            getattr(message, name).extend(column)
        if self.hash_parts:
            message.hashes = b"".join(self.hash_parts)


class StepBuilder:
    """One Step in the making. Not thread-safe."""

    def __init__(self, hash_size_bytes: int) -> None:
        self._hash_size_bytes = hash_size_bytes
        self.free_items = Columns("sequence_ids", "publish_tokens", "num_hashes")
        self.extend_items = Columns("sequence_ids", "slots_needed", "processed_tokens", "publish_tokens", "num_hashes")
        self.drawn_items = Columns("sequence_ids", "slots_needed", "processed_tokens", "publish_tokens", "num_hashes")
        self.num_drawn_blocks = 0
        self.max_allotted_blocks = 0
        self.admit_items = Columns("sequence_ids", "num_tokens", "num_hashes")
        self.lookup_items = Columns("num_tokens", "num_hashes")
        self.invalid_block_ids: list[int] = []
        self.token_budget = 0
        self.report_evictions = False
        self._message = pb.StepRequest()

    @property
    def is_empty(self) -> bool:
        """Nothing was asked for."""
        return not (
            self.free_items.rows
            or self.drawn_items.rows
            or self.extend_items.rows
            or self.admit_items.rows
            or self.lookup_items.rows
            or self.invalid_block_ids
        )

    def free(
        self, sequence_id: int, *, publish_tokens: int = 0, hashes: bytes | bytearray = b"", **options: Any
    ) -> None:
        """Releases a sequence. Options: fence_own, preempted."""
        self.free_items.append((sequence_id, publish_tokens, len(hashes) // self._hash_size_bytes), hashes, options)

    def extend(
        self,
        sequence_id: int,
        *,
        slots_needed: int,
        processed_tokens: int = 0,
        publish_tokens: int = 0,
        hashes: bytes | bytearray = b"",
        **options: Any,
    ) -> None:
        """A running sequence's need. Options: the optional columns of ExtendItems by name."""
        num_hashes = len(hashes) // self._hash_size_bytes
        self.extend_items.append(
            (sequence_id, slots_needed, processed_tokens, publish_tokens, num_hashes), hashes, options
        )

    def admit(self, sequence_id: int, *, num_tokens: int, hashes: bytes | bytearray = b"", **options: Any) -> None:
        """A waiting sequence. Options: the optional columns of AdmitItems by name (expect_hit_tokens: -1 is any)."""
        self.admit_items.append((sequence_id, num_tokens, len(hashes) // self._hash_size_bytes), hashes, options)

    def lookup(self, *, num_tokens: int, hashes: bytes | bytearray, **options: Any) -> None:
        """A hint: how much of this prompt is cached. Options: max_hit_tokens."""
        self.lookup_items.append((num_tokens, len(hashes) // self._hash_size_bytes), hashes, options)

    def invalidate_blocks(self, block_ids: list[int]) -> None:
        """Drops the hashes of these blocks; nothing is freed."""
        self.invalid_block_ids.extend(block_ids)

    def clear(self) -> None:
        """Forgets all items."""
        for columns in (self.drawn_items, self.free_items, self.extend_items, self.admit_items, self.lookup_items):
            columns.clear()
        self.num_drawn_blocks = self.max_allotted_blocks = 0
        self.invalid_block_ids.clear()
        self.token_budget = 0

    def encode(self) -> pb.StepRequest:
        """The message without session and step. It is reused: send it before the next `encode`."""
        message = self._message
        message.Clear()
        if self.max_allotted_blocks:
            message.max_allotted_blocks = self.max_allotted_blocks
        if self.drawn_items.rows:
            message.num_drawn_blocks = self.num_drawn_blocks
            self.drawn_items.fill(message.drawn)
        if self.free_items.rows:
            self.free_items.fill(message.free)
        if self.extend_items.rows:
            self.extend_items.fill(message.extend)
        if self.admit_items.rows:
            message.admit.token_budget = self.token_budget
            self.admit_items.fill(message.admit)
        if self.lookup_items.rows:
            self.lookup_items.fill(message.lookup)
        if self.invalid_block_ids:
            message.invalidate.block_ids.extend(self.invalid_block_ids)
        if self.report_evictions:
            message.report_evictions = True
        return message


def decode_step(message: pb.StepResponse) -> StepReply:
    """Its columns, each as a plain list when it is asked for."""
    return StepReply(message)
