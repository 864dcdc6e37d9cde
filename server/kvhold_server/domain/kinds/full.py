"""Full attention: every token of a request stays cached."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.attention import (
    GEOMETRY_FIELDS,
    AttentionSpec,
    any_set,
    different_field,
    outside_family,
)
from kvhold_server.domain.layer_spec import Family, LayerSpec, Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSpec(AttentionSpec):
    """`sliding_window_tokens` and `attention_chunk_size_tokens` are set where a local layer is allocated in full."""

    kind: ClassVar[str] = "full_attention"
    family: ClassVar[Family] = Family.ATTENTION | Family.FULL

    sliding_window_tokens: int | None = None
    attention_chunk_size_tokens: int | None = None
    non_causal: bool = False

    @property
    def window_tokens(self) -> int | None:
        """Of a local layer that is allocated in full."""
        return self.sliding_window_tokens

    def uniform_with(self, other: LayerSpec) -> bool:
        """Any full layer, whatever its heads or window."""
        return bool(other.family & Family.FULL)

    def merge(self, others: Sequence[LayerSpec]) -> LayerSpec | Mismatch:
        """Equal geometry; at most one window and one chunk, which layers without one adopt."""
        return merge_full(self, others)


def merge_full(first: FullSpec, others: Sequence[LayerSpec]) -> FullSpec | Mismatch:
    """The rule of full attention. The result has the kind and the own fields of `first`.

    Two different windows are a conflict, found before fields are compared; window beside chunk is a mere mismatch.
    """
    specs = distinct([first, *others])
    stranger = outside_family(specs, Family.FULL, excluded=Family.MLA)
    if stranger is not None:
        return stranger
    window = single_value(specs, "sliding_window_tokens")
    if isinstance(window, Mismatch):
        return window
    chunk = single_value(specs, "attention_chunk_size_tokens")
    if isinstance(chunk, Mismatch):
        return chunk
    different = different_field(specs, GEOMETRY_FIELDS)
    if different is not None:
        return different
    if window is not None and chunk is not None:
        return Mismatch(field="attention_chunk_size_tokens", first=window, second=chunk)
    return dataclasses.replace(
        first,
        sliding_window_tokens=window,
        attention_chunk_size_tokens=chunk,
        non_causal=any_set(specs, "non_causal"),
    )


def single_value(specs: Sequence[LayerSpec], field: str) -> int | Mismatch | None:
    """The one value that is set, None if none is, or the conflict."""
    values = list(dict.fromkeys(value for spec in specs if (value := getattr(spec, field)) is not None))
    if len(values) > 1:
        return Mismatch(field=field, first=values[0], second=values[1], conflict=True)
    return values[0] if values else None


def distinct(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Without repeated objects, order kept: large models have few different ones."""
    return list({id(spec): spec for spec in specs}.values())
