"""Keeps a pool's block table in step with the pool: what became provable is recorded, what lost its hash is forgotten.

    one call of the pool ─▶ completed   bytes are proven, everybody may hit them   ─▶ record
                         ─▶ Removed     the block lost its hash                    ─▶ forget, before the answer leaves:
                                        afterwards somebody may overwrite the bytes
                         ─▶ Cleared     all hashes are gone                        ─▶ a new generation of the table
                         ─▶ allotted    a client may overwrite them without a word ─▶ listed, before the answer leaves

Hashes of prefixes that end inside a block are not recorded: their blocks are written on, and for states such a hash
moves to a copy meanwhile. A state at the end of its block is final like any whole block. With checksums, all bytes of
each recorded block are read.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvhold_server.memory.block_table import BlockTable
from kvhold_server.memory.page_checksums import BlockChecksums
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.values import Cleared, Completed, Event, Removed

MAX_RECENT = 10_000  # lists of blocks that wait for `keep_order`; older ones are forgotten, which costs a hit at most
MAX_TOUCHED = 8_000  # blocks in one slice: some two milliseconds


@dataclass(slots=True, kw_only=True)
class BlockJournal:
    """Mutable; one per pool whose memory outlives the daemon."""

    pool: Pool
    table: BlockTable
    content_digest: bytes  # of the current generation
    checksums: BlockChecksums | None = None
    unverified: dict[int, int]  # recovered blocks whose bytes were not looked at yet → checksum of them
    num_failed_checksums: int = 0

    def absorb(self, completed: Completed | None, events: Iterable[Event]) -> None:
        """Applies what one call of the pool did; what it completed came first. O(blocks concerned)."""
        if completed is not None and completed.blocks:
            self._record(completed)
        for event in events:
            if isinstance(event, Removed):
                self.table.forget(event.blocks)
            elif isinstance(event, Cleared):
                self.start_generation(self.content_digest)

    def __post_init__(self) -> None:
        self.pool.store.free.recent = deque(maxlen=MAX_RECENT)

    def allot(self, blocks: list[int]) -> None:
        """Before a client is told: it may overwrite these blocks while they still have their hashes."""
        self.table.allot(blocks)

    def keep_order(self) -> None:
        """Notes which blocks came free lately, so that a successor evicts in the same order; a slice of them."""
        recent = self.pool.store.free.recent
        assert recent is not None
        num_blocks = 0
        while recent and num_blocks < MAX_TOUCHED:
            blocks = recent.popleft()
            self.table.touch(blocks)
            num_blocks += len(blocks)

    def start_generation(self, content_digest: bytes) -> None:
        """From the return on, no successor finds anything that was recorded before."""
        self.table.start_generation(content_digest)
        self.content_digest = content_digest
        self.unverified.clear()

    def verify(self, hashes: Iterable[bytes]) -> None:
        """Looks at the bytes of recovered blocks that these hashes would hit; those that changed lose their hash."""
        if not self.unverified or self.checksums is None:
            return
        store = self.pool.store
        for key in hashes:
            for group, index in enumerate(store.index):
                first = index.get(key)
                if first is not None:
                    for block in list(store.copies[group].get(key, (first,))):
                        self._verify_block(group, block)

    def end(self, *, is_clean: bool) -> None:
        """The daemon ends: notes the exact order of use, and that the table is complete."""
        if is_clean:
            store = self.pool.store
            self.table.touch([block for block in store.free.order() if store.key_of[block] is not None])
            self.table.mark_clean(True)
        self.table.close()

    def _record(self, completed: Completed) -> None:
        blocks, groups = completed.blocks, completed.groups
        hashes, key_tokens = completed.hashes, completed.key_tokens
        if self._is_mixed:
            rows = zip(blocks, groups, hashes, key_tokens, strict=True)
            whole = [row for row in rows if self._is_recordable(row[1], row[3])]
            blocks, groups, hashes, key_tokens = ([row[i] for row in whole] for i in range(4))  # type: ignore[assignment]
        sums: list[int] = []
        if self.checksums is not None:
            of = self.checksums.of
            sums = [of(group, block) for group, block in zip(groups, blocks, strict=True)]
        self.table.record(blocks, groups, hashes, key_tokens, sums)

    @property
    def _is_mixed(self) -> bool:
        """Whether some of what completes is not recorded."""
        config = self.pool.config
        return any(group.block_size_tokens != config.hash_unit_tokens for group in config.groups)

    def _is_recordable(self, group: int, key_tokens: int) -> bool:
        """Whole blocks only."""
        return not key_tokens % self.pool.config.groups[group].block_size_tokens

    def _verify_block(self, group: int, block: int) -> None:
        assert self.checksums is not None
        checksum = self.unverified.pop(block, None)
        if checksum is not None and not self.checksums.matches(group, block, checksum):
            self.num_failed_checksums += 1
            self.pool.evict([block])
