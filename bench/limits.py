"""Messages at their limits: as many items as a step may have, and a prompt that fills a message.

    python bench/limits.py

    65,536 sequences in one step    admitted, extended, freed: each in one request
    32 MiB in one message           a prompt of a million blocks, admitted and freed

Every size over both transports; time is the whole step, from the client's table to its tables. One more than the limit
is refused, typed, and leaves nothing behind.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from scale import BLOCK, HASH_BYTES, simulated
from stage import choose_cores, daemon

from kvhold_client import Client
from kvhold_client.errors import InvalidRequest, KvholdError
from kvhold_client.session import Session

ROOM_BYTES = 4096  # of a message, for what is not digests


def main() -> int:
    cores = choose_cores()
    missed = 0
    with daemon(cores) as live:
        for transport in ("local", "grpc"):
            client = Client(live.target)
            for label, found in measured(client, transport):
                print(f"{transport:6} {label:42} {found}", flush=True)
                missed += "not refused" in found
            print(f"{transport:6} memory of the daemon {live.rss_bytes() >> 20} MiB", flush=True)
            client.close()
    return 1 if missed else 0


def measured(client: Client, transport: str) -> Iterator[tuple[str, str]]:
    """What each request at a limit takes, and what one beyond it gets."""
    limits = {bound.name: bound.max_value for bound in client.capabilities().bounds}
    num_items, num_bytes = limits["StepRequest.items"], limits["message_bytes"]
    longest = (num_bytes - ROOM_BYTES) // HASH_BYTES
    request = simulated(f"limits-{transport}", longest + 3 * num_items)
    pool = client.open_pool(replace(request, max_model_len_tokens=2 * longest * BLOCK))
    session = pool.open_session(local_transport=transport == "local")
    assert session.transport == transport
    yield from many_items(session, num_items)
    for num_blocks in (longest // 8, longest):
        yield f"admit a prompt of {num_blocks:,} blocks", timed(lambda n=num_blocks: admit_long(session, n))
        yield f"free {num_blocks:,} blocks", timed(lambda: free_all(session, 1))
    yield "a message beyond the limit", refusal(lambda: admit_long(session, longest + ROOM_BYTES))
    session.close()
    client.delete_pool(pool.name)


def many_items(session: Session, num_items: int) -> Iterator[tuple[str, str]]:
    """Sequences of one block, all in one request."""
    yield f"admit {num_items:,} sequences", timed(lambda: admit_many(session, num_items))
    yield f"extend {num_items:,} sequences", timed(lambda: extend_all(session, num_items))
    yield f"free {num_items:,} sequences", timed(lambda: free_all(session, num_items))
    yield "one item more", refusal(lambda: admit_many(session, num_items + 1))


def admit_many(session: Session, num: int) -> None:
    session.begin_step()
    builder = session.builder()
    for i in range(num):
        builder.admit(i + 1, num_tokens=BLOCK, skip_lookup=True)
    assert len(session.step(builder.encode()).admit_block_ids) == num


def extend_all(session: Session, num: int) -> None:
    session.begin_step()
    builder = session.builder()
    for i in range(num):
        builder.extend(i + 1, slots_needed=BLOCK + 1)
    assert len(session.step(builder.encode()).extend_block_ids) == num


def admit_long(session: Session, num_blocks: int) -> None:
    session.begin_step()
    builder = session.builder()
    digests = b"".join(i.to_bytes(HASH_BYTES, "big") for i in range(num_blocks))
    builder.admit(1, num_tokens=num_blocks * BLOCK, hashes=digests, max_hit_tokens=0)
    assert len(session.step(builder.encode()).admit_block_ids) == num_blocks


def free_all(session: Session, num: int) -> None:
    session.begin_step()
    builder = session.builder()
    for i in range(num):
        builder.free(i + 1)
    session.step(builder.encode())


def timed(work: Callable[[], Any]) -> str:
    begun = time.perf_counter()
    work()
    return f"{(time.perf_counter() - begun) * 1e3:8.1f} ms"


def refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except InvalidRequest as error:
        return f"refused: {error.reason}"
    except KvholdError as error:
        return f"refused: {type(error).__name__}: {str(error)[:80]}"
    return "not refused"


if __name__ == "__main__":
    sys.exit(main())
