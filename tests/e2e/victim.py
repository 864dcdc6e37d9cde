"""A scheduler that computes some prompts and then waits to be killed: `python victim.py TARGET POOL NUM_PROMPTS`.

It writes one JSON line when it is ready: what it would hit if it admitted the same prompts again.
"""

import hashlib
import json
import sys
import time

from kvhold_client.client import Client, Pool
from kvhold_client.replay.stamps import Stamper
from kvhold_client.sequence import Sequence
from kvhold_client.session import Session

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 20
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + 5


def prompt_hashes(number: int) -> bytes:
    """Digests of prompt `number`: all share their first four blocks."""
    shared = hashlib.shake_256(b"shared").digest(4 * 32)
    return shared + hashlib.shake_256(b"prompt %d" % number).digest((PROMPT_BLOCKS - 4) * 32)


def digests(number: int) -> list[bytes]:
    """One by one."""
    hashes = prompt_hashes(number)
    return [hashes[i : i + 32] for i in range(0, len(hashes), 32)]


def admit_prompts(session: Session, numbers: list[int]) -> "list[tuple[Sequence, int]]":
    """Admits each in a step of its own; returns sequences and hit tokens."""
    admitted = []
    for number in numbers:
        session.begin_step()
        sequence = session.table.new_sequence(1000 + number, prompt_hashes(number))
        session.table.admit(sequence, num_tokens=PROMPT_TOKENS)
        (admission,) = session.table.flush().admitted
        admitted.append((sequence, admission.hit_tokens))
    return admitted


def stamp(pool: Pool, session: Session, stamper: Stamper, admitted: "list[tuple[Sequence, int]]") -> None:
    """Computes what was not hit."""
    for number, (sequence, hit_tokens) in enumerate(admitted):
        first = hit_tokens // BLOCK_TOKENS
        blocks = sequence.tables[0][first:PROMPT_BLOCKS]
        stamper.write(0, blocks, digests(number)[first:])


def main(target: str, pool_name: str, num_prompts: int) -> None:
    """Until killed."""
    client = Client(target)
    pool = client.get_pool(pool_name)
    session = pool.open_session(client_name="victim")
    memory = pool.map_rank(0, session=session, library="numpy")
    admitted = admit_prompts(session, list(range(num_prompts)))
    stamp(pool, session, Stamper(memory), admitted)
    session.begin_step()  # everything before it is complete now
    session.table.flush(force=True)
    builder = session.builder()
    for number in range(num_prompts):
        builder.lookup(num_tokens=PROMPT_TOKENS, hashes=prompt_hashes(number))
    session.begin_step()
    would_hit = session.step(builder.encode()).lookup_hit_tokens
    # One more that is published and never completed: its bytes are not there.
    session.begin_step()
    torn = session.table.new_sequence(9999, prompt_hashes(77))
    session.table.admit(torn, num_tokens=PROMPT_TOKENS)
    assert session.table.flush().admitted
    held = len({block for sequence in session.table.sequences.values() for block in sequence.tables[0]})
    print(json.dumps({"would_hit": would_hit, "held": held, "short_id": session.short_id}), flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
