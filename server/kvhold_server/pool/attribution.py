"""Where the tokens of an admission came from, or why they must be computed: parts that sum to the whole.

    0        hit        backed       seen        limit     num_tokens
    ├─ own/shared ─┼─ rule: a ──┼─ evicted, ──┼─ never ──┼─ rule: ──┤
                     window or     or other      seen       alignment,
                     state is gone session's                last token

A hash names a whole prefix, so "was seen" holds for all shorter prefixes, too: its end is found by bisection, not by
asking for every block.
"""

from __future__ import annotations

from bisect import bisect_right

from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.groups import Groups, HitResult
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.session import PoolSession
from kvhold_server.pool.values import GROWTH_PERCENTS, PrefixStatistics
from kvhold_server.pool.waiting import AdmitItem

NUM_AGE_BUCKETS = 4  # evicted within the last N/4, N, 4N evictions, or before; N = blocks of the pool


class Attribution:
    """Counts admissions of one pool, in total and per session."""

    def __init__(self, store: BlockStore, groups: Groups) -> None:
        self.store = store
        self.groups = groups
        self.total = PrefixStatistics()
        self._reference = next((c.policy for c in groups.classes), None)  # a full group, if there is one

    def record(self, owner: PoolSession, item: AdmitItem, sequence: Sequence, hit: HitResult) -> int:
        """Counts one successful admission, before anything is held; returns the hit tokens that were its session's."""
        statistics = (self.total, owner.statistics)
        own = hit.tokens
        if own and self.store.has_others:
            own = self._own_tokens(owner.serial, hit)
        if not self.groups.config.enable_caching:
            return 0
        if item.is_resumed:
            for each in statistics:
                each.resumed_requests += 1
                each.resumed_query_tokens += item.num_tokens
                each.resumed_hit_tokens += hit.tokens
            return own
        if item.skip_lookup or self._reference is None:
            for each in statistics:
                each.skipped_requests += 1
                each.skipped_query_tokens += item.num_tokens
            return own
        rule, evicted, other, never, age = self._split_miss(item, sequence, hit)
        for each in statistics:
            each.requests += 1
            each.query_tokens += item.num_tokens
            each.hit_own_tokens += own
            each.hit_shared_tokens += hit.tokens - own
            each.miss_rule_tokens += rule
            each.miss_evicted_tokens += evicted
            each.miss_other_tokens += other
            each.miss_never_seen_tokens += never
            if evicted:
                each.miss_evicted_by_age_tokens[self._age_bucket(age)] += evicted
                each.miss_evicted_by_growth_tokens[self._growth_bucket(age)] += evicted
        return own

    def _own_tokens(self, session: int, hit: HitResult) -> int:
        """Tokens of the hit whose blocks this session published; null entries count like the first block after them."""
        reference = self._reference
        assert reference is not None
        row = hit.blocks[reference.gid]
        origin_of = self.store.origin_of
        sessions = {origin_of[block].session for block in row if block}  # type: ignore[union-attr]
        if len(sessions) == 1:
            return hit.tokens if session in sessions else 0
        own = 0
        is_own = False
        for i in range(len(row) - 1, -1, -1):
            if row[i]:
                is_own = origin_of[row[i]].session == session  # type: ignore[union-attr]
            own += is_own
        return min(own * reference.block_tokens, hit.tokens)

    def _split_miss(self, item: AdmitItem, sequence: Sequence, hit: HitResult) -> tuple[int, int, int, int, int]:
        reference = self._reference
        assert reference is not None
        size = reference.block_tokens
        view = sequence.block_hashes(reference.stride)
        limit = min(item.num_tokens - 1, item.max_hit_tokens if item.max_hit_tokens >= 0 else item.num_tokens)
        end = min(limit // size, len(view))
        start = min(max(hit.tokens, hit.boundary_tokens) // size, end)
        seen = self._end_of_seen(view, start, end, reference.gid)
        missing = item.num_tokens - hit.tokens
        rule = max(0, item.num_tokens - max(end * size, hit.tokens)) + max(0, start * size - hit.tokens)
        gone = max(0, (seen - start) * size)
        never = missing - rule - gone
        if never < 0:
            rule, never = rule + never, 0
        if not gone:
            return rule, 0, 0, never, 0
        age = self.store.ghosts.age(view[start])
        if age is None:
            is_backed = self.store.prefixes.find(reference.gid, view[start], -1) != 0
            return (rule + gone, 0, 0, never, 0) if is_backed else (rule, 0, gone, never, 0)
        return rule, gone, 0, never, age

    def _end_of_seen(self, view: list[bytes], start: int, end: int, gid: int) -> int:
        """First block of [start, end) that nobody ever published, as far as is remembered."""
        index, age = self.store.index[gid], self.store.ghosts.age
        low, high = start, end
        while low < high:
            middle = (low + high) // 2 if low != start or high != end else start
            if view[middle] in index or age(view[middle]) is not None:
                low = middle + 1
            else:
                high = middle
        return low

    def _age_bucket(self, age: int) -> int:
        bound = self.store.num_blocks // 4
        for bucket in range(NUM_AGE_BUCKETS - 1):
            if age < bound:
                return bucket
            bound *= 4
        return NUM_AGE_BUCKETS - 1

    def _growth_bucket(self, age: int) -> int:
        """The least growth that would have kept it: a pool of so many blocks more evicts so many evictions later."""
        return bisect_right(GROWTH_PERCENTS, age * 100 // self.store.num_blocks)
