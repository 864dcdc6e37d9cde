"""Real models, as plan requests: what their layers keep. Numbers are those of the published model configurations.

A model here is its attention geometry only: how many layers of which kind, heads, head size. Everything about memory
and lengths is asked for by the caller.
"""

from dataclasses import dataclass

from kvhold.v1 import plan_pb2

GIB = 1 << 30
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Layers of one model: every `full_every`-th layer attends to everything, the others to a window."""

    name: str
    title: str
    num_layers: int
    num_kv_heads: int
    head_size_elems: int
    dtype: str = "BFLOAT16"
    sliding_window_tokens: int = 0  # 0: every layer is a full one
    full_every: int = 1
    max_model_len_tokens: int = 131_072

    def layer_is_full(self, layer: int) -> bool:
        """Does this layer attend to everything?"""
        return not self.sliding_window_tokens or layer % self.full_every == self.full_every - 1


MODELS = {
    model.name: model
    for model in (
        ModelSpec(name="llama-3.1-8b", title="Llama-3.1-8B", num_layers=32, num_kv_heads=8, head_size_elems=128),
        ModelSpec(
            name="gemma-3-27b",
            title="Gemma-3-27B",
            num_layers=62,
            num_kv_heads=16,
            head_size_elems=128,
            sliding_window_tokens=1024,
            full_every=6,
        ),
    )
}


def model_plan_request(
    name: str,
    *,
    memory_bytes: int,
    block_size_tokens: int = 16,
    max_model_len_tokens: int = 0,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    layout: str = "LBNHC",
    strategy: str = "MODERN",
    num_ranks: int = 1,
    auto_fit: bool = False,
) -> plan_pb2.PlanRequest:
    """The plan request of a known model with `memory_bytes` for the cache on each rank.

    `num_ranks` is the tensor-parallel size: heads are split over the ranks, at least one on each. `auto_fit` reduces
    the length to what fits. Raises KeyError for an unknown name and ValueError for an unknown layout or strategy, or
    for heads that cannot be split so.
    """
    model = MODELS[name]
    heads = model.num_kv_heads
    if num_ranks < 1 or (heads % num_ranks and num_ranks % heads):
        raise ValueError(f"{name} has {heads} heads: they cannot be split over {num_ranks} ranks")
    request = plan_pb2.PlanRequest(
        config=plan_pb2.PlannerConfig(
            strategy=plan_pb2.Strategy.Value(f"STRATEGY_{strategy.upper()}"),
            layout=plan_pb2.Layout.Value(f"LAYOUT_{layout.upper()}"),
            max_model_len_tokens=max_model_len_tokens or model.max_model_len_tokens,
            auto_fit_max_model_len=auto_fit,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            cache_block_size_tokens=block_size_tokens,
            enable_prefix_caching=True,
        )
    )
    full = _layer_spec(model, block_size_tokens, num_ranks)
    full.full_attention.SetInParent()
    request.layer_specs.append(full)
    if model.sliding_window_tokens:
        local = _layer_spec(model, block_size_tokens, num_ranks)
        local.sliding_window.sliding_window_tokens = model.sliding_window_tokens
        request.layer_specs.append(local)
    first = request.ranks.add(available_memory_bytes=memory_bytes)
    for layer in range(model.num_layers):
        spec = 0 if model.layer_is_full(layer) else 1
        first.layers.add(layer_name=f"layers.{layer}.attn", layer_spec_index=spec)
    for _ in range(1, num_ranks):
        request.ranks.add(available_memory_bytes=memory_bytes, layers_of_rank=0)
    return request


def _layer_spec(model: ModelSpec, block_size_tokens: int, num_ranks: int) -> plan_pb2.LayerSpec:
    return plan_pb2.LayerSpec(
        block_size_tokens=block_size_tokens,
        geometry=plan_pb2.AttentionGeometry(
            num_kv_heads=max(1, model.num_kv_heads // num_ranks),
            head_size_elems=model.head_size_elems,
            dtype=plan_pb2.Dtype.Value(f"DTYPE_{model.dtype}"),
        ),
    )
