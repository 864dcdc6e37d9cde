"""The sequential rule: requests one after the other, so that totals depend on nothing but the pool.

    digest of block j = hash_ids[j], for each complete 512-token block; a hit ends before the last token
    in file order; at most `num_live` requests hold blocks, the oldest is freed before the next is admitted
    output tokens are not modelled; a request that needs more blocks than the pool has is skipped

It is the rule of published hit rates for the Mooncake traces. Freeing the oldest and admitting the next are one Step.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvhold_client.errors import InternalFault
from kvhold_client.replay.trace import UNIT_TOKENS, TraceRow
from kvhold_client.results import ItemStatus
from kvhold_client.session import Session

DIGEST_BYTES = 16
# Pool sizes in blocks, and requests alive, for which totals are published.
STANDARD_CASES = ((500, 1), (2000, 1), (2000, 16), (5000, 16), (20000, 16), (50000, 64), (200000, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialTotals:
    """What a run found."""

    num_blocks: int
    num_live: int
    num_requests: int
    num_skipped: int
    query_tokens: int
    hit_tokens: int
    num_hit_blocks: int
    num_full_blocks: int
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """0..1."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


def replay_sequentially(
    session: Session,
    rows: Iterable[TraceRow],
    *,
    num_blocks: int,
    num_live: int,
    report_every: int = 100,
    on_progress: Callable[[], None] = lambda: None,
) -> SequentialTotals:
    """Replays through a session on a pool of `num_blocks` blocks of 512 tokens, null block included."""
    builder = session.builder()
    alive: deque[int] = deque()
    num_requests = num_skipped = query = hit = full = 0
    for number, row in enumerate(rows, start=1):
        num_requests += 1
        num_full = row.input_length // UNIT_TOKENS
        if -(-row.input_length // UNIT_TOKENS) > num_blocks - 1:
            num_skipped += 1
            continue
        session.begin_step()
        builder.clear()
        if len(alive) == num_live:
            builder.free(alive.popleft())
        hashes = b"".join(unit.to_bytes(DIGEST_BYTES, "big") for unit in row.hash_ids[:num_full])
        builder.admit(number, num_tokens=row.input_length, hashes=hashes)
        reply = session.step(builder.encode())
        while reply.admit_statuses[0] == ItemStatus.OUT_OF_BLOCKS and alive:
            builder.clear()
            builder.free(alive.popleft())
            builder.admit(number, num_tokens=row.input_length, hashes=hashes)
            reply = session.step(builder.encode())
        if reply.admit_statuses[0] != ItemStatus.OK:
            raise InternalFault(f"request {number} was refused: {ItemStatus(reply.admit_statuses[0]).name}")
        alive.append(number)
        query += row.input_length
        hit += reply.admit_hit_tokens[0]
        full += num_full
        if number % report_every == 0:
            on_progress()
    return SequentialTotals(
        num_blocks=num_blocks,
        num_live=num_live,
        num_requests=num_requests,
        num_skipped=num_skipped,
        query_tokens=query,
        hit_tokens=hit,
        num_hit_blocks=hit // UNIT_TOKENS,
        num_full_blocks=full,
    )
