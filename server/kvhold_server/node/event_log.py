"""Cache events of one pool, as routers want them: only what every session can hit, numbered without gaps, bounded.

    pool: Stored (provisional) ──▶ remembered: index and parent of each block ┐
    pool: Completed ───────────▶ first visible block of (group, hash)? ──────┴▶ StoredRun 17
    pool: Removed ─────────────▶ last visible block of (group, hash) gone? ───▶ RemovedRun 18
    pool: Cleared ──────────────────────────────────────────────────────────▶ ClearedAll 19

Hashes of prefixes that end inside a block are not told: routing by them gains less than a block, and some move.

The log follows the pool from its first reader on (it costs memory per cached block); what was cached before is read
from the pool once, then without parents. It is a ring: a reader that is further behind than `max_events` has lost
some, and starts over with a snapshot.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.node.annotations import Annotation, Annotations
from kvhold_server.pool.values import Cleared, Completed, Event, Removed, Stored

MAX_RUN = 1024  # digests of one run


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """Digests of one group and prompt, each after the one before it."""

    group: int
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]
    indexes: tuple[int, ...]  # position of each in its prompt, in blocks of the group
    parent: bytes | None  # digest before the first one; None: not known
    token_ids: tuple[int, ...] = ()  # of all blocks, or none
    extra_keys: tuple[bytes, ...] = ()  # one a digest, or none at all
    source: Annotation | None = None  # adapter and label


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedRun:
    """Digests of one group that can no longer be hit."""

    group: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearedAll:
    """Nothing can be hit any more."""

    reason: str


Change: TypeAlias = "StoredRun | RemovedRun | ClearedAll"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedChange:
    """One event. Numbers count from 1 in each boot."""

    number: int
    change: Change


@dataclass(slots=True)
class _Place:
    """Where a published block stands in its prompt."""

    hash: bytes
    index: int
    parent: bytes | None
    token_ids: tuple[int, ...] = ()
    extra_key: bytes = b""
    source: Annotation | None = None


@dataclass(slots=True, kw_only=True)
class EventLog:
    """Mutable; owned by the node. O(1) per block."""

    config: PoolConfig
    max_events: int
    annotations: Annotations = field(default_factory=Annotations)
    last_number: int = 0
    num_losses: int = 0  # times that a reader was too slow; the shell counts
    is_following: bool = False
    watchers: list[Callable[[], None]] = field(default_factory=list)  # called after events were added
    _events: deque[NumberedChange] = field(default_factory=deque)
    _visible: dict[tuple[int, bytes], dict[int, _Place]] = field(default_factory=dict)  # (group, hash) → block → place
    _pending: dict[tuple[int, int], _Place] = field(default_factory=dict)  # (group, block) → place, until it is visible

    def follow(self, public: Completed) -> None:
        """Begins to follow the pool, of which all these blocks are visible now."""
        if self.is_following:
            return
        self.is_following = True
        for group, block, block_hash, index in self._whole_blocks(public):
            self._visible.setdefault((group, block_hash), {})[block] = _Place(block_hash, index, None)

    def absorb(self, completed: Completed | None, events: Iterable[Event], clear_reason: str = "RESET") -> None:
        """Applies what one call of the pool did, in its order: what it completed came first."""
        if not self.is_following:
            return
        before = self.last_number
        if completed is not None and completed.blocks:
            self._completed(completed)
        for event in events:
            if isinstance(event, Stored):
                self._stored(event)
            elif isinstance(event, Removed):
                self._removed(event)
            else:
                self._cleared(event, clear_reason)
        if self.last_number != before:
            for wake in self.watchers:
                wake()

    def since(self, number: int) -> list[NumberedChange] | None:
        """Events after this one, oldest first; None if some of them are gone, or it never was."""
        oldest = self._events[0].number if self._events else self.last_number + 1
        if not oldest - 1 <= number <= self.last_number:
            return None
        newest_first = list(islice(reversed(self._events), self.last_number - number))
        return newest_first[::-1]

    def snapshot(self) -> Iterator[StoredRun]:
        """Everything visible, as of `last_number`. The state is copied at once, runs are made when asked for."""
        copied = [(group, *next(iter(places.items()))) for (group, _), places in self._visible.items()]
        return _runs(copied)

    @property
    def num_visible_hashes(self) -> int:
        """Digests that can be hit, group by group."""
        return len(self._visible)

    # ----------------------------------------------------------------- private
    def _stored(self, event: Stored) -> None:
        if event.is_partial:
            return  # a part of a block is nobody's to route by
        size = self.config.groups[event.group].block_size_tokens
        previous_index = event.start_tokens // size - 1
        parent: bytes | None = event.parent or b""
        source = self.annotations.of(event.session, event.sequence_id)
        for block_hash, block, index in zip(event.hashes, event.blocks, event.indices, strict=True):
            known = parent if index == previous_index + 1 else None
            place = self._pending[event.group, block] = _Place(block_hash, index, known)
            if source is not None:
                place.token_ids = source.tokens_of(index, size)
                place.extra_key = source.key_of((index + 1) * size // self.config.hash_unit_tokens - 1)
                place.source = source
            parent, previous_index = block_hash, index

    def _whole_blocks(self, public: Completed) -> Iterator[tuple[int, int, bytes, int]]:
        """(group, block, hash, index in the prompt). Hashes of parts of blocks are left out: some move."""
        sizes = [group.block_size_tokens for group in self.config.groups]
        rows = zip(public.groups, public.blocks, public.hashes, public.key_tokens, strict=True)
        for group, block, block_hash, tokens in rows:
            if not tokens % sizes[group]:
                yield group, block, block_hash, tokens // sizes[group] - 1

    def _completed(self, completed: Completed) -> None:
        fresh: list[tuple[int, int, _Place]] = []
        for group, block, block_hash, index in self._whole_blocks(completed):
            place = self._pending.pop((group, block), None)
            if place is None or place.hash != block_hash:
                place = _Place(block_hash, index, None)
            blocks = self._visible.setdefault((group, block_hash), {})
            is_new = not blocks
            blocks[block] = place
            if is_new:
                fresh.append((group, block, place))
        for run in _runs(fresh):
            self._add(run)

    def _removed(self, event: Removed) -> None:
        gone = []
        for block_hash, block in zip(event.hashes, event.blocks, strict=True):
            pending = self._pending.get((event.group, block))
            if pending is not None and pending.hash == block_hash:
                del self._pending[event.group, block]
            blocks = self._visible.get((event.group, block_hash))
            if blocks is None or blocks.pop(block, None) is None or blocks:
                continue
            del self._visible[event.group, block_hash]
            gone.append(block_hash)
        if gone:
            self._add(RemovedRun(group=event.group, hashes=tuple(gone)))

    def _cleared(self, event: Cleared, reason: str) -> None:
        self._visible.clear()
        self._pending.clear()
        self._add(ClearedAll(reason=reason))

    def _add(self, change: Change) -> None:
        self.last_number += 1
        self._events.append(NumberedChange(number=self.last_number, change=change))
        if len(self._events) > self.max_events:
            self._events.popleft()


def _runs(rows: list[tuple[int, int, _Place]]) -> Iterator[StoredRun]:
    """Joins (group, block, place) rows into runs in which each digest's parent is the one before it."""
    begin = 0
    for end in range(1, len(rows) + 1):
        if end < len(rows):
            (group, _, place), (last_group, _, last) = rows[end], rows[end - 1]
            joins = group == last_group and place.parent == last.hash and place.source is last.source
            if joins and end - begin < MAX_RUN:
                continue
        yield _run(rows[begin:end])
        begin = end


def _run(rows: list[tuple[int, int, _Place]]) -> StoredRun:
    places = [place for _, _, place in rows]
    has_tokens = all(place.token_ids for place in places)
    has_keys = any(place.extra_key for place in places)
    return StoredRun(
        group=rows[0][0],
        hashes=tuple(place.hash for place in places),
        blocks=tuple(block for _, block, _ in rows),
        indexes=tuple(place.index for place in places),
        parent=places[0].parent,
        token_ids=tuple(token for place in places for token in place.token_ids) if has_tokens else (),
        extra_keys=tuple(place.extra_key for place in places) if has_keys else (),
        source=places[0].source,
    )
