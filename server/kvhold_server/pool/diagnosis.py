"""Answers for people: what a block is doing, and why a prompt would not hit more. Reads only; nothing is moved.

prompt      h0  h1  h2  h3 …
group full   7   9   –              hits 2 blocks; first missing: 2
                    h2 in the index?          provisional of another session
                    remembered as evicted?    evicted, so many evictions ago
                    in another group's index? only there
                    else                      never seen (as far as is remembered)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvhold_server.pool.lookup import hit_limit
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.sequence import Sequence

OBSERVER = 0


class BlockState(Enum):
    """What a block is doing."""

    NULL = "null"
    FREE = "free"
    CACHED = "cached"
    HELD = "held"
    QUARANTINED = "quarantined"
    RESERVED = "reserved"


class MissReason(Enum):
    """Why a group does not have the next block of a prompt."""

    NONE = ""  # it has all that there are
    NEVER_SEEN = "NEVER_SEEN"
    EVICTED = "EVICTED"
    PROVISIONAL = "PROVISIONAL"
    OTHER_GROUP = "OTHER_GROUP"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKeys:
    """One block and its hashes, its own first, then shorter prefixes that end inside it."""

    block: int
    state: BlockState
    num_holders: int
    group: int  # of the hashes; 0 where there are none
    keys: tuple[bytes, ...]
    key_tokens: int
    is_provisional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMiss:
    """One group's part of a lookup."""

    group: int
    hit_tokens: int
    first_missing_block: int  # position in the prompt; -1: all are there
    reason: MissReason
    evictions_ago: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A lookup, group by group."""

    hit_tokens: int
    groups: tuple[GroupMiss, ...]
    num_additional_blocks: int  # blocks more that would have kept all that was evicted, as far as is remembered


def describe_blocks(pool: Pool, start: int, count: int) -> list[BlockKeys]:
    """Blocks start..start+count-1, as far as they exist."""
    end = min(start + count, pool.config.num_blocks)
    return [describe_block(pool, block) for block in range(start, end)]


def describe_block(pool: Pool, block: int) -> BlockKeys:
    """One block."""
    store = pool.store
    key, origin = store.key_of[block], store.origin_of[block]
    keys = () if key is None else (key, *store.secondary.get(block, ()))
    return BlockKeys(
        block=block,
        state=_state(pool, block),
        num_holders=store.refs[block],
        group=origin.group if origin is not None else 0,
        keys=keys,
        key_tokens=store.key_tokens[block] if key is not None else 0,
        is_provisional=origin is not None and not origin.is_public,
    )


def _state(pool: Pool, block: int) -> BlockState:
    store = pool.store
    if block == 0:
        return BlockState.NULL
    if block <= store.num_reserved:
        return BlockState.RESERVED
    refs = store.refs[block]
    if refs:
        return BlockState.QUARANTINED if refs == store.dead_refs.get(block, 0) else BlockState.HELD
    return BlockState.FREE if store.key_of[block] is None else BlockState.CACHED


def explain_lookup(pool: Pool, num_tokens: int, hashes: list[bytes]) -> Explanation:
    """What an observer would hit with this prompt, and what each group lacks for more."""
    hit = pool.lookup(OBSERVER, num_tokens=num_tokens, hashes=hashes)
    sequence = Sequence(0, len(pool.config.groups))
    sequence.hashes = hashes
    limit = hit_limit(num_tokens, -1)
    lost_ages = [0]
    groups = []
    for policy in pool.groups.policies:
        if not (policy.config.prefix_cacheable and pool.config.enable_caching):
            continue
        view = sequence.block_hashes(policy.stride)
        view = view[: limit // policy.block_tokens]
        alone = hit.group_hit_tokens[policy.gid]
        groups.append(_group_miss(pool, policy.gid, view, alone, alone // policy.block_tokens))
        lost_ages += [age for key in view if (age := _evicted_ago(pool, policy.gid, key)) is not None]
    return Explanation(hit_tokens=hit.hit_tokens, groups=tuple(groups), num_additional_blocks=max(lost_ages))


def _evicted_ago(pool: Pool, gid: int, key: bytes) -> int | None:
    """Evictions since this hash was evicted, the own one included; None if it is there, or not remembered."""
    age = None if key in pool.store.index[gid] else pool.store.ghosts.age(key)
    return None if age is None else age + 1


def _group_miss(pool: Pool, gid: int, view: list[bytes], hit_tokens: int, start: int) -> GroupMiss:
    store = pool.store
    for position in range(start, len(view)):
        key = view[position]
        evicted_ago = 0
        if key in store.index[gid]:
            if store.prefixes.find(gid, key, OBSERVER):
                continue
            reason = MissReason.PROVISIONAL
        elif (age := _evicted_ago(pool, gid, key)) is not None:
            reason, evicted_ago = MissReason.EVICTED, age
        else:
            is_elsewhere = any(key in index for index in store.index)
            reason = MissReason.OTHER_GROUP if is_elsewhere else MissReason.NEVER_SEEN
        return GroupMiss(
            group=gid,
            hit_tokens=hit_tokens,
            first_missing_block=position,
            reason=reason,
            evictions_ago=evicted_ago,
        )
    return GroupMiss(group=gid, hit_tokens=hit_tokens, first_missing_block=-1, reason=MissReason.NONE)
