"""What a hidden layer keeps, and what of it one tensor-parallel rank holds, as the daemon's layer specs.

attention   heads are divided over the ranks; fewer heads than ranks are replicated, one on each
latent      one row for all heads, the same on every rank
states      heads and channels are divided; groups that do not divide come with each shard that needs them
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from kvhold.v1 import plan_pb2
from kvhold_client.hf_config.errors import UnusableField

FP8_DTYPES = ("FLOAT8_E4M3FN", "FLOAT8_E5M2")
SPARSE_FP8_FORMAT = "fp8_ds_mla"
SPARSE_FP8_ROW_BYTES = 656  # 512 bytes of fp8, 4 scales of 4, 64 elements of 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What decides a rank's share, and how it is stored. Data types are named as in the wire's Dtype."""

    tensor_parallel_size: int
    cache_dtype: str
    model_dtype: str
    block_size_tokens: int
    state_cache_mode: str = "NONE"


class Cache(ABC):
    """One layer's cache. `suffix` is the last part of its name."""

    suffix: str = "attn"

    @abstractmethod
    def spec(self, ranks: Ranks, model_type: str) -> plan_pb2.LayerSpec:
        """One rank's share. Raises UnusableField where it cannot be divided."""


@dataclass(frozen=True, kw_only=True)
class Attention(Cache):
    """Keys and values: of all tokens, of a window, or of a chunk."""

    num_kv_heads: int
    head_size_elems: int
    window_tokens: int = 0
    chunk_tokens: int = 0
    suffix: str = "self_attn.attn"

    def spec(self, ranks: Ranks, model_type: str) -> plan_pb2.LayerSpec:
        """Raises UnusableField unless heads and ranks divide one by the other."""
        heads, size = self.num_kv_heads, ranks.tensor_parallel_size
        if heads % size and size % heads:
            rule = f"tensor-parallel size {size} must divide it or be a multiple of it"
            raise UnusableField("num_key_value_heads", heads, rule, model_type)
        spec = _geometry(max(1, heads // size), self.head_size_elems, ranks.cache_dtype, ranks)
        if self.window_tokens:
            spec.sliding_window.sliding_window_tokens = self.window_tokens
        elif self.chunk_tokens:
            spec.chunked_local.attention_chunk_size_tokens = self.chunk_tokens
        else:
            spec.full_attention.SetInParent()
        return spec


@dataclass(frozen=True, kw_only=True)
class Latent(Cache):
    """One latent row per token; where rows are selected (`sparse`), fp8 has a format of its own."""

    row_elems: int
    sparse: bool = False
    suffix: str = "self_attn.attn"

    def spec(self, ranks: Ranks, model_type: str) -> plan_pb2.LayerSpec:
        """The same on every rank."""
        packed = self.sparse and ranks.cache_dtype in FP8_DTYPES
        spec = _geometry(1, self.row_elems, "UINT8" if packed else ranks.cache_dtype, ranks)
        spec.mla_attention.SetInParent()
        if packed:
            spec.geometry.state_content_bytes = SPARSE_FP8_ROW_BYTES
            spec.mla_attention.cache_dtype_str = SPARSE_FP8_FORMAT
        return spec


@dataclass(frozen=True, kw_only=True)
class Indexer(Cache):
    """Rows by which latent rows are selected: fp8 elements and a 4-byte scale for each 128 of them."""

    head_size_elems: int
    suffix: str = "self_attn.indexer.k_cache"

    def spec(self, ranks: Ranks, model_type: str) -> plan_pb2.LayerSpec:
        """The same on every rank."""
        row_bytes = self.head_size_elems + self.head_size_elems // 128 * 4
        spec = _geometry(1, row_bytes, "UINT8", ranks)
        spec.mla_attention.cache_role = plan_pb2.CACHE_ROLE_INDEXER
        return spec


@dataclass(frozen=True, kw_only=True)
class Recurrent(Cache):
    """A convolution's last inputs [kernel − 1, channels] and the state proper."""

    conv_channels: int
    conv_kernel: int
    state_shape: tuple[int, ...]  # of all ranks; the first extent is divided
    state_dtype: str  # empty: the model's
    mamba_type: str
    heads_field: str  # named where it cannot be divided
    group_elems: int = 0  # channels of one group, twice (B and C), that are replicated where groups do not divide
    num_groups: int = 0
    suffix: str = "mixer"

    def spec(self, ranks: Ranks, model_type: str) -> plan_pb2.LayerSpec:
        """Raises UnusableField where heads or channels cannot be divided."""
        size = ranks.tensor_parallel_size
        channels = self.conv_channels + self._replicated_groups(size) * self.group_elems
        if self.state_shape[0] % size or channels % size:
            rule = f"must be divisible by the tensor-parallel size {size}"
            raise UnusableField(self.heads_field, self.state_shape[0], rule, model_type)
        mode = plan_pb2.StateCacheMode.Value(f"STATE_CACHE_MODE_{ranks.state_cache_mode}")
        spec = plan_pb2.LayerSpec(block_size_tokens=ranks.block_size_tokens)
        spec.mamba.mamba_type = self.mamba_type
        spec.mamba.state_cache_mode = mode
        conv, state = (self.conv_kernel - 1, channels // size), (self.state_shape[0] // size, *self.state_shape[1:])
        spec.mamba.states.add(shape=conv, dtype=_dtype(ranks.model_dtype))
        spec.mamba.states.add(shape=state, dtype=_dtype(self.state_dtype or ranks.model_dtype))
        return spec

    def _replicated_groups(self, size: int) -> int:
        """Groups added so that each shard of heads has those it needs."""
        return max(0, size - self.num_groups) if self.num_groups and self.num_groups % size else 0


def _geometry(heads: int, elems: int, dtype: str, ranks: Ranks) -> plan_pb2.LayerSpec:
    return plan_pb2.LayerSpec(
        block_size_tokens=ranks.block_size_tokens,
        geometry=plan_pb2.AttentionGeometry(num_kv_heads=heads, head_size_elems=elems, dtype=_dtype(dtype)),
    )


def _dtype(name: str) -> plan_pb2.Dtype.ValueType:
    return plan_pb2.Dtype.Value(f"DTYPE_{name}")
