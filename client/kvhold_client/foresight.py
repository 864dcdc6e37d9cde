"""What a client can answer by itself until the daemon's next answer, because its session has the pool to itself.

    the daemon's answer    allotted 7 9 4 2     12 available     Q, first in the queue, was refused
    A needs a block        7                    11               Q: refused still
    B needs two            9 4                   9               Q: refused still
    C is finished          nothing more         not known        Q may fit now, and C's blocks may be next: ask
    D publishes a block that Q has in its prompt                 Q may hit more now: ask

Nothing here is a guess: as long as this session says nothing, nobody changes the pool, so the daemon would answer the
same. What was drawn is told with the next request, before anything else in it.

Draws evict, and a head that hits less may need less, where the budget bounds what it computes. In a pool of one plain
group prefixes are lost from their end, a block for each that is drawn: then it needs one less, and one less is free.
Where windows lose a prefix as a whole, nothing is known after a draw.
"""

from dataclasses import dataclass
from typing import Any

from kvhold_client.sequence import Sequence
from kvhold_client.step_reply import StepReply

MAX_ALLOTTED_BLOCKS = 2_048  # the daemon gives no more
MIN_ALLOTTED_BLOCKS = 16
_NOT_KNOWN = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitAsk:
    """What a waiting sequence asked for."""

    sequence: Sequence
    num_tokens: int
    options: dict[str, Any]
    token_budget: int  # that it could have used; 0: unbounded


class Foresight:
    """Blocks that may be drawn, how many are free, and who would be refused. See the module."""

    __slots__ = (
        "_allotted",
        "_num_drawn",
        "_refused_until_step",
        "_size",
        "is_open",
        "num_available",
        "num_left",
        "num_missing",
        "refused",
    )

    def __init__(self) -> None:
        self.is_open = False  # the session is alone, and has let go of nothing since the last answer
        self.num_available = _NOT_KNOWN
        self._allotted: list[int] = []
        self.num_left = 0  # of these, from the end of the list
        self.num_missing = 0  # blocks that were needed at once when fewer were left
        self._num_drawn = 0  # since the last answer
        self._size = MIN_ALLOTTED_BLOCKS  # of an allotment that would do
        self.refused: AdmitAsk | None = None
        self._refused_until_step = 0

    def wanted(self, limit: int) -> int:
        """How many blocks to be allotted. Every one costs both sides a little, drawn or not: twice as many as were not
        enough, half as many again as were drawn before there was something else to ask.
        """
        if self.num_missing:
            enough = 2 * max(self._size, self._num_drawn + self.num_missing)
        else:
            enough = max(MIN_ALLOTTED_BLOCKS, self._size * 3 // 4, self._num_drawn * 3 // 2)
        self._size = min(limit, enough)
        return self._size

    def draw(self, count: int) -> list[int]:
        """The next blocks; there must be so many, and at least one is wanted."""
        left = self.num_left
        self.num_left = left - count
        self.num_available -= count
        self._num_drawn += count
        return self._allotted[-left : count - left or None]

    def forget(self) -> None:
        """Something was let go, or the daemon is another one: only it knows what is next."""
        self.is_open = False
        self.num_available = _NOT_KNOWN
        self._allotted, self.num_left, self.refused = [], 0, None

    def more_is_free(self) -> None:
        """Blocks left windows: into the back of the free list, so that the next ones are as before."""
        self.num_available, self.refused = _NOT_KNOWN, None

    def learn(self, reply: StepReply) -> None:
        """An answer came. A refusal that was known still stands: whatever ended it would have been noticed."""
        self.is_open = reply.is_only_session
        self._num_drawn = self.num_missing = 0
        if self.is_open:
            self._allotted, self.num_available = reply.allotted_block_ids, reply.num_available_blocks
            self.num_left = len(self._allotted)
        else:
            self.forget()

    # ------------------------------------------------------------------------------------------ the queue's head
    def was_refused(self, ask: AdmitAsk, until_step: int) -> None:
        """The daemon had too few blocks for it. After `until_step` it is asked again in any case."""
        self.refused, self._refused_until_step = (ask, until_step) if self.is_open else (None, 0)

    def was_admitted(self) -> None:
        """The head of the queue is another one."""
        self.refused = None

    def refuses(self, ask: AdmitAsk, step: int) -> bool:
        """It would be refused now as it was: it asks for no less, and there is no more."""
        known = self.refused
        if known is None or not self.is_open or step > self._refused_until_step:
            return False
        is_same = known.sequence is ask.sequence and (known.num_tokens, known.options) == (ask.num_tokens, ask.options)
        return is_same and (not ask.token_budget or 0 < known.token_budget <= ask.token_budget)

    def published(self, sequence: Sequence, first_unit: int, hash_size_bytes: int) -> None:
        """The sequence publishes its units from this one on: the head might hit them, if it begins alike.

        A digest stands for all that lies before it, too: prompts that differ there have none in common behind.
        """
        if self.refused is not None:
            start, end = first_unit * hash_size_bytes, (first_unit + 1) * hash_size_bytes
            digest = self.refused.sequence.hashes[start:end]
            if digest and digest == sequence.hashes[start:end]:
                self.refused = None
