"""All groups of a pool together: what a hit is when several kinds must agree, what allocations need, what is published.

A hit must be backed by every cacheable group. Groups of equal spec form a class and are looked up jointly. Full classes
come first because what they back is closed downwards: they are looked up once, and only cut afterwards. The others may
answer "less", which may make another class answer less still, so the length is lowered until nobody objects:

    full    ├──────────────── 32 ────┤
    window  ├───────── 28 ──┤ (its blocks before 32 are gone)      → 28, and 32 is the junction that is worth keeping
"""

from __future__ import annotations

from dataclasses import dataclass

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.kinds import POLICIES, make_policy
from kvhold_server.pool.kinds.base import Found, GroupPolicy, Prefix, cdiv
from kvhold_server.pool.kinds.chunked_local import ChunkedLocalPolicy
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.turn import Turn


@dataclass(slots=True)
class HitResult:
    """What a lookup found: `blocks[g]` is positional, null where group g does not need its block."""

    tokens: int
    blocks: list[list[int]]
    boundary_tokens: int = 0


class _Class:
    """Cacheable groups of equal spec."""

    __slots__ = ("gids", "is_eagle", "margin", "policy")

    def __init__(self, policy: GroupPolicy) -> None:
        self.policy = policy
        self.gids = [policy.gid]
        self.is_eagle = policy.is_eagle
        self.margin = policy.block_tokens


