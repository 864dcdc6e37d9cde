"""Plan requests from a model's own config.json, as Hugging Face repositories have it.

    config = read_hf_config("config.json")
    request = plan_request_from_hf_config(config, memory_bytes=60 << 30, tensor_parallel_size=8, dtype="fp8")

A family is a line in a table (`attention`, `latent`, `recurrent`): which fields say what each hidden layer keeps. A
family that is not known, and a field that is missing, are errors that name them.
"""

from kvhold_client.hf_config.errors import HfConfigError, MissingField, UnknownModelType, UnusableField
from kvhold_client.hf_config.reader import read_hf_config
from kvhold_client.hf_config.request import (
    CACHE_DTYPES,
    KNOWN_MODEL_TYPES,
    STATE_CACHE_MODES,
    plan_request_from_hf_config,
)

__all__ = [
    "CACHE_DTYPES",
    "KNOWN_MODEL_TYPES",
    "STATE_CACHE_MODES",
    "HfConfigError",
    "MissingField",
    "UnknownModelType",
    "UnusableField",
    "plan_request_from_hf_config",
    "read_hf_config",
]
