"""What a pool is asked for, and what it is."""

from dataclasses import dataclass

from kvhold.v1 import plan_pb2, pool_pb2
from kvhold_client.codec import decode_prefix_stats, decode_shape, enum_word
from kvhold_client.results import PoolCounts, PrefixStats
from kvhold_client.shape import GroupShape, PoolShape
from kvhold_client.step_reply import decode_counts

BACKENDS = ("default", "posix_shm", "memfd", "cuda_vmm", "cuda_ipc", "fake")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """Everything that OpenPool takes; the optional messages are the contract's own."""

    name: str
    plan: plan_pb2.PlanRequest | None = None  # None: attach only, or simulated groups
    backend: str = "default"  # one of BACKENDS
    enable_prefix_caching: bool = True
    hash_size_bytes: int = 32
    num_reserved_low_blocks: int = 0
    model: str = ""  # of the content identity; `content` says more
    hash_algorithm: str = ""
    content: pool_pb2.ContentIdentity | None = None
    byte_format: pool_pb2.ByteFormat | None = None
    simulated_groups: tuple[GroupShape, ...] = ()  # replace the plan's groups: block management without memory
    simulated_num_blocks: int = 0
    max_model_len_tokens: int = 0  # 0: the plan's
    max_in_flight_tokens: int = 0  # 0: the plan's
    memory_wait_s: float = 0.0

    def message(self) -> pool_pb2.OpenPoolRequest:
        """The wire's form. Raises ValueError for an unknown backend."""
        if self.backend not in BACKENDS:
            raise ValueError(f"backend {self.backend!r} is none of {', '.join(BACKENDS)}")
        word = "UNSPECIFIED" if self.backend == "default" else self.backend.upper()
        request = pool_pb2.OpenPoolRequest(name=self.name, plan=self.plan)
        options = request.options
        options.backend = pool_pb2.MemoryBackend.Value(f"MEMORY_BACKEND_{word}")
        options.enable_prefix_caching = self.enable_prefix_caching
        options.hash_size_bytes = self.hash_size_bytes
        options.num_reserved_low_blocks = self.num_reserved_low_blocks
        for group in self.simulated_groups:
            options.overrides.groups.add(
                kind=group.kind,
                block_size_tokens=group.block_size_tokens,
                sliding_window_tokens=group.sliding_window_tokens,
                extra_retained_tokens=group.extra_retained_tokens,
                attention_chunk_size_tokens=group.attention_chunk_size_tokens,
            )
        if self.simulated_groups:
            options.overrides.num_blocks = self.simulated_num_blocks
        if self.max_model_len_tokens:
            options.overrides.max_model_len_tokens = self.max_model_len_tokens
        if self.max_in_flight_tokens:
            options.overrides.max_in_flight_tokens = self.max_in_flight_tokens
        if self.content is not None:
            request.content.CopyFrom(self.content)
        elif self.model or self.hash_algorithm:
            request.content.model, request.content.hash_algorithm = self.model, self.hash_algorithm
        if self.byte_format is not None:
            request.byte_format.CopyFrom(self.byte_format)
        if self.memory_wait_s:
            request.memory_wait.FromNanoseconds(int(self.memory_wait_s * 1e9))
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """A pool as it was when it was asked for."""

    name: str
    outcome: str  # of opening it: attached, recovered, fresh; of one that is listed: how the daemon began with it
    recovery_reason: str  # why it began fresh
    num_recovered_blocks: int  # that it began with
    plan_fingerprint: str
    model: str
    content_generation: int
    backend: str
    shape: PoolShape
    scheduler_block_size_tokens: int
    num_ranks: int
    num_sessions: int
    size_bytes: int
    block_size_bytes: int
    counts: PoolCounts
    prefix_stats: PrefixStats


def decode_pool(m: pool_pb2.Pool, outcome: int = 0, recovery: pool_pb2.Recovery | None = None) -> PoolInfo:
    """From the wire. `outcome`, `recovery`: what the call that opened it was told, if it was opened."""
    outcome = outcome or m.began_as
    recovery = recovery if recovery is not None else m.recovery
    return PoolInfo(
        name=m.name,
        outcome=enum_word(pool_pb2.OpenPoolOutcome, outcome, "OPEN_POOL_OUTCOME_") if outcome else "",
        recovery_reason=recovery.reason,
        num_recovered_blocks=recovery.num_kept_blocks,
        plan_fingerprint=m.plan_fingerprint,
        model=m.content.model,
        content_generation=m.content_generation,
        backend=enum_word(pool_pb2.MemoryBackend, m.options.backend, "MEMORY_BACKEND_"),
        shape=decode_shape(m),
        scheduler_block_size_tokens=m.scheduler_block_size_tokens,
        num_ranks=m.num_ranks,
        num_sessions=m.num_sessions,
        size_bytes=m.size_bytes,
        block_size_bytes=m.block_size_bytes,
        counts=decode_counts(m.counts),
        prefix_stats=decode_prefix_stats(m.prefix_stats),
    )
