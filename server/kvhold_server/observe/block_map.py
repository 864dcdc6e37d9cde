"""A picture of all blocks of a pool, one letter a block, and what is known about one block or hash.

    n null   r reserved   f free   h held   p held, published by a step that is not complete   q quarantined
    A B C D  cached, from let go most recently to next victim but few (quarters of the eviction order)

A map costs O(blocks): it is drawn in slices that hand the loop back, so it may mix moments that lie milliseconds apart.
It is a picture; the counts beside it are exact.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from kvhold_server.pool.pool import Pool

SLICE_BLOCKS = 4096
MAX_CELLS = 4096
MAX_ORDERED_BLOCKS = 65_536  # with more free blocks the eviction order is not walked: cached blocks are all "A"
MAX_SHOWN_HOLDERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """Letters of cells that stand for `blocks_per_cell` blocks each, by majority."""

    num_blocks: int
    blocks_per_cell: int
    cells: str


async def draw_map(pool: Pool) -> BlockMap:
    """Yields to the loop after each slice."""
    letters = bytearray()
    for part in letter_slices(pool):
        letters += part
        await asyncio.sleep(0)
    return fold(bytes(letters))


def letter_slices(pool: Pool) -> Iterator[bytes]:
    """Letters of all blocks, SLICE_BLOCKS at a time."""
    store = pool.store
    ages = cached_ages(pool)
    for start in range(0, store.num_blocks, SLICE_BLOCKS):
        blocks = range(start, min(start + SLICE_BLOCKS, store.num_blocks))
        yield "".join([_letter(pool, ages, block) for block in blocks]).encode()


def cached_ages(pool: Pool) -> dict[int, str]:
    """Letter of each cached block by its place in the eviction order; empty for very large pools."""
    store = pool.store
    if store.free.count > MAX_ORDERED_BLOCKS:
        return {}
    cached = [block for block in store.free.order() if store.key_of[block] is not None]
    return {block: "DCBA"[4 * i // len(cached)] for i, block in enumerate(cached)}


def _letter(pool: Pool, ages: dict[int, str], block: int) -> str:
    store = pool.store
    if block <= store.num_reserved:
        return "r" if block else "n"
    references = store.refs[block]
    if not references:
        return ages.get(block, "A") if store.key_of[block] is not None else "f"
    if store.dead_refs.get(block, 0) == references:
        return "q"
    origin = store.origin_of[block]
    return "h" if origin is None or origin.is_public else "p"


def fold(letters: bytes) -> BlockMap:
    """At most MAX_CELLS cells; each shows its most frequent letter."""
    per_cell = -(-len(letters) // MAX_CELLS)
    if per_cell <= 1:
        return BlockMap(num_blocks=len(letters), blocks_per_cell=1, cells=letters.decode())
    cells = (letters[i : i + per_cell] for i in range(0, len(letters), per_cell))
    shown = bytes(max(sorted(set(cell)), key=cell.count) for cell in cells)
    return BlockMap(num_blocks=len(letters), blocks_per_cell=per_cell, cells=shown.decode())


# ---- one block, one hash --------------------------------------------------------------------------------------------
WORDS = {
    "n": "null: never handed out",
    "r": "reserved: kept out of allocation",
    "f": "free, no content",
    "h": "held",
    "p": "held; its hash is provisional, seen by its own session only",
    "q": "quarantined: only dead sessions hold it",
    "A": "cached, let go recently",
    "B": "cached",
    "C": "cached",
    "D": "cached, among the next victims",
}


def find(pool: Pool, query: str) -> str:
    """What is known about a block id (digits) or a hash (hex of the pool's digest length). Text for people.

    A number is taken as a block id if there is such a block. Costs O(held blocks) for the holders.
    """
    text = query.strip().lower()
    if text.isdigit() and len(text) < 11 and int(text) < pool.store.num_blocks:
        return "\n".join(describe_block(pool, int(text)))
    if text.isdigit() and len(text) < 11:
        return f"no block {text}: ids are 0..{pool.store.num_blocks - 1}"
    try:
        digest = bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        return f"{query!r} is neither a block id nor a hash in hexadecimal"
    return "\n".join(describe_hash(pool, digest))


def describe_block(pool: Pool, block: int) -> Iterator[str]:
    """Lines about one block. Raises IndexError."""
    store = pool.store
    yield f"block {block}: {WORDS[_letter(pool, cached_ages(pool), block)]}"
    key, origin = store.key_of[block], store.origin_of[block]
    if key is not None and origin is not None:
        yield f"  hash {key.hex()}, group {origin.group}, prefix of {store.key_tokens[block]} tokens"
    for other in store.secondary.get(block, []):
        yield f"  also found under {other.hex()} (a shorter prefix)"
    holders = list(_holders(pool, block))
    for session, sequence_id, group, position in holders[:MAX_SHOWN_HOLDERS]:
        yield f"  in the table of session #{session}, sequence {sequence_id}, group {group}, position {position}"
    if len(holders) > MAX_SHOWN_HOLDERS:
        yield f"  and in {len(holders) - MAX_SHOWN_HOLDERS} more tables"


def describe_hash(pool: Pool, digest: bytes) -> Iterator[str]:
    """Lines about one hash: where it is, or whether it was."""
    store, found = pool.store, False
    for group, index in enumerate(store.index):
        first = index.get(digest)
        if first is not None:
            found = True
            for block in store.copies[group].get(digest, [first]):
                yield from describe_block(pool, block)
    if not found:
        age = store.ghosts.age(digest)
        yield (
            f"not cached: evicted {age} evictions ago"
            if age is not None
            else "not cached, and not among the hashes evicted lately"
        )


def _holders(pool: Pool, block: int) -> Iterator[tuple[int, int, int, int]]:
    if not block or not pool.store.refs[block]:
        return
    for session, owner in pool.tenures.sessions.items():
        for sequence_id, sequence in owner.sequences.items():
            for group, table in enumerate(sequence.tables):
                if block in table:
                    yield session, sequence_id, group, table.index(block)
