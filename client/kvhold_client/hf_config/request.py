"""From config.json to a plan request: the family's layers, divided over pipeline stages and tensor-parallel ranks.

    config.json ──family──▶ caches of each hidden layer ──stage──▶ ranks of a stage ──share──▶ layer specs

Ranks are numbered stage by stage. Hidden layers are divided evenly, what remains going to the stages before the last,
which has the output layer besides.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvhold.v1 import plan_pb2
from kvhold_client.hf_config.attention import ATTENTION_FAMILIES, Layers
from kvhold_client.hf_config.errors import MissingField, UnknownModelType, UnusableField
from kvhold_client.hf_config.latent import LATENT_FAMILIES
from kvhold_client.hf_config.layers import Ranks
from kvhold_client.hf_config.reader import ConfigReader
from kvhold_client.hf_config.recurrent import RECURRENT_FAMILIES

FAMILIES = {**ATTENTION_FAMILIES, **LATENT_FAMILIES, **RECURRENT_FAMILIES}
KNOWN_MODEL_TYPES = tuple(sorted(FAMILIES))
MODEL_DTYPES = {"bfloat16": "BFLOAT16", "float16": "FLOAT16", "float32": "FLOAT32"}
CACHE_DTYPES = {**MODEL_DTYPES, "fp8": "FLOAT8_E4M3FN", "fp8_e4m3": "FLOAT8_E4M3FN", "fp8_e5m2": "FLOAT8_E5M2"}
STATE_CACHE_MODES = ("none", "align", "all")
TEXT_PARTS = ("text_config", "language_config", "llm_config")


def plan_request_from_hf_config(
    config: Mapping[str, Any],
    *,
    memory_bytes: int,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    dtype: str = "auto",
    block_size_tokens: int = 16,
    max_model_len_tokens: int = 0,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    layout: str = "LBNHC",
    strategy: str = "MODERN",
    state_cache_mode: str = "none",
    auto_fit: bool = False,
) -> plan_pb2.PlanRequest:
    """The plan request of a model from the fields of its config.json, with `memory_bytes` for the cache on each rank.

    `dtype` is that of keys and values (`CACHE_DTYPES`); "auto" is the model's. A length of 0 is the model's own.
    Raises HfConfigError (a ValueError) that names the field which is missing or does not fit, and ValueError for an
    unknown layout, strategy, dtype or mode.
    """
    reader, layers = hf_layers(config)
    ranks = Ranks(
        tensor_parallel_size=_positive(tensor_parallel_size, "tensor_parallel_size"),
        cache_dtype=_cache_dtype(reader, dtype),
        model_dtype=_model_dtype(reader),
        block_size_tokens=block_size_tokens,
        state_cache_mode=_state_mode(state_cache_mode),
    )
    length = max_model_len_tokens or reader.integer("max_position_embeddings", "seq_length", "n_positions")
    request = plan_pb2.PlanRequest(
        config=plan_pb2.PlannerConfig(
            strategy=plan_pb2.Strategy.Value(f"STRATEGY_{strategy.upper()}"),
            layout=plan_pb2.Layout.Value(f"LAYOUT_{layout.upper()}"),
            max_model_len_tokens=length,
            auto_fit_max_model_len=auto_fit,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            cache_block_size_tokens=block_size_tokens,
            enable_prefix_caching=True,
            state_cache_mode=plan_pb2.StateCacheMode.Value(f"STATE_CACHE_MODE_{ranks.state_cache_mode}"),
            pipeline_parallel_size=pipeline_parallel_size,
            total_hidden_layers=len(layers),
            model_type=reader.model_type,
        ),
        fold_identical_ranks=True,
    )
    lengths = stage_lengths(len(layers), _positive(pipeline_parallel_size, "pipeline_parallel_size"))
    _add_ranks(request, reader, layers, lengths, ranks, memory_bytes)
    return request


def hf_layers(config: Mapping[str, Any]) -> tuple[ConfigReader, Layers]:
    """The text model's fields, and what each of its hidden layers keeps. Raises HfConfigError."""
    reader = _text_reader(config)
    rule, defaults = FAMILIES[reader.model_type]
    reader = reader.with_defaults(defaults)
    return reader, rule(reader)


def _text_reader(config: Mapping[str, Any]) -> ConfigReader:
    """The fields that describe the language model, which multimodal files keep in a part of their own."""
    model_type = str(config.get("model_type") or "")
    if model_type in FAMILIES:
        return ConfigReader(config, model_type)
    for part in TEXT_PARTS:
        inner = config.get(part)
        if isinstance(inner, Mapping):
            inner_type = str(inner.get("model_type") or "")
            for candidate in (inner_type, f"{model_type}_text"):
                if candidate in FAMILIES:
                    return ConfigReader({**config, **inner}, candidate)
    if not model_type:
        raise MissingField("model_type", "config.json")
    raise UnknownModelType(model_type, KNOWN_MODEL_TYPES)


def stage_lengths(num_layers: int, num_stages: int) -> list[int]:
    """Hidden layers per pipeline stage."""
    quotient, remainder = divmod(num_layers, num_stages)
    return [quotient + (2 <= num_stages - stage <= remainder + 1) for stage in range(num_stages)]


def _add_ranks(
    request: plan_pb2.PlanRequest,
    reader: ConfigReader,
    layers: Layers,
    lengths: Sequence[int],
    ranks: Ranks,
    memory_bytes: int,
) -> None:
    positions: dict[bytes, int] = {}
    start = 0
    for stage, length in enumerate(lengths):
        first = len(request.ranks)
        rank = request.ranks.add(available_memory_bytes=memory_bytes)
        for number in range(start, start + length):
            for cache in layers[number]:
                spec = cache.spec(ranks, reader.model_type)
                key = spec.SerializeToString(deterministic=True)
                if positions.setdefault(key, len(positions)) == len(request.layer_specs):
                    request.layer_specs.append(spec)
                name = f"model.layers.{number}.{cache.suffix}"
                rank.layers.add(layer_name=name, layer_spec_index=positions[key])
        if not rank.layers:
            rule = f"stage {stage} of {len(lengths)} has no layer that keeps anything: use fewer pipeline stages"
            raise UnusableField("num_hidden_layers", len(layers), rule, reader.model_type)
        for _ in range(1, ranks.tensor_parallel_size):
            request.ranks.add(available_memory_bytes=memory_bytes, layers_of_rank=first)
        start += length


def _model_dtype(reader: ConfigReader) -> str:
    """torch_dtype, or dtype in newer files; bfloat16 where neither is there."""
    for field in ("torch_dtype", "dtype"):
        value = reader.get(field)
        if value is not None:
            name = str(value).removeprefix("torch.")
            if name not in MODEL_DTYPES:
                raise reader.unusable(field, value, f"must be one of {', '.join(MODEL_DTYPES)}")
            return MODEL_DTYPES[name]
    return "BFLOAT16"


def _cache_dtype(reader: ConfigReader, dtype: str) -> str:
    if dtype == "auto":
        return _model_dtype(reader)
    if dtype not in CACHE_DTYPES:
        raise ValueError(f"dtype {dtype!r}: must be auto or one of {', '.join(CACHE_DTYPES)}")
    return CACHE_DTYPES[dtype]


def _state_mode(mode: str) -> str:
    if mode not in STATE_CACHE_MODES:
        raise ValueError(f"state_cache_mode {mode!r}: must be one of {', '.join(STATE_CACHE_MODES)}")
    return mode.upper()


def _positive(value: int, name: str) -> int:
    if value < 1:
        raise ValueError(f"{name} {value}: must be at least 1")
    return value
