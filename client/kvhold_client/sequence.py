"""One sequence as its scheduler's client knows it: block tables, hashes, and how long it may stay silent."""

import enum
from dataclasses import dataclass


class SequenceState(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # holds no blocks; perhaps its hashes are known to the daemon
    RUNNING = "running"  # holds blocks
    DONE = "done"  # finished or aborted
    LOST = "lost"  # the daemon restarted and could not give its blocks back: preempt it


class Sequence:
    """Made by `SequenceTable.new_sequence`. Read `quiet_tokens` and `tables`; everything else belongs to the table.

    A step that brings a running sequence to at most `quiet_tokens` tokens needs nothing from the daemon: its last block
    has room and no block leaves a window. That comparison is all that most sequences cost in most steps.

        16-token blocks, table [7, 9], 20 tokens:   quiet_tokens = 32
        to 21, 22, … 32 tokens: silent              to 33: `table.extend`
    """

    __slots__ = (
        "hashes",
        "is_known",
        "num_hashes",
        "num_hashes_drawn",
        "num_hashes_sent",
        "num_prompt_tokens",
        "num_tokens",
        "proven_tokens",
        "publish_step",
        "published_tokens",
        "quiet_tokens",
        "released",
        "sequence_id",
        "state",
        "tables",
    )

    def __init__(self, sequence_id: int, hashes: bytes | bytearray, num_hashes: int) -> None:
        self.sequence_id = sequence_id
        self.state = SequenceState.WAITING
        self.quiet_tokens = 0
        self.tables: list[list[int]] = []  # one per group; 0 stands where a block is not kept
        self.hashes = bytearray(hashes)
        self.num_hashes = num_hashes
        self.num_hashes_sent = 0
        self.num_hashes_drawn = 0  # behind those: they wait for the next request, with what the sequence drew
        self.num_tokens = 0  # known tokens, as last said
        self.num_prompt_tokens = 0  # as said when it asked to be admitted
        self.is_known = False  # the daemon remembers something of it
        self.released: list[int] = []  # leading entries that left the window, per group
        self.published_tokens = 0  # in step `publish_step`
        self.publish_step = 0
        self.proven_tokens = 0  # published in a step that was complete when the next publishing began

    def add_hashes(self, digests: bytes, num_hashes: int = 1) -> None:
        """Appends digests of newly full units; they travel with the sequence's next item."""
        self.hashes += digests
        self.num_hashes += num_hashes

    def unsent(self, hash_size_bytes: int) -> tuple[bytes | bytearray, int]:
        """Digests that are in no request yet, and their number."""
        num_said = self.num_hashes_sent + self.num_hashes_drawn
        num = self.num_hashes - num_said
        if not num:
            return b"", 0
        return self.hashes[num_said * hash_size_bytes :] if num_said else self.hashes, num

    def forget_blocks(self) -> None:
        """It holds nothing any more."""
        self.quiet_tokens = self.num_hashes_drawn = 0
        self.tables = []
        self.released = []
        self.published_tokens = self.publish_step = self.proven_tokens = 0

    def lose(self) -> None:
        """The daemon does not know it any more: it must be preempted and admitted again."""
        self.forget_blocks()
        self.state, self.is_known, self.num_hashes_sent = SequenceState.LOST, False, 0

    def held(self, completed_step: int, hash_size_bytes: int) -> "HeldSequence":
        """What to re-assert after a daemon's restart; only what a completed step wrote counts as written."""
        proven = self.publish_step <= completed_step
        return HeldSequence(
            sequence_id=self.sequence_id,
            num_tokens=max(self.num_tokens, 1),
            num_prompt_tokens=self.num_prompt_tokens,
            publish_tokens=self.published_tokens if proven else self.proven_tokens,
            tables=self.tables,
            hashes=bytes(self.hashes[: self.num_hashes_sent * hash_size_bytes]),
        )

    def __repr__(self) -> str:
        blocks = "+".join(str(len(table)) for table in self.tables)
        return f"Sequence({self.sequence_id}, {self.state.value}, blocks {blocks or 0}, quiet to {self.quiet_tokens})"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSequence:
    """What a client says it holds when a daemon restarted."""

    sequence_id: int
    num_tokens: int
    num_prompt_tokens: int
    publish_tokens: int
    tables: list[list[int]]
    hashes: bytes
