"""What must agree before one engine may use another's blocks, and how the first difference is named.

plan fingerprint    where each byte lies                       PLAN_MISMATCH
ByteFormat          what an engine writes there (R15)          BYTE_FORMAT_MISMATCH
ContentIdentity     what a hash stands for (R14)               CONTENT_MISMATCH
PoolOptions         how the pool was made                      PLAN_MISMATCH
"""

import dataclasses
from dataclasses import dataclass

from kvhold_server.domain.pool_config import GroupConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteFormat:
    """As in the wire's message of that name; `extras` sorted."""

    attention_backend: str = ""
    kernel_block_size_tokens: int = 0
    engine: str = ""
    tensor_parallel_size: int = 0
    pipeline_parallel_size: int = 0
    context_parallel_size: int = 0
    instruction_set: str = ""
    extras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentIdentity:
    """As in the wire's message of that name."""

    model: str = ""
    revision: str = ""
    weight_version: str = ""
    quantization: str = ""
    adapters_digest: str = ""
    hash_algorithm: str = ""
    hash_seed: bytes = b""
    hash_block_size_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOverrides:
    """Replaces values that otherwise follow from the plan; 0 or empty: the plan's."""

    scheduler_block_size_tokens: int = 0
    hash_block_size_tokens: int = 0
    max_in_flight_tokens: int = 0
    max_model_len_tokens: int = 0
    groups: tuple[GroupConfig, ...] = ()
    num_blocks: int = 0
    num_retained_boundary_units: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """As in the wire's message of that name, defaults filled in."""

    backend: str
    rank_device_indexes: tuple[int, ...] = ()
    num_reserved_low_blocks: int = 0
    enable_prefix_caching: bool = True
    hash_size_bytes: int = 32
    eagle_group_ids: tuple[int, ...] = ()
    eagle_drop: bool = False
    num_prefill_lookahead_tokens: int = 0
    retention_interval_tokens: int | None = None
    events_carry_tokens: bool = False
    shared_prefix_checkpoint: bool = False
    verify_checksums: bool = False
    overrides: PoolOverrides = PoolOverrides()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolIdentity:
    """Everything that must agree to attach."""

    plan_fingerprint: str
    byte_format: ByteFormat
    content: ContentIdentity
    options: PoolOptions


def first_difference(held: object, asked: object, path: str = "") -> str:
    """Where two values of one shape first differ, e.g. "ranks[0].num_blocks: 100 held, 90 asked"; empty: nowhere."""
    if held == asked:
        return ""
    if dataclasses.is_dataclass(held) and type(held) is type(asked):
        names = [f.name for f in dataclasses.fields(held)]
        pairs = [(f"{path}.{name}" if path else name, getattr(held, name), getattr(asked, name)) for name in names]
    elif isinstance(held, tuple) and isinstance(asked, tuple):
        if len(held) != len(asked):
            return f"{path}: {len(held)} entries held, {len(asked)} asked"
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(held, asked, strict=True))]
    else:
        return f"{path}: {_shown(held)} held, {_shown(asked)} asked"
    return next((found for p, a, b in pairs if (found := first_difference(a, b, p))), "")


def _shown(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 128 else f"{text[:125]}…"
