"""Every bound that the daemon enforces on callers, in one value: configured once, enforced everywhere, and returned by
GetCapabilities under the names in `WIRE_NAMES`. Nothing else in the daemon invents a bound of its own.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Largest allowed values; every one is at least 1."""

    max_message_bytes: int = 32 << 20  # one request or response
    max_pools: int = 64
    max_sessions: int = 4096  # of all pools together, dead ones that still hold blocks included
    max_sessions_per_pool: int = 1024
    max_items: int = 65_536  # of one kind in one step
    max_evict_blocks: int = 65_536  # in one EvictBlocks
    max_step_parts: int = 1024  # parts of one step
    max_exports: int = 4096  # fd tokens that are issued and not yet redeemed
    max_memory_wait_s: int = 600
    max_watchers: int = 64  # event streams of all pools together
    max_event_buffer: int = 65_536  # events kept for cursors, per pool
    max_described_blocks: int = 10_000  # in one page of DescribeBlocks
    max_free_order: int = 1_000_000  # entries of DescribeBlocks.free_order
    max_tenants: int = 1024  # tenants with quotas, per pool
    max_name_length: int = 128  # pool and client names
    max_tenant_length: int = 64
    max_request_id_length: int = 64
    max_extras: int = 64  # entries of ByteFormat.extras
    max_held_sequences: int = 65_536  # re-asserted in one OpenSession
    max_layers: int = 1_000_000  # over all ranks of one plan request
    max_ranks: int = 1024
    max_layer_specs: int = 4096  # different ones; grouping compares them with each other


# What a bound is on, as GetCapabilities names it: message and field of the wire, or the thing that is counted.
WIRE_NAMES: dict[str, str] = {
    "max_message_bytes": "message_bytes",
    "max_pools": "pools",
    "max_sessions": "sessions",
    "max_sessions_per_pool": "sessions_per_pool",
    "max_items": "StepRequest.items",
    "max_evict_blocks": "EvictBlocksRequest.block_ids",
    "max_step_parts": "StepRequest.part",
    "max_exports": "exports",
    "max_memory_wait_s": "OpenPoolRequest.memory_wait_s",
    "max_watchers": "watchers",
    "max_event_buffer": "events_kept",
    "max_described_blocks": "DescribeBlocksRequest.max_blocks",
    "max_free_order": "DescribeBlocksResponse.free_order",
    "max_tenants": "tenants_with_quota",
    "max_name_length": "OpenPoolRequest.name",
    "max_tenant_length": "OpenSessionRequest.tenant",
    "max_request_id_length": "OpenSessionRequest.request_id",
    "max_extras": "ByteFormat.extras",
    "max_held_sequences": "OpenSessionRequest.held",
    "max_layers": "PlanRequest.layers",
    "max_ranks": "PlanRequest.ranks",
    "max_layer_specs": "PlanRequest.layer_specs",
}
