"""Families whose layers keep keys and values, in full or of a window or chunk.

`layer_types` decides where it is there. Otherwise each family has its rule for which layers are local.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvhold_client.hf_config.layers import Attention, Cache
from kvhold_client.hf_config.reader import ConfigReader

Layers = list[list[Cache]]
IsLocal = Callable[[ConfigReader, int], bool]

FULL_WORDS = frozenset({"full_attention", "attention", "global_attention", "global"})
WINDOW_WORDS = frozenset({"sliding_attention", "sliding_window_attention", "local_attention"})
CHUNK_WORDS = frozenset({"chunked_attention"})


def head_size(config: ConfigReader) -> int:
    """head_dim, or the hidden size divided by the heads. Raises MissingField, UnusableField."""
    given = config.integer_or(None, "head_dim", "attention_head_dim", "kv_channels")
    if given is not None:
        return given
    hidden, heads = config.integer("hidden_size", "n_embd"), config.integer("num_attention_heads", "n_head")
    if hidden % heads:
        raise config.unusable("hidden_size", hidden, f"must be divisible by num_attention_heads {heads}")
    return hidden // heads


def kv_heads(config: ConfigReader) -> int:
    """num_key_value_heads, or as many as attention heads where it is absent. Raises MissingField."""
    given = config.integer_or(None, "num_key_value_heads", "multi_query_group_num", "num_kv_heads")
    return config.integer("num_attention_heads", "n_head") if given is None else given


def window_of(config: ConfigReader) -> int:
    """The window; 0 where there is none, or none shorter than the longest request."""
    window = config.integer_or(0, "sliding_window") or 0
    longest = config.integer_or(None, "max_position_embeddings")
    return 0 if longest is not None and window >= longest else window


def all_local(config: ConfigReader, layer: int) -> bool:
    """A window, where there is one, is every layer's."""
    return True


def switched_window(config: ConfigReader, layer: int) -> bool:
    """A window only if use_sliding_window says so, from max_window_layers on."""
    return bool(config.get("use_sliding_window")) and layer >= (config.integer_or(0, "max_window_layers") or 0)


def every_nth_full(field: str, default: int) -> IsLocal:
    """Every n-th layer, counted from 1, attends to everything."""

    def is_local(config: ConfigReader, layer: int) -> bool:
        return bool((layer + 1) % (config.integer_or(default, field) or default))

    return is_local


def never_local(config: ConfigReader, layer: int) -> bool:
    """No windows, whatever the file says."""
    return False


def attention_layers(is_local: IsLocal) -> Callable[[ConfigReader], Layers]:
    """The rule of a family: keys and values in every layer, local in those that `is_local` names."""

    def layers(config: ConfigReader) -> Layers:
        count = config.integer("num_hidden_layers", "num_layers", "n_layer")
        words = config.words("layer_types", count)
        return [[attention_layer(config, _word(config, is_local, words, layer))] for layer in range(count)]

    return layers


def _word(config: ConfigReader, is_local: IsLocal, words: list[str] | None, layer: int) -> str:
    if words is not None:
        return words[layer]
    local = is_local(config, layer) and window_of(config) > 0
    return "sliding_attention" if local else "full_attention"


def attention_layer(config: ConfigReader, word: str) -> Attention:
    """The layer that an entry of layer_types means. Raises MissingField, UnusableField."""
    heads, size = kv_heads(config), head_size(config)
    if word in FULL_WORDS:
        return Attention(num_kv_heads=heads, head_size_elems=size)
    if word in WINDOW_WORDS:
        config.integer("sliding_window")
        return Attention(num_kv_heads=heads, head_size_elems=size, window_tokens=window_of(config))
    if word in CHUNK_WORDS:
        chunk = config.integer("attention_chunk_size")
        return Attention(num_kv_heads=heads, head_size_elems=size, chunk_tokens=chunk)
    raise config.unusable("layer_types", word, "this kind of layer is not known here")


def llama4_layers(config: ConfigReader) -> Layers:
    """Layers with rotary positions attend inside chunks; every fourth has none and attends to everything."""
    count = config.integer("num_hidden_layers")
    words = config.words("layer_types", count)
    if words is None:
        rotary = config.get("no_rope_layers") or None
        interval = config.integer_or(4, "no_rope_layer_interval") or 4
        if rotary is not None and (not isinstance(rotary, list) or len(rotary) < count):
            raise config.unusable("no_rope_layers", rotary, f"must have an entry for each of {count} layers")
        local = [bool(rotary[i]) if rotary else bool((i + 1) % interval) for i in range(count)]
        words = ["chunked_attention" if each else "full_attention" for each in local]
    return [[attention_layer(config, word)] for word in words]


ATTENTION_FAMILIES: Mapping[str, tuple[Callable[[ConfigReader], Layers], Mapping[str, Any]]] = {
    # Every layer in full, or, if the file has a window, in that window.
    **dict.fromkeys(("llama", "mistral", "mixtral", "ministral", "ministral3"), (attention_layers(all_local), {})),
    **dict.fromkeys(("phi", "phi3", "phi4", "phimoe"), (attention_layers(all_local), {})),
    **dict.fromkeys(("olmo", "olmo2", "olmoe"), (attention_layers(never_local), {})),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "glm4v_text", "chatglm"), (attention_layers(never_local), {})),
    # A window that a switch turns on.
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3_moe"), (attention_layers(switched_window), {})),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), (attention_layers(switched_window), {})),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), (attention_layers(never_local), {"head_dim": 128})),
    "qwen3": (attention_layers(switched_window), {"head_dim": 128}),
    # Windows in turn with full layers.
    "gemma2": (
        attention_layers(every_nth_full("sliding_window_pattern", 2)),
        {"head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 8192},
    ),
    "gemma3_text": (
        attention_layers(every_nth_full("sliding_window_pattern", 6)),
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "max_position_embeddings": 131_072,
        },
    ),
    "gpt_oss": (
        attention_layers(every_nth_full("sliding_window_pattern", 2)),
        {"sliding_window": 128, "head_dim": 64},
    ),
    "olmo3": (attention_layers(every_nth_full("sliding_window_pattern", 4)), {"sliding_window": 4096}),
    "llama4_text": (llama4_layers, {"attention_chunk_size": 8192, "head_dim": 128, "num_key_value_heads": 8}),
}
