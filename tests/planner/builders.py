"""Short ways to write specs and requests. By default: block 16, 2 heads of 64, bf16, so that a page has 8192 bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds import (
    ChunkedLocalSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullSpec,
    HiddenStateSpec,
    KpoolTailSpec,
    MambaSpec,
    MlaSpec,
    SlidingWindowMlaSpec,
    SlidingWindowSpec,
)
from kvhold_server.domain.kinds.mamba import StateArray
from kvhold_server.domain.kinds.mla import CacheRole
from kvhold_server.domain.layer_spec import LayerSpec
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import Plan
from kvhold_server.planner.plan import plan
from kvhold_server.planner.request import Layer, PlannerConfig, PlanRequest, Rank

Layers = Mapping[str, LayerSpec]


def _geometry(block: int, heads: int, size: int, dtype: Dtype, value_size: int | None = None) -> dict[str, Any]:
    return {
        "block_size_tokens": block,
        "num_kv_heads": heads,
        "head_size_elems": size,
        "head_size_v_elems": size if value_size is None else value_size,
        "dtype": dtype,
    }


def full(block: int = 16, heads: int = 2, size: int = 64, **fields: Any) -> FullSpec:
    return FullSpec(**_geometry(block, heads, size, Dtype.BFLOAT16), **fields)


def sliding(window: int = 128, block: int = 16, heads: int = 2, size: int = 64, **fields: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**_geometry(block, heads, size, Dtype.BFLOAT16), sliding_window_tokens=window, **fields)


def chunked(chunk: int = 64, block: int = 16, heads: int = 2, size: int = 64) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(**_geometry(block, heads, size, Dtype.BFLOAT16), attention_chunk_size_tokens=chunk)


def mla(block: int = 64, size: int = 576, dtype: Dtype = Dtype.BFLOAT16, **fields: Any) -> MlaSpec:
    return MlaSpec(**_geometry(block, 1, size, dtype, 0), **fields)


def indexer(block: int = 64, size: int = 132, **fields: Any) -> MlaSpec:
    return mla(block, size, Dtype.UINT8, cache_role=CacheRole.INDEXER, **fields)


def hidden(block: int = 16, heads: int = 1, size: int = 64) -> HiddenStateSpec:
    return HiddenStateSpec(**_geometry(block, heads, size, Dtype.BFLOAT16, 0))


def sliding_mla(window: int = 128, block: int = 64, size: int = 512, **fields: Any) -> SlidingWindowMlaSpec:
    return SlidingWindowMlaSpec(**_geometry(block, 1, size, Dtype.BFLOAT16, 0), sliding_window_tokens=window, **fields)


def tail(block: int = 4, heads: int = 1, size: int = 32, window: int = 4) -> KpoolTailSpec:
    return KpoolTailSpec(**_geometry(block, heads, size, Dtype.BFLOAT16), sliding_window_tokens=window)


def ring(block: int = 16, heads: int = 2, size: int = 64) -> CircularBufferSpec:
    return CircularBufferSpec(**_geometry(block, heads, size, Dtype.BFLOAT16))


def cross(block: int = 16, heads: int = 2, size: int = 64) -> CrossAttentionSpec:
    return CrossAttentionSpec(**_geometry(block, heads, size, Dtype.BFLOAT16))


def mamba(page: int = 8192, block: int = 16, **fields: Any) -> MambaSpec:
    return MambaSpec(block_size_tokens=block, states=(StateArray(shape=(page,), dtype=Dtype.UINT8),), **fields)


def many(count: int, spec: LayerSpec, prefix: str) -> dict[str, LayerSpec]:
    return {f"{prefix}{index}": spec for index in range(count)}


def config(length: int = 64, **fields: Any) -> PlannerConfig:
    values: dict[str, Any] = {"max_num_batched_tokens": 256, "layout": Layout.LBHNC} | fields
    return PlannerConfig(max_model_len_tokens=length, **values)


def request(ranks: Sequence[tuple[Layers, int]] | tuple[Layers, int], settings: PlannerConfig) -> PlanRequest:
    """`ranks` is (layers, memory), or a list of them."""
    each = [ranks] if isinstance(ranks, tuple) else ranks
    return PlanRequest(
        config=settings,
        ranks=tuple(
            Rank(
                layers=tuple(Layer(LayerName(name), spec) for name, spec in layers.items()),
                available_memory_bytes=memory,
            )
            for layers, memory in each
        ),
    )


def planned(layers: Layers, memory: int, length: int = 64, **fields: Any) -> Plan:
    """The plan of one rank."""
    return plan(request((layers, memory), config(length, **fields)))


def groups_of(made: Plan, rank: int = 0) -> list[list[str]]:
    return [list(group.layer_names) for group in made.ranks[rank].groups]


def strides_of(made: Plan, rank: int = 0) -> list[tuple[int, int, int]]:
    """(layer stride, block stride, offset) of each tensor."""
    return [(t.layer_stride_bytes, t.block_stride_bytes, t.offset_bytes) for t in made.ranks[rank].tensors]
