"""One sequence: a block table per group, and how far each table has been offered to the prefix index.

    tokens      0     4     8     12    16
    group full  [ 5 ,  6 ,  7 ,  9 ]            offered 3: block 9 is not full yet
    group sw    [ 0 ,  0 ,  8 , 10 ]            0 = left the window (or was never needed)

Entry `i` of a table never changes its position: workers keep their own append-only rows.
"""

from __future__ import annotations

from kvhold_server.pool.waiting import Refusal


class Sequence:
    """Tables and hashes of one request, as its session names it."""

    __slots__ = (
        "boundary_tokens",
        "extra",
        "hashes",
        "is_stale",
        "num_prompt_tokens",
        "num_tokens",
        "offered",
        "refusal",
        "sequence_id",
        "tables",
        "tails",
        "views",
    )

    def __init__(self, sequence_id: int, num_groups: int) -> None:
        self.sequence_id = sequence_id
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.offered: list[int] = [0] * num_groups  # leading entries that were offered to the index
        self.hashes: list[bytes] = []  # one per complete hash unit of known tokens
        self.views: dict[int, list[bytes]] = {}  # stride → hashes of whole blocks of that many units, made on demand
        self.num_prompt_tokens = 0
        self.boundary_tokens = 0  # junction: a prefix that somebody computed and some group did not keep
        self.refusal: Refusal | None = None  # of its last admission
        self.is_stale = False  # a reset happened while it ran: it publishes nothing any more
        self.num_tokens = 0  # known at admission
        self.tails: dict[int, int] = {}  # group → entry that was hit in part and must be copied before it is written
        self.extra: dict[int, object] = {}  # group → what its kind remembers of this sequence

    def block_hashes(self, stride: int) -> list[bytes]:
        """Hashes of whole blocks of `stride` units: the last unit of a block stands for the whole prefix."""
        if stride == 1:
            return self.hashes
        view = self.views.setdefault(stride, [])
        if len(view) < len(self.hashes) // stride:
            view += self.hashes[len(view) * stride + stride - 1 :: stride]
        return view

    def hash_before(self, tokens: int, unit_tokens: int) -> bytes | None:
        """Hash of the prefix of this many tokens; None for the empty one."""
        return self.hashes[tokens // unit_tokens - 1] if tokens else None
