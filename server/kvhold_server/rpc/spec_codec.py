"""Layer specs on the wire.

A layer kind is one arm of LayerSpec.kind, one file in domain/kinds, and one line in KIND_CODECS. Fields of arms have
the names of the domain's fields, so that a codec only says what differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Any

from kvhold.v1 import plan_pb2 as pb
from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.kinds import (
    ChunkedLocalSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    DraftSlidingWindowSpec,
    EncoderOnlySpec,
    FullSpec,
    HiddenStateSpec,
    HisparseHotSpec,
    HisparseResidentSpec,
    KpoolTailSpec,
    MambaSpec,
    MlaSpec,
    RswaSpec,
    SinkFullSpec,
    SlidingWindowMlaSpec,
    SlidingWindowSpec,
)
from kvhold_server.domain.kinds.attention import AttentionSpec
from kvhold_server.domain.kinds.mamba import StateArray
from kvhold_server.domain.layer_spec import LayerSpec
from kvhold_server.rpc.wire_values import (
    DTYPES_BY_NUMBER,
    ENUM_FIELDS,
    MAX_PAGE_BYTES,
    MAX_STATE_ARRAYS,
    MAX_STATE_DIMENSIONS,
    at_least,
    from_table,
    positive,
    text,
    wire,
)

_MAY_BE_ZERO = frozenset(
    {"extra_retained_tokens", "num_speculative_blocks", "num_prefill_checkpoint_blocks", "sink_len_tokens"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCodec:
    """How one arm of LayerSpec.kind maps to a domain kind."""

    spec: type[LayerSpec]
    renamed: Mapping[str, str] = field(
        default_factory=dict
    )  # field of the arm → field of the domain, where they differ

    @property
    def has_geometry(self) -> bool:
        """Attention kinds carry AttentionGeometry."""
        return issubclass(self.spec, AttentionSpec)


_ROW_PAGE = {"page_size_bytes": "row_page_size_bytes"}

KIND_CODECS: Mapping[str, KindCodec] = {
    "full_attention": KindCodec(spec=FullSpec),
    "mla_attention": KindCodec(spec=MlaSpec),
    "hidden_state": KindCodec(spec=HiddenStateSpec),
    "rswa": KindCodec(spec=RswaSpec),
    "sink_full": KindCodec(spec=SinkFullSpec),
    "sliding_window": KindCodec(spec=SlidingWindowSpec),
    "sliding_window_mla": KindCodec(spec=SlidingWindowMlaSpec),
    "draft_sliding_window": KindCodec(spec=DraftSlidingWindowSpec),
    "kpool_tail": KindCodec(spec=KpoolTailSpec),
    "circular_buffer": KindCodec(spec=CircularBufferSpec),
    "chunked_local": KindCodec(spec=ChunkedLocalSpec),
    "mamba": KindCodec(spec=MambaSpec),
    "cross_attention": KindCodec(spec=CrossAttentionSpec),
    "encoder_only": KindCodec(spec=EncoderOnlySpec),
    "hisparse_hot": KindCodec(spec=HisparseHotSpec, renamed=_ROW_PAGE),
    "hisparse_resident": KindCodec(spec=HisparseResidentSpec, renamed=_ROW_PAGE),
}

REQUEST_KINDS: tuple[str, ...] = tuple(kind for kind, codec in KIND_CODECS.items() if not codec.spec.planner_made)


def decode_layer_spec(message: pb.LayerSpec, path: str) -> LayerSpec:
    """The domain's spec. Raises InvalidField naming the field below `path`."""
    kind = message.WhichOneof("kind")
    if kind is None or kind not in REQUEST_KINDS:
        raise InvalidField(
            field=f"{path}.kind", value=kind or "unset", constraint=f"must be one of {', '.join(REQUEST_KINDS)}"
        )
    codec = KIND_CODECS[kind]
    values = _decode_arm(getattr(message, kind), codec, f"{path}.{kind}")
    values["block_size_tokens"] = positive(message.block_size_tokens, f"{path}.block_size_tokens")
    if message.HasField("dcp_sharded"):
        values["dcp_sharded"] = message.dcp_sharded
    if message.HasField("block_stride_alignment_bytes"):
        where = f"{path}.block_stride_alignment_bytes"
        values["block_stride_alignment_bytes"] = positive(message.block_stride_alignment_bytes, where)
    if message.HasField("geometry") != codec.has_geometry:
        rule = "is required for attention kinds and not allowed for others"
        raise InvalidField(
            field=f"{path}.geometry", value="set" if not codec.has_geometry else "unset", constraint=rule
        )
    if codec.has_geometry:
        values |= _decode_geometry(message.geometry, f"{path}.geometry", codec)
    spec = codec.spec(**values)
    if not 1 <= spec.page_size_bytes <= MAX_PAGE_BYTES:
        raise InvalidField(
            field=path,
            value=f"page of {spec.page_size_bytes} bytes",
            constraint=f"a page has 1..{MAX_PAGE_BYTES} bytes",
        )
    return spec


