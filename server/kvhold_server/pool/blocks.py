"""The block store: references, free list, prefix index. Every change of a block goes through here.

    allocate       hold(hit)         publish             let go (last reference)          take again
    free ──▶ held  cached ──▶ held   held ──▶ held+hash  hash: back of the list (cached)  cached ──▶ held, hash gone
                                                         none: front of the list (free)

A block is an index into flat lists; there is no object per block. A hash lives once, as the bytes object that the
client sent, shared by the index, `key_of` and the sequence. Per group, `index` maps a hash to the *first published*
block that still has it; `copies` lists all of them, in order, only where there are several.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import repeat

from kvhold_server.pool.fences import Fences
from kvhold_server.pool.free_list import FreeList
from kvhold_server.pool.ghosts import Ghosts
from kvhold_server.pool.residency import Residency
from kvhold_server.pool.session import OpenStep, Origin
from kvhold_server.pool.values import Event, Removed

_BULK = 64  # from so many blocks on, looking whether the quick way is open costs less than the slow one


class BlockStore:
    """All blocks of one pool. Ids 1+num_reserved..num_blocks-1 may be handed out; 0 is the null block."""

    __slots__ = (
        "caching",
        "copies",
        "dead_refs",
        "events",
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
        "num_provisional",
        "num_provisional_blocks",
        "num_published",
        "num_quarantined",
        "num_reserved",
        "origin_of",
        "refs",
        "residency",
        "secondary",
        "tells_stored",
        "tracking",
        "unit_tokens",
        "version",
        "watchers",
    )

    def __init__(
        self,
        *,
        num_blocks: int,
        num_groups: int,
        unit_tokens: int,
        caching: bool = True,
        num_reserved: int = 0,
        report_events: bool = True,
        num_ghosts: int = 65_536,
        sample_every: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_reserved = num_reserved
        self.unit_tokens = unit_tokens
        self.caching = caching
        self.refs = [0] * num_blocks
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.origin_of: list[Origin | None] = [None] * num_blocks
        self.key_tokens = array("i", bytes(4 * num_blocks))
        self.free = FreeList(1 + num_reserved, num_blocks)
        self.index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.copies: list[dict[bytes, list[int]]] = [{} for _ in range(num_groups)]
        self.secondary: dict[int, list[bytes]] = {}  # further hashes of a block: shorter prefixes that end inside it
        self.num_cached = 0  # free blocks that have a hash
        self.has_copies = False  # blocks may be held by copies, not by tables alone
        self.has_others = False  # hashes may come from another session than the one that asks
        self.num_provisional = 0  # origins that are not public
        self.num_provisional_blocks = 0
        self.num_published = 0  # blocks that got a hash, ever
        self.dead_refs: Counter[int] = Counter()  # references that dead sessions hold
        self.num_quarantined = 0  # blocks that nobody else holds
        self.fences = Fences()
        self.tracking = False  # are fences recorded per block
        self.ghosts = Ghosts(num_ghosts)
        self.residency = Residency(sample_every)
        self.events: list[Event] | None = [] if report_events else None
        self.tells_stored = True  # among the events; whoever takes them may do without
        self.watchers: dict[int, Callable[[int], None]] = {}  # of released blocks: told when the bytes are lost
        self.version = 0  # grows whenever a lookup or an availability may come out differently

    # ------------------------------------------------------------ taking, holding, letting go
    def available(self, session: int) -> int:
        """Free blocks that this session may take now."""
        return self.free.count - self.fences.blocked_for(session) if self.tracking else self.free.count

    def take(self, count: int, session: int) -> list[int]:
        """Hands out the first `count` free blocks; what they had cached is forgotten. The caller has checked."""
        self.version += 1
        if not self.tracking:
            blocks, num_plain = self.free.take(count)
        else:
            fences = self.fences
            if fences.blocked_for(session):
                blocks, num_plain = self.free.take_if(
                    count,
                    lambda block: fences.fence_for(session, block),
                    lambda fence: fences.stands(session, fence),  # type: ignore[arg-type]
                )
            else:
                blocks, num_plain = self.free.take(count)
            fences.leave_free(blocks)
        if num_plain < count and self.caching:
            self._forget_taken(blocks, num_plain)
        refs = self.refs
        for block in blocks:
            refs[block] = 1
        if self.residency.every:
            self.residency.handed_out(blocks)
        if self.watchers:
            self._tell_watchers(blocks)
        return blocks

    def _forget_taken(self, blocks: list[int], start: int) -> None:
        """Drops the hashes of blocks that are being handed out."""
        key_of, origin_of, copies, index = self.key_of, self.origin_of, self.copies, self.index
        secondary, reporting = self.secondary, self.events is not None
        if len(index) == 1 and not secondary and self._forget_together(blocks[start:] if start else blocks):
            return
        event: Removed | None = None
        gone: list[bytes] = []
        num = 0
        for block in blocks[start:] if start else blocks:
            key = key_of[block]
            if key is None:
                continue
            origin = origin_of[block]
            key_of[block] = origin_of[block] = None
            num += 1
            group = origin.group  # type: ignore[union-attr]
            if not origin.is_public:  # type: ignore[union-attr]
                self._left_origin(origin)  # type: ignore[arg-type]
            left = 0
            if copies[group]:
                left = self._unlink(group, key, block)
            else:
                del index[group][key]
            if not left:
                gone.append(key)
            if reporting:
                if event is None or event.group != group:
                    event = self._new_removed(group)
                event.hashes.append(key)
                event.blocks.append(block)
                event.copies_left.append(left)
            if secondary and block in secondary:
                self._forget_secondary(group, block, event)
        self.num_cached -= num
        if gone:
            self.ghosts.add(gone)

    def _forget_together(self, blocks: list[int]) -> bool:
        """As `_forget_taken` for one group, in bulk. False, and nothing is done, if some hash has other blocks or is
        provisional."""
        key_of, origin_of, copies, index = self.key_of, self.origin_of, self.copies[0], self.index[0]
        keys = list(map(key_of.__getitem__, blocks))
        if None in keys:
            blocks = [block for block, key in zip(blocks, keys, strict=True) if key is not None]
            keys = list(filter(None, keys))
        if not keys:
            return True
        if copies and not copies.keys().isdisjoint(keys):
            return False
        if self.num_provisional and not all(o.is_public for o in set(map(origin_of.__getitem__, blocks))):  # type: ignore[union-attr]
            return False
        for key in keys:
            del index[key]  # type: ignore[arg-type]
        for block in blocks:
            key_of[block] = origin_of[block] = None
        self.num_cached -= len(keys)
        self.ghosts.add(keys)  # type: ignore[arg-type]
        if self.events is not None:
            event = self._new_removed(0)
            event.hashes, event.blocks, event.copies_left = keys, blocks.copy(), [0] * len(keys)  # type: ignore[assignment]
        return True

    def _left_origin(self, origin: Origin) -> None:
        """A block lost a hash that was provisional."""
        origin.num_blocks -= 1
        self.num_provisional_blocks -= 1

    def _forget_secondary(self, group: int, block: int, event: Removed | None) -> None:
        for key in self.secondary.pop(block):
            left = self._unlink(group, key, block)
            if event is not None:
                event.hashes.append(key)
                event.blocks.append(block)
                event.copies_left.append(left)

    def _new_removed(self, group: int) -> Removed:
        event = Removed(group=group, hashes=[], blocks=[], copies_left=[])
        assert self.events is not None
        self.events.append(event)
        return event

    def hold(self, blocks: list[int]) -> None:
        """One more reference to each of these hit blocks; null entries are skipped. Nothing else moves."""
        refs = self.refs
        if self.dead_refs:
            self._revive(blocks)
        leaving = [block for block in blocks if not refs[block] and block]
        if len(leaving) == len(blocks):
            for block in blocks:
                refs[block] = 1
        else:
            for block in blocks:
                if block:
                    refs[block] += 1
        if leaving:
            self.version += 1
            self.free.leave(leaving)
            self.num_cached -= len(leaving)
            if self.tracking:
                self.fences.leave_free(leaving)
        if self.residency.every:
            self.residency.touched(blocks)

    def _revive(self, blocks: list[int]) -> None:
        """Blocks that only dead sessions held are about to be held by a live one."""
        refs, dead_refs = self.refs, self.dead_refs
        for block in blocks:
            if block and refs[block] and refs[block] == dead_refs.get(block):
                self.num_quarantined -= 1

    def let_go(self, blocks: Iterable[int], step: OpenStep | None, *, fence_own: bool = False) -> None:
        """One reference less to each of these blocks, in order; null entries are skipped.

        Those without any go back to the free list: without hash to its front, with hash to its back. `step` is the step
        that used them last (None: nothing can still use them).
        """
        refs, key_of, dead_refs = self.refs, self.key_of, self.dead_refs
        plain: list[int] = []
        hashed: list[int] = []
        if step is not None and self.tracking:
            blocks = list(blocks)
            self._fence(blocks, step, fence_own=fence_own)
        for block in blocks:
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
                        self.num_quarantined += 1
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

    def quarantine(self, blocks: list[int]) -> None:
        """Their references belong to a dead session from now on; they are quarantined unless others hold them."""
        refs, dead_refs = self.refs, self.dead_refs
        for block in blocks:
            if block:
                dead_refs[block] += 1
                if refs[block] == dead_refs[block]:
                    self.num_quarantined += 1

    def unquarantine(self, blocks: list[int]) -> None:
        """Lets go of a dead session's references, in this order."""
        refs, dead_refs = self.refs, self.dead_refs
        for block in blocks:
            if block:
                if refs[block] == dead_refs[block]:
                    self.num_quarantined -= 1
                dead_refs[block] -= 1
                if not dead_refs[block]:
                    del dead_refs[block]
                # let_go counts it again if another dead session still holds it
        self.let_go(blocks, None)

    def _fence(self, blocks: list[int], step: OpenStep, *, fence_own: bool) -> None:
        if not self.tracking:
            raise AssertionError("fences are recorded per block only while tracking")
        self.fences.let_go(step.fence_for(fence_own=fence_own), [block for block in blocks if block])

    # ------------------------------------------------------------ the index
    def publish(
        self, group: int, blocks: list[int], hashes: list[bytes], origin: Origin, lengths: Iterable[int]
    ) -> int:
        """Gives each block its hash, which stands for as many tokens as `lengths` says.

        The blocks have no hash. Returns how many of the hashes had another block before.
        """
        index, copies = self.index[group], self.copies[group]
        key_of, origin_of, key_tokens = self.key_of, self.origin_of, self.key_tokens
        num_duplicates, num = 0, len(blocks)
        if num >= _BULK and index.keys().isdisjoint(hashes) and len(set(hashes)) == num == len(hashes):
            index.update(zip(hashes, blocks, strict=True))
        else:
            for block, key in zip(blocks, hashes, strict=False):
                first = index.setdefault(key, block)
                if first != block:
                    copies.setdefault(key, [first]).append(block)
                    num_duplicates += 1
        for block, key, tokens in zip(blocks, hashes, lengths, strict=False):
            key_of[block] = key
            origin_of[block] = origin
            key_tokens[block] = tokens
        origin.parts.append(blocks)
        origin.num_blocks += num
        self.num_provisional_blocks += num
        self.num_published += num
        self.version += 1
        return num_duplicates

    def _unlink(self, group: int, key: bytes, block: int) -> int:
        """Takes a block off its hash; returns how many other blocks still have that hash."""
        copies = self.copies[group]
        blocks = copies.get(key) if copies else None
        if blocks is None:
            del self.index[group][key]
            return 0
        blocks.remove(block)
        self.index[group][key] = blocks[0]
        if len(blocks) == 1:
            del copies[key]
            return 1
        return len(blocks)

    def visible_prefix(self, group: int, hashes: list[bytes], session: int) -> list[int]:
        """Blocks of the leading hashes that this session may see; ends before the first one that has none."""
        get = self.index[group].get
        found: list[int] = []
        start, size, end = 0, 32, len(hashes)
        while start < end:
            chunk = list(map(get, hashes[start : start + size], repeat(0)))
            if not all(chunk):
                found += chunk[: chunk.index(0)]
                break
            found += chunk
            start += size
            size *= 4
        if self.num_provisional and found:
            return self._cut_invisible(group, hashes, found, session)
        return found

    def _cut_invisible(self, group: int, hashes: list[bytes], found: list[int], session: int) -> list[int]:
        origin_of = self.origin_of
        origins = set(map(origin_of.__getitem__, found))
        if all(origin.is_public or origin.session == session for origin in origins):  # type: ignore[union-attr]
            return found
        for i, block in enumerate(found):
            if not self._sees(session, block):
                other = self._visible_copy(group, hashes[i], session)
                if not other:
                    return found[:i]
                found[i] = other
        return found

    def find(self, group: int, key: bytes, session: int) -> int:
        """The first published block with this hash that the session may see; 0 = none."""
        block = self.index[group].get(key, 0)
        if block and self.num_provisional and not self._sees(session, block):
            return self._visible_copy(group, key, session)
        return block

    def _sees(self, session: int, block: int) -> bool:
        origin = self.origin_of[block]
        assert origin is not None
        return origin.is_public or origin.session == session

    def _visible_copy(self, group: int, key: bytes, session: int) -> int:
        for block in self.copies[group].get(key, ()):
            if self._sees(session, block):
                return block
        return 0

    # ------------------------------------------------------------ hashes of prefixes that end inside a block
    def drop_keys(self, block: int) -> bool:
        """Takes all hashes off a block, with an event for each; it stays where it is. False if it had none."""
        key = self.key_of[block]
        if key is None:
            return False
        origin = self.origin_of[block]
        assert origin is not None
        event = self._new_removed(origin.group) if self.events is not None else None
        left = self._unlink(origin.group, key, block)
        if event is not None:
            event.hashes.append(key)
            event.blocks.append(block)
            event.copies_left.append(left)
        if not origin.is_public:
            self._left_origin(origin)
        self.key_of[block] = self.origin_of[block] = None
        self.key_tokens[block] = 0
        if block in self.secondary:
            self._forget_secondary(origin.group, block, event)
        if not self.refs[block]:
            self.num_cached -= 1
        self.version += 1
        return True

    def has_key(self, group: int, block: int, key: bytes) -> bool:
        """Is the block findable under this hash?"""
        if self.key_of[block] == key:
            return True
        return key in self.secondary.get(block, ())

    def publish_partial(self, block: int, key: bytes, origin: Origin, tokens: int) -> None:
        """One more hash for a block: a prefix of `tokens` tokens that ends inside it. It has no such hash yet."""
        group = origin.group
        first = self.index[group].setdefault(key, block)
        if first != block:
            self.copies[group].setdefault(key, [first]).append(block)
        if self.key_of[block] is None:
            self.key_of[block] = key
            self.key_tokens[block] = tokens
            self.origin_of[block] = origin
            origin.num_blocks += 1
            self.num_provisional_blocks += 1
        else:
            self.secondary.setdefault(block, []).append(key)
        origin.parts.append([block])
        self.num_published += 1
        self.version += 1

    def move_keys(self, source: int, target: int) -> None:
        """All hashes of `source` name `target` from now on, without events. The target has none."""
        assert self.key_of[target] is None
        key, origin = self.key_of[source], self.origin_of[source]
        assert key is not None and origin is not None
        group = origin.group
        further = self.secondary.pop(source, [])
        for name in (key, *further):
            self._unlink(group, name, source)
            first = self.index[group].setdefault(name, target)
            if first != target:
                self.copies[group].setdefault(name, [first]).append(target)
        self.key_of[target], self.origin_of[target] = key, origin
        self.key_tokens[target] = self.key_tokens[source]
        if further:
            self.secondary[target] = further
        self.key_of[source] = self.origin_of[source] = None
        self.key_tokens[source] = 0
        origin.parts.append([target])
        self.version += 1

    def clear(self) -> None:
        """Forgets all hashes. The order of the free list stays."""
        for index, copies in zip(self.index, self.copies, strict=True):
            index.clear()
            copies.clear()
        self.key_of = [None] * self.num_blocks
        self.origin_of = [None] * self.num_blocks
        self.key_tokens = array("i", bytes(4 * self.num_blocks))
        self.secondary.clear()
        self.num_cached = 0
        self.ghosts.clear()
        self.residency.forget()
        self._tell_watchers(list(self.watchers))
        self.version += 1
