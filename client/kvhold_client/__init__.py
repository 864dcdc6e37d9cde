"""Client of the kvhold daemon: what programs import.

    Client, AsyncClient      connect, plan, open pools and sessions, map memory
    SequenceTable            a scheduler's mirror of its block tables
    PrefixHasher             digests of token blocks, equal to the engines'
    errors                   KvholdError and its tree

Names are loaded when they are first used (PEP 562): the command line starts without gRPC, and importing the package
costs nothing. What exists is declared in `__init__.pyi`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "aio",
    "Client": "client",
    "ItemStatus": "results",
    "KvholdError": "errors",
    "LocalDaemon": "local_daemon",
    "Plan": "plan",
    "Pool": "client",
    "PoolCounts": "results",
    "PoolRequest": "pools",
    "PrefixHasher": "hashing",
    "Sequence": "sequence",
    "SequenceTable": "sequence_table",
    "Session": "session",
    "SessionFenced": "errors",
    "StepOutcome": "step_outcome",
    "Unreachable": "errors",
    "model_plan_request": "models",
    "plan_request_from_hf_config": "hf_config",
    "read_hf_config": "hf_config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
