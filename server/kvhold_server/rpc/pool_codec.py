"""PoolService's messages ↔ the node's values. Every refusal names the field and its bound."""

from google.protobuf.duration_pb2 import Duration

from kvhold.v1 import plan_pb2
from kvhold.v1 import pool_pb2 as pb
from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.ids import PoolName
from kvhold_server.domain.plan import Plan
from kvhold_server.domain.pool_config import GroupConfig, GroupKind, MambaMode
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.memory.backend import ExportedRegion, ExportKind, Region
from kvhold_server.node.errors import BackendUnknown
from kvhold_server.node.identity import ByteFormat, ContentIdentity, PoolOptions, PoolOverrides
from kvhold_server.node.live_pool import LivePool, RecoveryReport
from kvhold_server.node.opening import OpenPoolCommand
from kvhold_server.pool.values import GROWTH_PERCENTS, PrefixStatistics
from kvhold_server.rpc.step_answers import fill_counts
from kvhold_server.rpc.step_codec import MAX_INT32, WireShape

BACKEND_NAMES = {
    pb.MEMORY_BACKEND_POSIX_SHM: "posix_shm",
    pb.MEMORY_BACKEND_MEMFD: "memfd",
    pb.MEMORY_BACKEND_CUDA_VMM: "cuda_vmm",
    pb.MEMORY_BACKEND_CUDA_IPC: "cuda_ipc",
    pb.MEMORY_BACKEND_FAKE: "fake",
}
OUTCOMES = {"recovered": pb.OPEN_POOL_OUTCOME_RECOVERED, "fresh": pb.OPEN_POOL_OUTCOME_FRESH}
BACKEND_NUMBERS = {name: number for number, name in BACKEND_NAMES.items()}
MIN_HASH_BYTES, MAX_HASH_BYTES, DEFAULT_HASH_BYTES = 8, 64, 32
HASH_ALGORITHM_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
GROUP_KIND_WORDS = {"full": GroupKind.FULL, "chunked_local": GroupKind.CHUNKED_LOCAL, "ring": GroupKind.RING}
MAX_TEXT = 512
MAX_OVERRIDE_GROUPS = 64


def decode_open_pool(
    request: pb.OpenPoolRequest, plan: Plan | None, default_backend: str, limits: ServiceLimits
) -> OpenPoolCommand:
    """Raises InvalidField, BackendUnknown."""
    wait_s = request.memory_wait.seconds + request.memory_wait.nanos / 1e9
    if not 0 <= wait_s <= limits.max_memory_wait_s:
        raise InvalidField("memory_wait", wait_s, f"must be 0..{limits.max_memory_wait_s} s")
    return OpenPoolCommand(
        name=PoolName(request.name),
        plan=plan,
        byte_format=_byte_format(request.byte_format, limits),
        content=decode_content(request.content),
        options=_options(request.options, request.content.hash_algorithm, default_backend),
        expected_plan_fingerprint=request.expected_plan_fingerprint,
        memory_wait_s=wait_s,
    )


def decode_content(m: pb.ContentIdentity) -> ContentIdentity:
    """Raises InvalidField."""
    _ranged("content.hash_block_size_tokens", m.hash_block_size_tokens, 0, MAX_INT32)
    if len(m.hash_seed) > MAX_HASH_BYTES:
        raise InvalidField("content.hash_seed", f"{len(m.hash_seed)} bytes", f"must have at most {MAX_HASH_BYTES}")
    names = ("model", "revision", "weight_version", "quantization", "adapters_digest", "hash_algorithm")
    return ContentIdentity(
        **{name: _text(f"content.{name}", getattr(m, name)) for name in names},
        hash_seed=m.hash_seed,
        hash_block_size_tokens=m.hash_block_size_tokens,
    )


def _byte_format(m: pb.ByteFormat, limits: ServiceLimits) -> ByteFormat:
    if len(m.extras) > limits.max_extras:
        raise InvalidField("byte_format.extras", f"{len(m.extras)} entries", f"must be at most {limits.max_extras}")
    return ByteFormat(
        attention_backend=_text("byte_format.attention_backend", m.attention_backend),
        kernel_block_size_tokens=_ranged(
            "byte_format.kernel_block_size_tokens", m.kernel_block_size_tokens, 0, MAX_INT32
        ),
        engine=_text("byte_format.engine", m.engine),
        tensor_parallel_size=_ranged("byte_format.tensor_parallel_size", m.tensor_parallel_size, 0, MAX_INT32),
        pipeline_parallel_size=_ranged("byte_format.pipeline_parallel_size", m.pipeline_parallel_size, 0, MAX_INT32),
        context_parallel_size=_ranged("byte_format.context_parallel_size", m.context_parallel_size, 0, MAX_INT32),
        instruction_set=_text("byte_format.instruction_set", m.instruction_set),
        extras=tuple(sorted(_text("byte_format.extras", extra) for extra in m.extras)),
    )


