"""The free list: an exact two-ended queue of block ids whose middle can be left in O(1), without an object per block.

    front                                                                      back
    ├── stack (last freed without hash, first out) ── fresh ids ── queue (freed with hash) ──┤

* *fresh* is a virtual range: ids that were never handed out cost nothing, so opening a large pool does not either.
* Only blocks of the queue have hashes, so only they can be hit while free, that is, leave from the middle. Leaving is
  lazy: `stale[b]` counts entries of `b` that are void. A block's void entries always lie before its valid one, because
  it re-enters at the back (or in the stack, whose plain entries are never void).
* A *run* is a stretch of blocks that some session had to walk past because of a fence (see fences.py). It stands in the
  stack as one negative entry, so that walking past it again costs one step, however long it is.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from kvhold_server.pool.errors import OutOfBlocks

_COMPACT_AT = 4_096


class _Run:
    __slots__ = ("blocks", "fence", "is_plain")

    def __init__(self, fence: object, is_plain: bool, blocks: list[int]) -> None:
        self.fence = fence
        self.is_plain = is_plain  # from the stack or fresh: no entry can be void
        self.blocks = blocks  # front of the list first


class FreeList:
    """Ids first..end-1 in order at first. `count` is the number of valid entries."""

    __slots__ = (
        "_end",
        "_fresh",
        "_head",
        "_next_run",
        "_num_stale",
        "_queue",
        "_runs",
        "_stack",
        "_stale",
        "count",
        "recent",
    )

    def __init__(self, first: int, end: int) -> None:
        self.count = end - first
        self._stack: list[int] = []  # top last; a negative entry -k names run k
        self._fresh, self._end = first, end
        self._queue: list[int] = []
        self._head = 0
        self._stale: Counter[int] = Counter()
        self._num_stale = 0
        self._runs: dict[int, _Run] = {}
        self._next_run = 1
        self.recent: deque[list[int]] | None = None  # what came to the back, for whoever keeps the order elsewhere

    def take(self, count: int) -> tuple[list[int], int]:
        """Removes the `count` first blocks; returns them and how many of the leading ones never have a hash.

        Raises OutOfBlocks, and changes nothing, if there are fewer.
        """
        if count > self.count:
            raise OutOfBlocks(count, self.count)
        if self._runs:
            return self.take_if(count, lambda _block: None, lambda _fence: False)
        self.count -= count
        stack = self._stack
        if count <= len(stack):
            if count == 1:
                return [stack.pop()], 1
            ids = stack[: -count - 1 : -1]
            if count:
                del stack[-count:]
            return ids, count
        ids = stack[::-1]
        stack.clear()
        count -= len(ids)
        num_fresh = min(count, self._end - self._fresh)
        if num_fresh:
            ids += range(self._fresh, self._fresh + num_fresh)
            self._fresh += num_fresh
            count -= num_fresh
        num_plain = len(ids)
        if count:
            ids += self._take_queued(count)
        return ids, num_plain

    def front(self, count: int) -> list[int]:
        """The blocks that `take` would return, or fewer where there are fewer.

        Nothing is removed but void entries on the way, so that looking often costs no more than taking.
        """
        if self._runs:
            return list(islice(self.order(), count))
        ids = self._stack[: -count - 1 : -1]
        count -= len(ids)
        num_fresh = min(count, self._end - self._fresh)
        ids += range(self._fresh, self._fresh + num_fresh)
        count -= num_fresh
        if count:
            taken = self._take_queued(min(count, self.count - len(ids)))
            start = self._head - len(taken)
            if start < 0:  # taking has cut off what lay before
                self._queue[:0], self._head = taken, 0
            else:
                self._queue[start : self._head], self._head = taken, start
            ids += taken
        return ids

    def _take_queued(self, count: int) -> list[int]:
        queue, head, stale = self._queue, self._head, self._stale
        taken: list[int] = []
        while count > len(taken):
            chunk = queue[head : head + count - len(taken)]
            head += len(chunk)
            if not stale or stale.keys().isdisjoint(chunk):
                taken += chunk
            else:
                taken += [block for block in chunk if not self._drop_void(block)]
        if head > _COMPACT_AT and head * 2 > len(queue):
            del queue[:head]
            head = 0
        self._head = head
        return taken

    def _drop_void(self, block: int) -> bool:
        """Forgets one void entry of this block; False if its entry is valid."""
        void = self._stale.get(block, 0)
        if not void:
            return False
        if void == 1:
            del self._stale[block]
        else:
            self._stale[block] = void - 1
        self._num_stale -= 1
        return True

    def take_if(
        self, count: int, fence_of: Callable[[int], object], stands: Callable[[object], bool]
    ) -> tuple[list[int], int]:
        """As `take`, but walks past blocks for which `fence_of` names a fence; those keep their places.

        `stands` says whether a fence named earlier still stands in this taker's way. The caller has checked that enough
        blocks without a fence are there. None of the result is known to be plain.
        """
        taken: list[int] = []
        passed: list[_Run] = []
        while len(taken) < count:
            run = self._pop_front_run()
            if run.fence is not None and stands(run.fence):
                if not run.is_plain and not self._stale.keys().isdisjoint(run.blocks):
                    run.blocks = [block for block in run.blocks if not self._drop_void(block)]
                passed.append(run)
                continue
            for i, block in enumerate(run.blocks):
                if len(taken) == count:
                    self._push_run(_Run(run.fence, run.is_plain, run.blocks[i:]))
                    break
                if not run.is_plain and self._drop_void(block):
                    continue
                fence = fence_of(block)
                if fence is None:
                    taken.append(block)
                elif passed and passed[-1].fence is fence and passed[-1].is_plain is run.is_plain:
                    passed[-1].blocks.append(block)
                else:
                    passed.append(_Run(fence, run.is_plain, [block]))
        for run in reversed(passed):
            self._push_run(run)
        self.count -= count
        return taken, 0

    def _pop_front_run(self) -> _Run:
        """The first entries as one run: a parked run, or a stretch of stack, fresh ids or queue."""
        if self._stack:
            top = self._stack.pop()
            return self._runs.pop(-top) if top < 0 else _Run(None, True, [top])
        if self._fresh < self._end:
            self._fresh += 1
            return _Run(None, True, [self._fresh - 1])
        self._head += 1
        return _Run(None, False, [self._queue[self._head - 1]])

    def _push_run(self, run: _Run) -> None:
        self._runs[self._next_run] = run
        self._stack.append(-self._next_run)
        self._next_run += 1

    def prepend(self, blocks: list[int]) -> None:
        """Puts blocks without hash at the front, the first of them foremost."""
        self._stack += reversed(blocks)
        self.count += len(blocks)

    def append(self, blocks: list[int]) -> None:
        """Puts blocks at the back, in this order."""
        self._queue += blocks
        if self.recent is not None:
            self.recent.append(blocks)
        self.count += len(blocks)

    def leave(self, blocks: list[int]) -> None:
        """These blocks, free and with a hash (so in the queue or a run), are held from now on."""
        queue, num = self._queue, len(blocks)
        self.count -= num
        if 0 < num <= len(queue) - self._head and queue[-1] == blocks[0] and queue[-num:] == blocks[::-1]:
            del queue[-num:]  # a prefix that was freed last, as its owner's next turn finds it: no void entry is left
            return
        self._stale.update(blocks)
        self._num_stale += num
        if self._num_stale > self.count + _COMPACT_AT:
            self._compact()

    def remove(self, block: int) -> None:
        """Removes any one block, wherever it is; O(list) for one without hash. ValueError if it is not in the list."""
        if self._fresh <= block < self._end:
            self._stack[:0] = range(block - 1, self._fresh - 1, -1)
            self._fresh = block + 1
            self.count -= 1
        elif block in self._stack:
            self._stack.remove(block)
            self.count -= 1
        elif block in self.order():
            self.leave([block])
        else:
            raise ValueError(f"block {block} is not in the free list")

    def refill(self, plain: list[int], cached: list[int]) -> None:
        """Replaces everything: blocks without hash, front first, then those with one, front first (a restart)."""
        assert not self._runs
        self._stack, self._fresh = plain[::-1], self._end
        self._queue, self._head = list(cached), 0
        self._stale, self._num_stale = Counter(), 0
        self.count = len(plain) + len(cached)

    def remove_plain(self, blocks: set[int]) -> None:
        """Removes these blocks, all of them free and without a hash, some perhaps since they came. O(list), once."""
        if not blocks:
            return
        assert not self._runs
        if self._fresh < self._end:
            self._stack[:0] = range(self._end - 1, self._fresh - 1, -1)
            self._fresh = self._end
        queued = blocks.difference(self._stack)
        self._stack = [block for block in self._stack if block not in blocks]
        self.count -= len(blocks) - len(queued)
        if queued:
            self.leave(list(queued))

    def order(self) -> Iterator[int]:
        """Ids from front to back. O(list)."""
        stale = dict(self._stale)
        for entry in reversed(self._stack):
            if entry >= 0:
                yield entry
            else:
                run = self._runs[-entry]
                yield from run.blocks if run.is_plain else _valid(run.blocks, stale)
        yield from range(self._fresh, self._end)
        yield from _valid(self._queue[self._head :], stale)

    def _compact(self) -> None:
        stale = self._stale
        for entry in reversed(self._stack):
            if entry < 0 and not (run := self._runs[-entry]).is_plain:
                run.blocks = list(_valid(run.blocks, stale))
        self._queue = list(_valid(self._queue[self._head :], stale))
        self._head = 0
        self._stale = Counter()
        self._num_stale = 0

    def check_invariants(self) -> None:
        """Count and contents agree; void entries are all accounted for."""
        order = list(self.order())
        assert len(order) == self.count, (len(order), self.count)
        assert len(set(order)) == self.count, "a block is listed twice"
        assert sum(self._stale.values()) == self._num_stale
        assert sum(entry < 0 for entry in self._stack) == len(self._runs)


def _valid(blocks: Iterable[int], stale: dict[int, int]) -> Iterator[int]:
    """Drops void entries, using up `stale`."""
    for block in blocks:
        void = stale.get(block, 0)
        if void:
            stale[block] = void - 1
        else:
            yield block
