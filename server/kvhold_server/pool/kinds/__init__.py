"""One file per kind of group; this table is the only place that knows them all."""

from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode, PoolConfig
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.kinds.base import GroupPolicy
from kvhold_server.pool.kinds.chunked_local import ChunkedLocalPolicy
from kvhold_server.pool.kinds.cross_attention import CrossAttentionPolicy
from kvhold_server.pool.kinds.full import FullPolicy, RswaPolicy
from kvhold_server.pool.kinds.mamba import AlignedMambaPolicy, MambaPolicy
from kvhold_server.pool.kinds.ring import KpoolTailPolicy, RingPolicy
from kvhold_server.pool.kinds.sliding_window import SlidingWindowPolicy

POLICIES: dict[GroupKind, type[GroupPolicy]] = {
    GroupKind.FULL: FullPolicy,
    GroupKind.MLA: FullPolicy,
    GroupKind.SINK_FULL: FullPolicy,
    GroupKind.RSWA: RswaPolicy,
    GroupKind.SLIDING_WINDOW: SlidingWindowPolicy,
    GroupKind.SLIDING_WINDOW_MLA: SlidingWindowPolicy,
    GroupKind.CHUNKED_LOCAL: ChunkedLocalPolicy,
    GroupKind.MAMBA: MambaPolicy,
    GroupKind.RING: RingPolicy,
    GroupKind.KPOOL_TAIL: KpoolTailPolicy,
    GroupKind.CROSS_ATTENTION: CrossAttentionPolicy,
}


def make_policy(gid: int, config: GroupConfig, pool: PoolConfig, store: BlockStore) -> GroupPolicy:
    """The policy of a group."""
    policy = POLICIES[config.kind]
    if policy is MambaPolicy and config.mamba_mode is MambaMode.ALIGN:
        policy = AlignedMambaPolicy
    return policy(gid, config, pool, store)