def _options(m: pb.PoolOptions, hash_algorithm: str, default_backend: str) -> PoolOptions:
    if m.backend and m.backend not in BACKEND_NAMES:
        raise BackendUnknown(str(m.backend), ", ".join(BACKEND_NUMBERS))
    known_size = HASH_ALGORITHM_BYTES.get(hash_algorithm, DEFAULT_HASH_BYTES)
    hash_size = m.hash_size_bytes or known_size
    _ranged("options.hash_size_bytes", hash_size, MIN_HASH_BYTES, MAX_HASH_BYTES)
    if hash_algorithm in HASH_ALGORITHM_BYTES and hash_size != known_size:
        raise InvalidField("options.hash_size_bytes", hash_size, f"must be {known_size}: {hash_algorithm} is that long")
    for name in ("num_reserved_low_blocks", "num_prefill_lookahead_tokens", "retention_interval_tokens"):
        _ranged(f"options.{name}", getattr(m, name), 0, MAX_INT32)
    return PoolOptions(
        backend=BACKEND_NAMES[m.backend] if m.backend else default_backend,
        rank_device_indexes=tuple(m.rank_device_indexes),
        num_reserved_low_blocks=m.num_reserved_low_blocks,
        enable_prefix_caching=m.enable_prefix_caching,
        hash_size_bytes=hash_size,
        eagle_group_ids=tuple(m.eagle_group_ids),
        eagle_drop=m.eagle_drop,
        num_prefill_lookahead_tokens=m.num_prefill_lookahead_tokens,
        retention_interval_tokens=m.retention_interval_tokens if m.HasField("retention_interval_tokens") else None,
        events_carry_tokens=m.events_carry_tokens,
        shared_prefix_checkpoint=m.shared_prefix_checkpoint,
        verify_checksums=m.verify_checksums,
        overrides=_overrides(m.overrides),
    )


def _overrides(m: pb.PoolOverrides) -> PoolOverrides:
    names = (
        "scheduler_block_size_tokens",
        "hash_block_size_tokens",
        "max_in_flight_tokens",
        "max_model_len_tokens",
        "num_blocks",
    )
    values = {name: _ranged(f"options.overrides.{name}", getattr(m, name), 0, MAX_INT32) for name in names}
    if len(m.groups) > MAX_OVERRIDE_GROUPS:
        rule = f"must be at most {MAX_OVERRIDE_GROUPS}"
        raise InvalidField("options.overrides.groups", f"{len(m.groups)} entries", rule)
    groups = tuple(_group_override(f"options.overrides.groups[{i}]", group) for i, group in enumerate(m.groups))
    units = m.num_retained_boundary_units if m.HasField("num_retained_boundary_units") else 1
    _ranged("options.overrides.num_retained_boundary_units", units, 0, MAX_INT32)
    return PoolOverrides(groups=groups, num_retained_boundary_units=units, **values)


def _group_override(path: str, m: pb.GroupOverride) -> GroupConfig:
    words = {kind.value: kind for kind in GroupKind} | GROUP_KIND_WORDS
    if m.kind not in words:
        raise InvalidField(f"{path}.kind", m.kind, f"must be one of {', '.join(sorted(words))}")
    modes = {mode.value: mode for mode in MambaMode} | {"": MambaMode.NONE}
    if m.mamba_cache_mode not in modes:
        raise InvalidField(f"{path}.mamba_cache_mode", m.mamba_cache_mode, "must be none, align or all")
    return GroupConfig(
        kind=words[m.kind],
        block_size_tokens=_ranged(f"{path}.block_size_tokens", m.block_size_tokens, 1, MAX_INT32),
        window_tokens=_ranged(f"{path}.sliding_window_tokens", m.sliding_window_tokens, 0, MAX_INT32),
        extra_retained_tokens=m.extra_retained_tokens,
        chunk_tokens=_ranged(f"{path}.attention_chunk_size_tokens", m.attention_chunk_size_tokens, 0, MAX_INT32),
        mamba_mode=modes[m.mamba_cache_mode],
        num_speculative_blocks=m.num_speculative_blocks,
        num_checkpoint_blocks=m.num_prefill_checkpoint_blocks,
        checkpoint_alignment_tokens=m.prefill_checkpoint_alignment_tokens,
    )


