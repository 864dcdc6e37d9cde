"""The prefix index: which blocks can be found under which hash, who may see that, and what its followers are told.

    publish 5 under h          index[g] {h: 5}    key_of[5] = h    origin_of[5] = ann's step 7
    publish 8 under h, too     index[g] {h: 5}    copies[g] {h: [5, 8]}    key_of[8] = h
    forget 5 (taken again)     index[g] {h: 8}    copies[g] {}             key_of[5] = None
    ann's step 7 is complete   reveal: origin_of[8].is_public, and everybody finds 8

A block is an index into flat lists; there is no object per block. A hash lives once, as the bytes object that the
client sent, shared by the index, `key_of` and the sequence. Per group, `index` maps a hash to the *first published*
block that still has it; `copies` lists all of them, in order, only where there are several.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from operator import itemgetter

from kvhold_server.pool.ghosts import Ghosts
from kvhold_server.pool.origin import Origin
from kvhold_server.pool.runs import SHORTEST, Runs, read, write
from kvhold_server.pool.values import Completed, Event, Removed


class PrefixIndex:
    """Hashes of all blocks of one pool. No references here: free or held, a block is found until it is forgotten."""

    __slots__ = (
        "copies",
        "events",
        "ghosts",
        "index",
        "key_of",
        "key_tokens",
        "num_provisional",
        "num_provisional_blocks",
        "num_published",
        "origin_of",
        "runs",
        "secondary",
        "tells_stored",
        "version",
    )

    def __init__(self, *, num_blocks: int, num_groups: int, report_events: bool, num_ghosts: int) -> None:
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.origin_of: list[Origin | None] = [None] * num_blocks
        self.key_tokens = array("i", bytes(4 * num_blocks))
        self.index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.copies: list[dict[bytes, list[int]]] = [{} for _ in range(num_groups)]
        self.secondary: dict[int, list[bytes]] = {}  # further hashes of a block: shorter prefixes that end inside it
        self.runs = Runs(num_blocks)
        self.num_provisional = 0  # origins that are not public
        self.num_provisional_blocks = 0
        self.num_published = 0  # blocks that got a hash, ever
        self.ghosts = Ghosts(num_ghosts)
        self.events: list[Event] | None = [] if report_events else None
        self.tells_stored = True  # among the events; whoever takes them may do without
        self.version = 0  # grows whenever a lookup may come out differently

    # ------------------------------------------------------------ publishing
    def publish(
        self, group: int, blocks: list[int], hashes: list[bytes], origin: Origin, lengths: Sequence[int]
    ) -> int:
        """Gives each block its hash, which stands for as many tokens as `lengths` says.

        The blocks have no hash. Returns how many of the hashes had another block before.
        """
        key_of, origin_of, key_tokens = self.key_of, self.origin_of, self.key_tokens
        num_duplicates, num = 0, len(blocks)
        firsts = list(map(self.index[group].setdefault, hashes, blocks))
        if firsts != blocks:
            copies = self.copies[group]
            for first, block, key in zip(firsts, blocks, hashes, strict=False):
                if first != block:
                    copies.setdefault(key, [first]).append(block)
                    num_duplicates += 1
        start = 0
        for piece, where in ((blocks, None),) if num < SHORTEST else self.runs.cut(blocks):
            end = start + len(piece)
            keys, tokens = hashes[start:end], lengths[start:end]
            if where is not None and len(keys) == len(piece):
                key_of[where] = keys
                origin_of[where] = [origin] * len(piece)
                key_tokens[where] = array("i", tokens)
            else:
                for block, key, num_tokens in zip(piece, keys, tokens, strict=False):
                    key_of[block] = key
                    origin_of[block] = origin
                    key_tokens[block] = num_tokens
            start = end
        origin.parts.append(blocks)
        origin.num_blocks += num
        self.num_provisional_blocks += num
        self.num_published += num
        self.version += 1
        return num_duplicates

    def publish_partial(self, block: int, key: bytes, origin: Origin, tokens: int) -> None:
        """One more hash for a block: a prefix of `tokens` tokens that ends inside it. It has no such hash yet."""
        self._link(origin.group, key, block)
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
        further = self.secondary.pop(source, [])
        for name in (key, *further):
            self._unlink(origin.group, name, source)
            self._link(origin.group, name, target)
        self.key_of[target], self.origin_of[target] = key, origin
        self.key_tokens[target] = self.key_tokens[source]
        if further:
            self.secondary[target] = further
        self.key_of[source] = self.origin_of[source] = None
        self.key_tokens[source] = 0
        origin.parts.append([target])
        self.version += 1

    def reveal(self, origins: Iterable[Origin], completed: Completed | None) -> None:
        """Everybody may see what these published; `completed` is told which blocks that are, if it is wanted."""
        for origin in origins:
            origin.is_public = True
            self.num_provisional -= 1
            self.num_provisional_blocks -= origin.num_blocks
            if completed is not None:
                for part in origin.parts:
                    self._tell(origin, part, completed)
            origin.parts = []

    def _tell(self, origin: Origin, blocks: list[int], completed: Completed) -> None:
        """Lists those blocks that still have the hash that this origin gave them."""
        key_of, origin_of = self.key_of, self.origin_of
        if any(origin_of[block] is not origin for block in blocks):
            blocks = [block for block in blocks if origin_of[block] is origin]
        completed.groups.extend(repeat(origin.group, len(blocks)))
        completed.blocks.extend(blocks)
        completed.hashes.extend(map(key_of.__getitem__, blocks))  # type: ignore[arg-type]
        completed.key_tokens.extend(map(self.key_tokens.__getitem__, blocks))

    def abandon(self, origins: Iterable[Origin]) -> None:
        """What these published is gone already: nothing is left to become public."""
        for origin in origins:
            self.num_provisional -= 1
            self.num_provisional_blocks -= origin.num_blocks
            origin.num_blocks = 0

    # ------------------------------------------------------------ finding
    def visible_prefix(self, group: int, hashes: list[bytes], session: int) -> list[int]:
        """Blocks of the leading hashes that this session may see; ends before the first one that has none."""
        index = self.index[group]
        found: list[int] = []
        start, size, end = 0, 32, len(hashes)
        while start < end:
            part = hashes[start : start + size]
            try:
                found += itemgetter(*part)(index) if len(part) > 1 else (index[part[0]],)
            except KeyError as missing:
                part = part[: part.index(missing.args[0])]
                found += map(index.__getitem__, part)
                break
            start += size
            size *= 4
        if self.num_provisional and found:
            return self._cut_invisible(group, hashes, found, session)
        return found

    def _cut_invisible(self, group: int, hashes: list[bytes], found: list[int], session: int) -> list[int]:
        origin_of = self.origin_of
        origins = set(read(origin_of, self.runs.cut(found)))
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

    def has_key(self, group: int, block: int, key: bytes) -> bool:
        """Is the block findable under this hash?"""
        if self.key_of[block] == key:
            return True
        return key in self.secondary.get(block, ())

    # ------------------------------------------------------------ forgetting
    def forget(self, blocks: list[int]) -> int:
        """Drops the hashes of blocks that are being handed out, with events; returns how many had one."""
        key_of, origin_of, copies, index = self.key_of, self.origin_of, self.copies, self.index
        secondary, reporting = self.secondary, self.events is not None
        if len(index) == 1 and not secondary:
            num_together = self._forget_together(blocks)
            if num_together is not None:
                return num_together
        event: Removed | None = None
        gone: list[bytes] = []
        num = 0
        for block in blocks:
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
        if gone:
            self.ghosts.add(gone)
        return num

    def _forget_together(self, blocks: list[int]) -> int | None:
        """As `forget` for one group, in bulk. None, and nothing is done, if some hash has other blocks or is
        provisional."""
        key_of, origin_of, copies, index = self.key_of, self.origin_of, self.copies[0], self.index[0]
        pieces = self.runs.cut(blocks)
        keys = read(key_of, pieces)
        if not all(keys):
            blocks = [block for block, key in zip(blocks, keys, strict=True) if key is not None]
            pieces = self.runs.cut(blocks)
            keys = read(key_of, pieces)
        if not keys:
            return 0
        if copies and not copies.keys().isdisjoint(keys):
            return None
        if self.num_provisional and not all(o.is_public for o in set(read(origin_of, pieces))):  # type: ignore[union-attr]
            return None
        for key in keys:
            del index[key]  # type: ignore[arg-type]
        write(key_of, pieces, None)
        write(origin_of, pieces, None)
        self.ghosts.add(keys)  # type: ignore[arg-type]
        if self.events is not None:
            event = self._new_removed(0)
            event.hashes, event.blocks, event.copies_left = keys, blocks.copy(), [0] * len(keys)  # type: ignore[assignment]
        return len(keys)

    def drop(self, block: int) -> bool:
        """Takes all hashes off a block, with an event for each. False if it had none."""
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
        self.version += 1
        return True

    def clear(self) -> None:
        """Forgets all hashes, without events; lists stay the same objects."""
        num_blocks = len(self.key_of)
        for index, copies in zip(self.index, self.copies, strict=True):
            index.clear()
            copies.clear()
        self.key_of[:] = [None] * num_blocks
        self.origin_of[:] = [None] * num_blocks
        self.key_tokens[:] = array("i", bytes(4 * num_blocks))
        self.secondary.clear()
        self.ghosts.clear()
        self.version += 1

    def take_events(self) -> list[Event]:
        """Events since they were last taken, oldest first."""
        events = self.events
        if not events:
            return []
        self.events = []
        return events

    # ------------------------------------------------------------ one hash, one block
    def _link(self, group: int, key: bytes, block: int) -> None:
        first = self.index[group].setdefault(key, block)
        if first != block:
            self.copies[group].setdefault(key, [first]).append(block)

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

    # ------------------------------------------------------------ invariants
    def check_invariants(self, provisional: Collection[Origin]) -> None:
        """Index and blocks agree, hash by hash; what is provisional is what these origins published. O(blocks)."""
        named = self._names_by_block()
        for block, own_key in enumerate(self.key_of):
            origin = self.origin_of[block]
            assert (own_key is None) == (origin is None)
            if own_key is None or origin is None:
                assert block not in named and block not in self.secondary, f"block {block} is named without a hash"
                continue
            assert origin.is_public or origin in provisional, f"block {block} is of a step that is over"
            names = {(origin.group, name) for name in (own_key, *self.secondary.get(block, ()))}
            assert named.get(block) == names, f"block {block}: {named.get(block)} instead of {names}"
        assert self.key_of[0] is None, "the null block has a hash"
        assert self.num_provisional == len(provisional)
        for origin in provisional:
            assert origin.num_blocks == sum(other is origin for other in self.origin_of), "provisional blocks"
        assert self.num_provisional_blocks == sum(origin.num_blocks for origin in provisional)

    def _names_by_block(self) -> dict[int, set[tuple[int, bytes]]]:
        """What the index says: each block's hashes, with their groups."""
        named: dict[int, set[tuple[int, bytes]]] = {}
        for group, (index, copies) in enumerate(zip(self.index, self.copies, strict=True)):
            for key, first in index.items():
                blocks = copies.get(key, [first])
                assert blocks[0] == first and len(set(blocks)) == len(blocks)
                for block in blocks:
                    named.setdefault(block, set()).add((group, key))
            assert all(len(blocks) > 1 and key in index for key, blocks in copies.items())
        return named
