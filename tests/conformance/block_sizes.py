"""Checks how the planner chooses the scheduler's block and the hash unit, for recorded groups."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.errors import InvalidRequest
from kvhold_server.domain.kinds import KINDS
from kvhold_server.domain.kinds.mamba import StateArray
from kvhold_server.domain.layer_spec import LayerSpec, StateCacheMode
from kvhold_server.planner.block_sizes import resolve_block_sizes

Row = dict[str, Any]
POINTLESS_UNIT = "0.32 refuses a match unit that a single group makes pointless; ours ignores it, as 0.31 does"

_ATTENTION = {"num_kv_heads": 1, "head_size_elems": 64, "head_size_v_elems": 0, "dtype": Dtype.BFLOAT16}
_STATE = {"states": (StateArray(shape=(64,), dtype=Dtype.BFLOAT16),)}
_KINDS = {kind.kind: kind for kind in KINDS}
_SHAPES: dict[str, dict[str, Any]] = {
    "full_attention": _ATTENTION,
    "mla_attention": _ATTENTION,
    "sliding_window": _ATTENTION | {"sliding_window_tokens": 128},
    "chunked_local": _ATTENTION | {"attention_chunk_size_tokens": 128},
    "circular_buffer": _ATTENTION,
    "kpool_tail": _ATTENTION | {"sliding_window_tokens": 128},
    "cross_attention": _ATTENTION,
    "mamba": _STATE,
}


def spec_of(group: Row) -> LayerSpec:
    """A spec of the group's kind; nothing but kind, block, mode and compression matters here."""
    values = {"block_size_tokens": group["block_size"], **_SHAPES[group["kind"]]}
    if "mode" in group:
        values["state_cache_mode"] = StateCacheMode(group["mode"])
    if "tokens_per_state" in group:
        ratio = Fraction(group["tokens_per_state"])
        values["tokens_per_state"] = int(ratio) if ratio.denominator == 1 else ratio
    return _KINDS[group["kind"]](**values)


def deviates(row: Row) -> bool:
    """Is this one of the rows in which ours is more lenient on purpose?"""
    return "error" in row and len(row["groups"]) == 1 and row["oracle"] == "vllm_0.32.0"


def check_resolve_block_sizes(row: Row) -> Iterator[str]:
    """The two sizes, or a refusal where one was recorded."""
    config = row["config"]
    try:
        ours = resolve_block_sizes(
            [spec_of(group) for group in row["groups"]],
            cache_block_size_tokens=config["block_size"],
            context_parallel_size=config["decode_context_parallel_size"],
            needs_hashes=config["enable_prefix_caching"] or config["kv_connector"],
            prefix_match_unit_tokens=config["prefix_match_unit"],
        )
    except InvalidRequest as refusal:
        if "error" not in row:
            yield f"refused: {refusal}"
        return
    if deviates(row):
        yield from _compare("(scheduler, hash)", ours, (config["block_size"], config["block_size"]))
    elif "error" in row:
        yield f"{ours} instead of a refusal"
    else:
        yield from _compare("(scheduler, hash)", ours, (row["scheduler_block_size"], row["hash_block_size"]))


def _compare(what: str, ours: Any, recorded: tuple[int, int]) -> Iterator[str]:
    if (ours.scheduler_tokens, ours.hash_tokens) != recorded:
        yield f"{what}: {(ours.scheduler_tokens, ours.hash_tokens)} instead of {recorded}"
