"""The free list against a plain list, with hits in its middle and fences in its way."""

import random

import pytest

from kvhold_server.pool.errors import OutOfBlocks
from kvhold_server.pool.free_list import FreeList


class PlainList:
    """What the free list must look like."""

    def __init__(self, num: int) -> None:
        self.order = list(range(num))

    def take(self, count: int, fenced: set[int]) -> list[int]:
        taken = [block for block in self.order if block not in fenced][:count]
        self.order = [block for block in self.order if block not in taken]
        return taken


@pytest.mark.parametrize("seed", range(40))
def test_order_is_kept_through_hits_and_fences(seed: int) -> None:
    rng = random.Random(seed)
    num = 30
    free, plain = FreeList(0, num), PlainList(num)
    hashed: set[int] = set()  # free blocks that can be hit
    held: list[int] = []
    fences = [object() for _ in range(3)]
    fence_of: dict[int, int] = {}  # block → fence, as long as it is free
    for _ in range(400):
        verb = rng.choice(("take", "take_if", "take_if", "prepend", "append", "append", "leave", "leave"))
        if verb == "take":
            count = rng.randint(0, min(4, len(plain.order)))
            taken, num_plain = free.take(count)
            assert taken == plain.take(count, set())
            assert not hashed & set(taken[:num_plain])
            held += taken
        elif verb == "take_if":
            standing = {i for i in range(3) if rng.random() < 0.5}
            fenced = {block for block in plain.order if fence_of.get(block) in standing}
            count = rng.randint(0, min(4, len(plain.order) - len(fenced)))
            taken, _ = free.take_if(
                count,
                lambda block, fenced=fenced, of=fence_of: fences[of[block]] if block in fenced else None,  # type: ignore[misc]
                lambda fence, standing=standing: fences.index(fence) in standing,  # type: ignore[misc]
            )
            assert taken == plain.take(count, fenced)
            held += taken
        elif verb == "leave":
            hit = rng.sample(sorted(hashed), min(len(hashed), rng.randint(0, 3)))
            if rng.random() < 0.3:  # what was freed last, its beginning first
                hit = [block for block in plain.order[-3:] if block in hashed][::-1]
            free.leave(hit)
            plain.order = [block for block in plain.order if block not in hit]
            held += hit
        elif held:
            rng.shuffle(held)
            back = [held.pop() for _ in range(rng.randint(1, min(4, len(held))))]
            fence_of |= {block: rng.randrange(4) for block in back}
            if verb == "prepend":
                free.prepend(back)
                plain.order = back + plain.order
            else:
                free.append(back)
                plain.order += back
                hashed.update(back)
        hashed &= set(plain.order)
        assert list(free.order()) == plain.order
        free.check_invariants()


def test_perf_02_taking_does_not_look_at_the_rest() -> None:
    """PERF-02: entries walked are those taken, whatever the length of the list."""
    free = FreeList(0, 0)
    free.append(list(range(10_000)))
    free.leave(list(range(0, 2_000, 2)))
    taken, _ = free.take(1_000)
    assert taken == list(range(1, 2_000, 2)) and free.count == 8_000


def test_void_entries_are_bounded() -> None:
    """A block that is hit often leaves its old places behind; they are swept before they outnumber the list."""
    free = FreeList(0, 0)
    free.append([1, 2])
    for _ in range(20_000):
        free.leave([1])
        free.append([1])
    assert len(free._queue) < 10_000
    assert list(free.order()) == [2, 1]


def test_remove_finds_a_block_anywhere() -> None:
    free = FreeList(0, 5)
    free.append([7])
    free.prepend([9])
    for block in (2, 9, 7):
        free.remove(block)
    assert list(free.order()) == [0, 1, 3, 4]
    with pytest.raises(ValueError):
        free.remove(7)
    with pytest.raises(OutOfBlocks):
        free.take(5)