def _decode_arm(arm: Any, codec: KindCodec, path: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for descriptor in arm.DESCRIPTOR.fields:
        name = descriptor.name
        where, target = f"{path}.{name}", codec.renamed.get(name, name)
        if name == "states":
            values[name] = _decode_states(arm.states, where)
        elif not descriptor.has_presence or arm.HasField(name):
            values[target] = _decode_scalar(getattr(arm, name), descriptor, where)
    return values


def _decode_scalar(value: Any, descriptor: Any, path: str) -> Any:
    if descriptor.name in ENUM_FIELDS:
        return from_table(ENUM_FIELDS[descriptor.name], value, path)
    if isinstance(value, str):
        return text(value, path)
    if isinstance(value, bool):
        return value
    return at_least(value, 0 if descriptor.name in _MAY_BE_ZERO else 1, path)


def _decode_states(states: Sequence[pb.StateArray], path: str) -> tuple[StateArray, ...]:
    if not 1 <= len(states) <= MAX_STATE_ARRAYS:
        raise InvalidField(field=path, value=len(states), constraint=f"must have 1..{MAX_STATE_ARRAYS} arrays")
    arrays = []
    for index, state in enumerate(states):
        where = f"{path}[{index}]"
        if not 1 <= len(state.shape) <= MAX_STATE_DIMENSIONS:
            rule = f"must have 1..{MAX_STATE_DIMENSIONS} extents"
            raise InvalidField(field=f"{where}.shape", value=len(state.shape), constraint=rule)
        shape = tuple(positive(extent, f"{where}.shape") for extent in state.shape)
        arrays.append(StateArray(shape=shape, dtype=from_table(DTYPES_BY_NUMBER, state.dtype, f"{where}.dtype")))
    return tuple(arrays)


def _decode_geometry(message: pb.AttentionGeometry, path: str, codec: KindCodec) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_kv_heads": positive(message.num_kv_heads, f"{path}.num_kv_heads"),
        "head_size_elems": positive(message.head_size_elems, f"{path}.head_size_elems"),
        "dtype": from_table(DTYPES_BY_NUMBER, message.dtype, f"{path}.dtype"),
        "kv_quant_mode": text(message.kv_quant_mode, f"{path}.kv_quant_mode"),
        "tokens_per_state": _ratio(message, path),
    }
    if message.HasField("head_size_v_elems"):
        values["head_size_v_elems"] = at_least(message.head_size_v_elems, 0, f"{path}.head_size_v_elems")
    elif not issubclass(codec.spec, (MlaSpec, SlidingWindowMlaSpec)):
        values["head_size_v_elems"] = message.head_size_elems
    for name in ("page_size_padded_bytes", "num_head_slots", "state_content_bytes", "max_tp_shards"):
        if message.HasField(name):
            values[name] = positive(getattr(message, name), f"{path}.{name}")
    return values


def _ratio(message: pb.AttentionGeometry, path: str) -> int | Fraction:
    numerator = at_least(message.tokens_per_state_num, 0, f"{path}.tokens_per_state_num") or 1
    denominator = at_least(message.tokens_per_state_den, 0, f"{path}.tokens_per_state_den") or 1
    ratio = Fraction(numerator, denominator)
    return ratio.numerator if ratio.denominator == 1 else ratio


def encode_layer_spec(spec: LayerSpec, message: pb.LayerSpec) -> None:
    """Writes a spec of any kind, planner-made ones included."""
    message.block_size_tokens = spec.block_size_tokens
    message.dcp_sharded = spec.dcp_sharded
    if spec.block_stride_alignment_bytes is not None:
        message.block_stride_alignment_bytes = spec.block_stride_alignment_bytes
    codec = KIND_CODECS[spec.kind]
    arm = getattr(message, spec.kind)
    arm.SetInParent()
    for descriptor in arm.DESCRIPTOR.fields:
        value = getattr(spec, codec.renamed.get(descriptor.name, descriptor.name))
        if descriptor.name == "states":
            arm.states.extend(pb.StateArray(shape=state.shape, dtype=wire(state.dtype)) for state in value)
        else:
            _encode_scalar(arm, descriptor.name, value)
    if codec.has_geometry:
        _encode_geometry(spec, message.geometry)


def _encode_scalar(message: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(message, name, wire(value) if isinstance(value, Enum) else value)


def _encode_geometry(spec: LayerSpec, message: pb.AttentionGeometry) -> None:
    ratio = Fraction(spec.state_tokens)
    message.tokens_per_state_num, message.tokens_per_state_den = ratio.numerator, ratio.denominator
    # The padding in force, so that a reader need not know how alignments work.
    _encode_scalar(message, "page_size_padded_bytes", spec.padded_page_size_bytes)
    for name in (
        "num_kv_heads",
        "head_size_elems",
        "head_size_v_elems",
        "dtype",
        "kv_quant_mode",
        "num_head_slots",
        "state_content_bytes",
        "max_tp_shards",
    ):
        _encode_scalar(message, name, getattr(spec, name))
