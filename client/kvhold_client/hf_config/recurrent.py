"""Hybrid families: recurrent layers that keep a state per request, between attention layers.

    family      recurrent layer     convolution channels                      state
    qwen3_next, gated delta net     2·key heads·key + value heads·value       [value heads, value, key]
    qwen3_5
    jamba       Mamba-1             expand·hidden                             [expand·hidden, state]
    nemotron_h  Mamba-2             heads·head + 2·groups·state               [heads, head, state]

Every convolution keeps its last kernel − 1 inputs.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvhold_client.hf_config.attention import Layers, attention_layer
from kvhold_client.hf_config.errors import MissingField
from kvhold_client.hf_config.layers import Recurrent
from kvhold_client.hf_config.reader import ConfigReader

DTYPES = {"float32": "FLOAT32", "bfloat16": "BFLOAT16", "float16": "FLOAT16", "auto": ""}


def qwen3_next_layers(config: ConfigReader) -> Layers:
    """Every fourth layer attends to everything, the others are gated delta nets."""
    count = config.integer("num_hidden_layers")
    interval = config.integer_or(4, "full_attention_interval") or 4
    words = config.words("layer_types", count)
    full = [word == "full_attention" for word in words] if words else [not (i + 1) % interval for i in range(count)]
    net = _gated_delta_net(config)
    return [[attention_layer(config, "full_attention") if is_full else net] for is_full in full]


def _gated_delta_net(config: ConfigReader) -> Recurrent:
    key, value = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    num_keys, num_values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    return Recurrent(
        conv_channels=2 * num_keys * key + num_values * value,
        conv_kernel=config.integer("linear_conv_kernel_dim"),
        state_shape=(num_values, value, key),
        state_dtype=_state_dtype(config),
        mamba_type="gdn_attention",
        heads_field="linear_num_value_heads",
        suffix="linear_attn",
    )


def jamba_layers(config: ConfigReader) -> Layers:
    """One attention layer in each period, the others are Mamba-1."""
    period, offset = config.integer("attn_layer_period"), config.get("attn_layer_offset")
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < period:
        raise config.unusable("attn_layer_offset", offset, f"must be 0..{period - 1}")
    channels = config.integer("mamba_expand") * config.integer("hidden_size")
    mamba = Recurrent(
        conv_channels=channels,
        conv_kernel=config.integer("mamba_d_conv"),
        state_shape=(channels, config.integer("mamba_d_state")),
        state_dtype=_state_dtype(config),
        mamba_type="mamba1",
        heads_field="hidden_size",
        suffix="mamba",
    )
    count = config.integer("num_hidden_layers")
    attends = [layer % period == offset for layer in range(count)]
    return [[attention_layer(config, "full_attention") if attention else mamba] for attention in attends]


def nemotron_h_layers(config: ConfigReader) -> Layers:
    """A pattern names each layer: M recurrent, * attention, - and E keep nothing."""
    words = _nemotron_words(config)
    mamba = _mamba2(config)
    layers: Layers = []
    for word in words:
        if word in ("M", "mamba", "linear_attention"):
            layers.append([mamba])
        elif word in ("*", "attention", "full_attention"):
            layers.append([attention_layer(config, "full_attention")])
        elif word in ("-", "E", "mlp", "moe"):
            layers.append([])
        else:
            raise config.unusable("hybrid_override_pattern", word, "must be made of M, *, - and E")
    return layers


def _nemotron_words(config: ConfigReader) -> list[str]:
    for field in ("hybrid_override_pattern", "layers_block_type", "layer_types"):
        value = config.get(field)
        if value is not None:
            return [str(word) for word in value]
    raise MissingField("hybrid_override_pattern", config.model_type)


def _mamba2(config: ConfigReader) -> Recurrent:
    heads, size = config.integer("mamba_num_heads"), config.integer("mamba_head_dim")
    groups, state = config.integer("n_groups", "mamba_n_groups"), config.integer("ssm_state_size", "mamba_d_state")
    return Recurrent(
        conv_channels=heads * size + 2 * groups * state,
        conv_kernel=config.integer("conv_kernel", "mamba_d_conv"),
        state_shape=(heads, size, state),
        state_dtype=_state_dtype(config),
        mamba_type="mamba2",
        heads_field="mamba_num_heads",
        group_elems=2 * state,
        num_groups=groups,
    )


def _state_dtype(config: ConfigReader) -> str:
    """Of the state proper; empty: the model's. Raises UnusableField."""
    for field in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        value = config.get(field)
        if value is not None:
            if value not in DTYPES:
                raise config.unusable(field, value, f"must be one of {', '.join(DTYPES)}")
            return DTYPES[value]
    return ""


RECURRENT_FAMILIES: Mapping[str, tuple[Callable[[ConfigReader], Layers], Mapping[str, Any]]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), (qwen3_next_layers, {"head_dim": 256})),
    "jamba": (jamba_layers, {}),
    "nemotron_h": (nemotron_h_layers, {}),
}