def _ranged(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidField(field, value, f"must be {low}..{high}")
    return value


def _text(field: str, value: str) -> str:
    if len(value) > MAX_TEXT:
        raise InvalidField(field, f"{len(value)} characters", f"must have at most {MAX_TEXT}")
    return value


# ------------------------------------------------------------------------------------------------------- answers


def wire_shape(live: LivePool) -> WireShape:
    """How messages about this pool are read."""
    return WireShape(
        num_groups=len(live.config.groups),
        hash_size_bytes=live.identity.options.hash_size_bytes,
        hash_unit_tokens=live.config.hash_unit_tokens,
        num_blocks=live.config.num_blocks,
        enable_caching=live.config.enable_caching,
        carries_tokens=live.identity.options.events_carry_tokens,
    )


def encode_pool(live: LivePool, num_sessions: int, plan: plan_pb2.Plan | None) -> pb.Pool:
    """A pool, with its encoded plan or without."""
    config, options = live.config, live.identity.options
    message = pb.Pool(
        name=live.name,
        plan_fingerprint=live.identity.plan_fingerprint,
        plan=plan,
        byte_format=_encode_byte_format(live.identity.byte_format),
        content=encode_content(live.identity.content),
        content_generation=live.content_generation,
        options=_encode_options(options),
        hash_size_bytes=options.hash_size_bytes,
        hash_block_size_tokens=config.hash_unit_tokens,
        scheduler_block_size_tokens=config.scheduler_block_tokens,
        num_groups=len(config.groups),
        group_block_size_tokens=[group.block_size_tokens for group in config.groups],
        num_ranks=live.num_ranks,
        num_sessions=num_sessions,
        size_bytes=live.size_bytes,
        block_size_bytes=live.plan.ranks[0].bytes_per_block if live.plan else 0,
        prefix_stats=encode_prefix_stats(live.pool.prefix_statistics()),
        began_as=OUTCOMES[live.recovery.outcome],
        recovery=encode_recovery(live.recovery),
        groups=[_encode_group_override(group) for group in config.groups],
        max_model_len_tokens=config.max_model_len,
    )
    counts = live.pool.counts()
    fill_counts(message.counts, counts, counts.available)
    return message


def encode_prefix_stats(stats: PrefixStatistics) -> pb.PrefixStats:
    """Query tokens and where they went."""
    return pb.PrefixStats(
        query_tokens=stats.query_tokens,
        hit_own_tokens=stats.hit_own_tokens,
        hit_shared_tokens=stats.hit_shared_tokens,
        miss_never_seen_tokens=stats.miss_never_seen_tokens,
        miss_evicted_tokens=stats.miss_evicted_tokens,
        miss_evicted_by_age_tokens=stats.miss_evicted_by_age_tokens,
        miss_evicted_by_growth_tokens=stats.miss_evicted_by_growth_tokens,
        growth_percents=GROWTH_PERCENTS,
        miss_rule_tokens=stats.miss_rule_tokens,
        miss_other_tokens=stats.miss_other_tokens,
        num_skipped_requests=stats.skipped_requests,
        skipped_query_tokens=stats.skipped_query_tokens,
        num_requests=stats.requests,
        num_preempted_requests=stats.resumed_requests,
        preempted_query_tokens=stats.resumed_query_tokens,
        preempted_hit_tokens=stats.resumed_hit_tokens,
    )


def encode_recovery(recovery: RecoveryReport) -> pb.Recovery:
    """What a pool began with."""
    return pb.Recovery(
        num_kept_blocks=recovery.num_kept_blocks,
        num_dropped_torn_blocks=recovery.num_dropped_torn_blocks,
        num_dropped_provisional_blocks=recovery.num_dropped_provisional_blocks,
        num_dropped_generation_blocks=recovery.num_dropped_generation_blocks,
        num_dropped_checksum_blocks=recovery.num_dropped_checksum_blocks,
        reason=recovery.reason,
        detail=recovery.detail,
        duration=duration(recovery.duration_s),
    )


def encode_content(content: ContentIdentity) -> pb.ContentIdentity:
    """As it was given."""
    return pb.ContentIdentity(
        model=content.model,
        revision=content.revision,
        weight_version=content.weight_version,
        quantization=content.quantization,
        adapters_digest=content.adapters_digest,
        hash_algorithm=content.hash_algorithm,
        hash_seed=content.hash_seed,
        hash_block_size_tokens=content.hash_block_size_tokens,
    )


def _encode_byte_format(byte_format: ByteFormat) -> pb.ByteFormat:
    return pb.ByteFormat(
        attention_backend=byte_format.attention_backend,
        kernel_block_size_tokens=byte_format.kernel_block_size_tokens,
        engine=byte_format.engine,
        tensor_parallel_size=byte_format.tensor_parallel_size,
        pipeline_parallel_size=byte_format.pipeline_parallel_size,
        context_parallel_size=byte_format.context_parallel_size,
        instruction_set=byte_format.instruction_set,
        extras=byte_format.extras,
    )


def _encode_options(options: PoolOptions) -> pb.PoolOptions:
    return pb.PoolOptions(
        backend=BACKEND_NUMBERS[options.backend],
        rank_device_indexes=options.rank_device_indexes,
        num_reserved_low_blocks=options.num_reserved_low_blocks,
        enable_prefix_caching=options.enable_prefix_caching,
        hash_size_bytes=options.hash_size_bytes,
        eagle_group_ids=options.eagle_group_ids,
        eagle_drop=options.eagle_drop,
        num_prefill_lookahead_tokens=options.num_prefill_lookahead_tokens,
        retention_interval_tokens=options.retention_interval_tokens,
        events_carry_tokens=options.events_carry_tokens,
        shared_prefix_checkpoint=options.shared_prefix_checkpoint,
        verify_checksums=options.verify_checksums,
        overrides=_encode_overrides(options.overrides),
    )


def _encode_overrides(overrides: PoolOverrides) -> pb.PoolOverrides | None:
    """What replaces the plan's values: who mirrors block tables needs the groups. Absent where nothing does."""
    if overrides == PoolOverrides():
        return None
    return pb.PoolOverrides(
        scheduler_block_size_tokens=overrides.scheduler_block_size_tokens,
        hash_block_size_tokens=overrides.hash_block_size_tokens,
        max_in_flight_tokens=overrides.max_in_flight_tokens,
        max_model_len_tokens=overrides.max_model_len_tokens,
        groups=[_encode_group_override(group) for group in overrides.groups],
        num_blocks=overrides.num_blocks,
        num_retained_boundary_units=overrides.num_retained_boundary_units,
    )


def _encode_group_override(group: GroupConfig) -> pb.GroupOverride:
    return pb.GroupOverride(
        kind=group.kind.value,
        block_size_tokens=group.block_size_tokens,
        sliding_window_tokens=group.window_tokens,
        extra_retained_tokens=group.extra_retained_tokens,
        attention_chunk_size_tokens=group.chunk_tokens,
        mamba_cache_mode=group.mamba_mode.value,
        num_speculative_blocks=group.num_speculative_blocks,
        num_prefill_checkpoint_blocks=group.num_checkpoint_blocks,
        prefill_checkpoint_alignment_tokens=group.checkpoint_alignment_tokens,
    )


def encode_region(region: Region, exported: ExportedRegion, fd_socket_path: str, fd_token: bytes) -> pb.RegionExport:
    """How to map one region."""
    message = pb.RegionExport(
        size_bytes=exported.size_bytes,
        fd_socket_path=fd_socket_path,
        fd_token=fd_token,
        ipc_offset_bytes=exported.offset_bytes,
        device_uuid="" if exported.kind in (ExportKind.SHM_NAME, ExportKind.OPAQUE) else exported.device_uuid,
        chunk_sizes_bytes=exported.chunk_sizes_bytes if len(exported.chunk_sizes_bytes) > 1 else (),
        host_resident=region.host,
    )
    if exported.kind is ExportKind.SHM_NAME:
        message.shm_name = exported.shm_name
    if exported.kind is ExportKind.IPC_HANDLE:
        message.ipc_handle = exported.handle
    return message


def duration(seconds: float) -> Duration:
    """A span as the wire has it."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
