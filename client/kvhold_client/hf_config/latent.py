"""Families with latent attention (MLA): one row per token for all heads, of kv_lora_rank + qk_rope_head_dim elements.

Where an indexer selects rows, its layers keep a second cache. Layers may follow the selection of an earlier one:
`indexer_types` or `index_topk_pattern` say which do.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvhold_client.hf_config.attention import Layers
from kvhold_client.hf_config.layers import Cache, Indexer, Latent
from kvhold_client.hf_config.reader import ConfigReader


def latent_layers(config: ConfigReader) -> Layers:
    """A row in every layer."""
    return [[_row(config, sparse=False)] for _ in range(config.integer("num_hidden_layers"))]


def selected_layers(config: ConfigReader) -> Layers:
    """A row in every layer, and an indexer's in those that select."""
    count = config.integer("num_hidden_layers")
    config.integer("index_topk")
    indexer = Indexer(head_size_elems=config.integer("index_head_dim"))
    layers: Layers = []
    for selects in _selecting(config, count):
        row: list[Cache] = [_row(config, sparse=True)]
        layers.append([*row, indexer] if selects else row)
    return layers


def _row(config: ConfigReader, *, sparse: bool) -> Latent:
    return Latent(row_elems=config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim"), sparse=sparse)


def _selecting(config: ConfigReader, count: int) -> list[bool]:
    words = config.words("indexer_types", count) or config.words("index_topk_pattern", count)
    if words is not None:
        return [word in ("full", "F") for word in words]
    every = config.integer_or(1, "index_topk_freq") or 1
    offset = config.integer_or(2, "index_skip_topk_offset") or 2
    return [max(layer - offset + 1, 0) % every == 0 for layer in range(count)]


LATENT_FAMILIES: Mapping[str, tuple[Callable[[ConfigReader], Layers], Mapping[str, Any]]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), (latent_layers, {})),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), (selected_layers, {})),
}
