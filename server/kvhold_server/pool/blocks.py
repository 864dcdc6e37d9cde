"""The block store: references and the free list. Every block is taken, held and let go here.

allocate       hold(hit)         publish             let go (last reference)          take again
free ──▶ held  cached ──▶ held   held ──▶ held+hash  hash: back of the list (cached)  cached ──▶ held, hash gone
                                                     none: front of the list (free)

refs      how many tables and copies have each block      prefixes     under which hashes it is found
free      those that nobody has, in order of eviction     quarantine   which references are of dead sessions
fences    who may not take a free block yet               watchers     who is told when its bytes are lost
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import chain, compress

from kvhold_server.pool.fences import Fences
from kvhold_server.pool.free_list import FreeList
from kvhold_server.pool.open_step import OpenStep
from kvhold_server.pool.origin import Origin
from kvhold_server.pool.prefix_index import PrefixIndex
from kvhold_server.pool.quarantine import Quarantine
from kvhold_server.pool.residency import Residency
from kvhold_server.pool.runs import SHORTEST, Piece, read, write


class BlockStore:
    """All blocks of one pool. Ids 1+num_reserved..num_blocks-1 may be handed out; 0 is the null block."""

    __slots__ = (
        "caching",
        "copies",
        "dead_refs",
        "fences",
        "free",
        "ghosts",
        "has_copies",
        "has_others",
        "index",
        "key_of",
        "key_tokens",
        "num_blocks",
        "num_cached",
        "num_reserved",
        "num_usable",
        "origin_of",
        "prefixes",
        "quarantine",
        "refs",
        "residency",
        "runs",
        "secondary",
        "tracking",
        "version",
        "watchers",
    )

    def __init__(
        self,
        *,
        num_blocks: int,
        num_groups: int,
        caching: bool = True,
        num_reserved: int = 0,
        report_events: bool = True,
        num_ghosts: int = 65_536,
        sample_every: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_reserved = num_reserved
        self.num_usable = num_blocks - 1 - num_reserved
        self.caching = caching
        self.refs = [0] * num_blocks
        self.free = FreeList(1 + num_reserved, num_blocks)
        self.fences = Fences()
        self.tracking = False  # are fences recorded per block
        self.quarantine = Quarantine(self.refs)
        self.prefixes = PrefixIndex(
            num_blocks=num_blocks, num_groups=num_groups, report_events=report_events, num_ghosts=num_ghosts
        )
        self.residency = Residency(sample_every, num_blocks)
        self.watchers: dict[int, Callable[[int], None]] = {}  # of released blocks: told when the bytes are lost
        self.num_cached = 0  # free blocks that have a hash
        self.has_copies = False  # blocks may be held by copies, not by tables alone
        self.has_others = False  # hashes may come from another session than the one that asks
        self.version = 0  # grows whenever an availability may come out differently
        self._share_columns()

    def _share_columns(self) -> None:
        """The very lists of the parts, which never replace them: readers of blocks follow one reference less."""
        prefixes = self.prefixes
        self.key_of, self.origin_of, self.key_tokens = prefixes.key_of, prefixes.origin_of, prefixes.key_tokens
        self.index, self.copies, self.secondary = prefixes.index, prefixes.copies, prefixes.secondary
        self.ghosts, self.runs = prefixes.ghosts, prefixes.runs
        self.dead_refs = self.quarantine.dead_refs

    def available(self, session: int) -> int:
        """Free blocks that this session may take now."""
        return self.free.count - self.fences.blocked_for(session) if self.tracking else self.free.count

    def take(self, count: int, session: int) -> list[int]:
        """Hands out the first `count` free blocks; what they had cached is forgotten. The caller has checked."""
        self.version += 1
        if self.tracking and self.fences.blocked_for(session):
            fence_of, stands = partial(self.fences.fence_for, session), partial(self.fences.stands, session)
            blocks, num_plain = self.free.take_if(count, fence_of, stands)
        else:
            blocks, num_plain = self.free.take(count)
        if self.tracking:
            self.fences.leave_free(blocks)
        if num_plain < count and self.caching:
            self.num_cached -= self.prefixes.forget(blocks[num_plain:] if num_plain else blocks)
        refs = self.refs
        if count < SHORTEST:
            for block in blocks:
                refs[block] = 1
        else:
            write(refs, self.runs.cut(blocks), 1)
        if self.residency.every:
            self.residency.handed_out(blocks, self.runs.cut(blocks))
        if self.watchers:
            self._tell_watchers(blocks)
        return blocks

    def hold(self, blocks: list[int]) -> None:
        """One more reference to each of these hit blocks; null entries are skipped. Nothing else moves."""
        refs = self.refs
        if self.dead_refs:
            self.quarantine.revive(blocks)
        pieces = self.runs.cut(blocks)
        if not any(read(refs, pieces)) and all(blocks) and _are_different(pieces):
            write(refs, pieces, 1)
            leaving = blocks
        else:
            leaving = []
            for block in blocks:
                if block:
                    if not refs[block]:
                        leaving.append(block)
                    refs[block] += 1
        if leaving:
            self.version += 1
            self.free.leave(leaving)
            self.num_cached -= len(leaving)
            if self.tracking:
                self.fences.leave_free(leaving)
        if self.residency.every:
            self.residency.touched(pieces)

    def let_go(self, blocks: list[int], step: OpenStep | None, *, fence_own: bool = False) -> None:
        """One reference less to each of these blocks, in order; null entries are skipped.

        Those without any go back to the free list: without hash to its front, with hash to its back. `step` is the step
        that used them last (None: nothing can still use them).
        """
        refs, key_of, dead_refs = self.refs, self.key_of, self.dead_refs
        plain: list[int] = []
        hashed: list[int] = []
        if step is not None and self.tracking:
            self.fences.let_go(step.fence_for(fence_own=fence_own), [block for block in blocks if block])
        pieces: Iterable[Piece] = ((blocks, None),) if len(blocks) < SHORTEST else self.runs.cut(blocks)
        for piece, where in pieces:
            if where is not None and refs[where].count(1) == len(piece):
                self._let_go_together(piece, where, plain, hashed)
                continue
            for block in piece:
                if block:
                    count = refs[block] - 1
                    refs[block] = count
                    if not count:
                        if key_of[block] is None:
                            plain.append(block)
                        else:
                            hashed.append(block)
                    else:
                        if dead_refs and count == dead_refs.get(block):
                            self.quarantine.num_blocks += 1
                        if self.has_copies and step is not None and not self.tracking:
                            step.released.append([block])  # a copy's end comes free with an earlier step than this one
        if plain:
            self.free.prepend(plain)
        if hashed:
            self.free.append(hashed)
            self.num_cached += len(hashed)
        self.version += 1
        if self.tracking:
            self.fences.enter_free(plain)
            self.fences.enter_free(hashed)
        elif step is not None:
            if plain:
                step.released.append(plain)
            if hashed:
                step.released.append(hashed)

    def _let_go_together(self, blocks: list[int], where: slice, plain: list[int], hashed: list[int]) -> None:
        """Each of these is held once. Sorts them by whether they have a hash."""
        self.refs[where] = [0] * len(blocks)
        keys = self.key_of[where]
        num = next((i for i, key in enumerate(keys) if key is not None), len(keys))  # of the end, not full yet
        if all(keys[num:]):
            plain += blocks[:num]
            hashed += blocks[num:]
        else:
            plain += [block for block, key in zip(blocks, keys, strict=True) if key is None]
            hashed += compress(blocks, keys)

    def let_go_of_dead(self, blocks: list[int]) -> None:
        """Lets go of a dead session's references, in this order."""
        self.quarantine.leave(blocks)
        self.let_go(blocks, None)

    def unpin(self, blocks: list[int], watcher: Callable[[int], None]) -> None:
        """One reference less; those without any go to the back of the list, with hash or without (§2 F7).

        For a reader that wants the bytes as long as possible: the watcher is told when such a block is handed out
        again, or when the cache is reset.
        """
        last = []
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                last.append(block)
                self.watchers[block] = watcher
        self.free.append(last)
        self.num_cached += sum(self.key_of[block] is not None for block in last)
        self.version += 1

    def _tell_watchers(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            watcher = self.watchers.pop(block, None)
            if watcher is not None:
                watcher(block)

    def drop_keys(self, block: int) -> bool:
        """Takes all hashes off a block, with an event for each; it stays where it is. False if it had none."""
        if not self.prefixes.drop(block):
            return False
        if not self.refs[block]:
            self.num_cached -= 1
        return True

    def clear(self) -> None:
        """Forgets all hashes. The order of the free list stays."""
        self.prefixes.clear()
        self.num_cached = 0
        self.residency.forget()
        self._tell_watchers(list(self.watchers))

    def check_invariants(self, held: Counter[int], provisional: Collection[Origin]) -> None:
        """Asserts I1 to I6 of docs/blocks.md. `held`: references that somebody has; `provisional`: steps' origins."""
        self.free.check_invariants()
        free = set(self.free.order())
        assert 0 not in free, "the null block is free"
        assert self.refs[0] == 0, "the null block is referenced"
        for block in range(1 + self.num_reserved, self.num_blocks):
            refs = self.refs[block]
            assert (refs == 0) == (block in free), f"block {block}: {refs} references"
            assert refs == held[block], f"block {block}: {refs} references, {held[block]} holders"
        num_cached = sum(self.key_of[block] is not None for block in free)
        assert self.num_cached == num_cached, (self.num_cached, num_cached)
        self.prefixes.check_invariants(provisional)
        self.fences.check_invariants(free)
        self.quarantine.check_invariants()


def _are_different(pieces: list[Piece]) -> bool:
    """No block twice, as a prompt with the same hash twice would have it."""
    if len(pieces) == 1 and pieces[0][1] is not None:
        return True
    blocks = list(chain.from_iterable(piece for piece, _ in pieces))
    return len(set(blocks)) == len(blocks)