class Groups:
    """The group policies of one pool and their joint decisions."""

    def __init__(self, config: PoolConfig, store: BlockStore) -> None:
        self.config = config
        self.store = store
        self.unit_tokens, self.block_tokens = config.hash_unit_tokens, config.scheduler_block_tokens
        self.policies = [make_policy(gid, group, config, store) for gid, group in enumerate(config.groups)]
        self.is_single = len(self.policies) == 1
        flagged = any(group.is_eagle for group in config.groups)
        for policy in self.policies:
            policy.is_eagle = policy.config.is_eagle or (config.use_eagle and not flagged)
        cacheable = [p for p in self.policies if p.config.prefix_cacheable]
        self.is_fine = not self.is_single and _hits_may_end_in_blocks([p.config for p in cacheable], config)
        self.has_partials = not self.is_single and any(p.block_tokens > config.hash_unit_tokens for p in cacheable)
        self.align = config.hash_unit_tokens if self.is_fine else config.scheduler_block_tokens
        any_eagle = any(policy.is_eagle for policy in self.policies)
        proven = any(policy.proves_prefix for policy in cacheable)
        for policy in self.policies:
            policy.align_tokens = self.align
            policy.any_eagle = any_eagle
            if isinstance(policy, ChunkedLocalPolicy):
                policy.needs_proof = not proven
            policy.settle()
        self.classes = self._make_classes(cacheable)
        self.skipping = [policy for policy in self.policies if policy.skips]
        self.plain_sizes = [policy.block_tokens for policy in self.policies if policy.grows_plainly]
        if len(self.plain_sizes) < len(self.policies):
            self.plain_sizes = []
        # One table that grows with its sequence and forgets nothing: the usual model, whose steps go through in bulk.
        self.is_plain = self.is_single and self.policies[0].is_simple
        self.has_states = any(policy.config.kind is GroupKind.MAMBA for policy in self.policies)
        # Tokens that every module of a drafter computes again.
        self.withheld_tokens = max(0, config.num_prefill_lookahead_tokens - 1)

    def _make_classes(self, cacheable: list[GroupPolicy]) -> list[_Class]:
        classes: dict[object, _Class] = {}
        for policy in cacheable:
            spec = _spec_key(policy.config)
            if spec in classes:
                classes[spec].gids.append(policy.gid)
                classes[spec].is_eagle |= policy.is_eagle
            else:
                classes[spec] = _Class(policy)
        ordered = sorted(classes.values(), key=lambda c: not c.policy.is_full)
        for each in ordered:
            policy = each.policy
            if self.is_fine and policy.finds_units and policy.block_tokens > self.config.hash_unit_tokens:
                each.margin = self.config.hash_unit_tokens
        return ordered

    # ---------------------------------------------------------------- lookup
    def lookup(self, sequence: Sequence, session: int, max_tokens: int) -> HitResult:
        """The longest prefix of at most `max_tokens` that all cacheable groups back. Reads only."""
        blocks: list[list[int]] = [[] for _ in self.policies]
        if not self.classes or max_tokens <= 0:
            return HitResult(0, blocks)
        prefix = Prefix(self.store.prefixes, sequence, session)
        if self.is_single:
            (only,) = self.classes
            found = only.policy.find(prefix, only.gids, max_tokens, only.is_eagle, only.policy.block_tokens)
            return HitResult(found.tokens, found.blocks)
        return self._agree(prefix, max_tokens, blocks)

    def _agree(self, prefix: Prefix, max_tokens: int, blocks: list[list[int]]) -> HitResult:
        hit, longest = max_tokens, 0
        answers: dict[int, Found] = {}
        verified: set[int] = set()
        while True:
            current = hit
            for i, each in enumerate(self.classes):
                policy = each.policy
                if policy.is_full and i in answers:
                    current = min(current, answers[i].tokens)
                    continue
                drop = each.is_eagle and i not in verified
                limit = current
                if drop and not policy.is_drop_free:
                    limit = min(current + each.margin, max_tokens)  # look one unit further, then drop it
                answer = answers[i] = policy.find(prefix, each.gids, limit, drop, self.align)
                if drop:
                    verified.add(i)
                elif answer.tokens < current:
                    verified.clear()  # the others dropped their last unit at a length that no longer counts
                current = answer.tokens
                longest = max(longest, current)
            if current >= hit:
                break
            hit = current
            if len(self.classes) == 2 and self.classes[0].policy.is_full:
                break
        for i, each in enumerate(self.classes):
            keep = cdiv(hit, each.policy.block_tokens) if each.policy.is_full else None
            for gid, row in zip(each.gids, answers[i].blocks, strict=True):
                blocks[gid] = row if keep is None else row[:keep]
        return HitResult(hit, blocks, longest if longest > hit else 0)

    def group_hit_tokens(self, sequence: Sequence, session: int, max_tokens: int) -> list[int]:
        """What each group backs by itself; 0 for groups that are never looked up."""
        tokens = [0] * len(self.policies)
        prefix = Prefix(self.store.prefixes, sequence, session)
        for each in self.classes:
            for gid in each.gids:
                align = each.policy.block_tokens if self.is_single else self.align
                tokens[gid] = each.policy.find(prefix, [gid], max_tokens, each.is_eagle, align).tokens
        return tokens

    # --------------------------------------------------------------- publish
    def publish(self, sequence: Sequence, tokens: int, turn: Turn) -> None:
        """Offers what `tokens` known tokens fill, as far as their hashes are known (§11 C1)."""
        unit = self.unit_tokens
        if tokens // unit > len(sequence.hashes):
            tokens = len(sequence.hashes) * unit
        if self.is_single:
            policy = self.policies[0]
            if policy.publishes_plainly:
                policy.publish_full(sequence, (tokens - self.withheld_tokens) // policy.block_tokens, turn)
            else:
                policy.publish(sequence, max(0, tokens - self.withheld_tokens), turn)
            return
        block, align = self.block_tokens, self.align
        base = tokens if self.is_fine else tokens // block * block
        has_partials, offered = self.has_partials, sequence.offered
        for policy in self.policies:
            if not policy.is_eagle:
                if has_partials or not policy.publishes_plainly:
                    policy.publish(sequence, base, turn)
                else:
                    end = base // policy.block_tokens
                    if end > offered[policy.gid]:
                        policy.publish_full(sequence, end, turn)
            elif base:
                final = max(0, tokens - self.withheld_tokens)
                policy.publish(sequence, min(final, final // align * align + policy.block_tokens), turn)


def _hits_may_end_in_blocks(cacheable: list[GroupConfig], config: PoolConfig) -> bool:
    """Fine mode: a state group has states inside blocks, and every other group can be looked up there, too."""
    unit = config.hash_unit_tokens

    def has_inner_states(group: GroupConfig) -> bool:
        return group.kind is GroupKind.MAMBA and group.mamba_mode is MambaMode.ALIGN and group.block_size_tokens > unit

    def is_fine(group: GroupConfig) -> bool:
        return POLICIES[group.kind].finds_units or group.block_size_tokens == unit

    return config.enable_caching and any(map(has_inner_states, cacheable)) and all(map(is_fine, cacheable))


def _spec_key(group: GroupConfig) -> object:
    """Equal for groups that are looked up jointly: everything but the drafter's flag."""
    return (
        group.kind,
        group.block_size_tokens,
        group.window_tokens,
        group.extra_retained_tokens,
        group.chunk_tokens,
        group.mamba_mode,
        group.num_speculative_blocks,
        group.num_checkpoint_blocks,
        group.checkpoint_alignment_tokens,
    )
