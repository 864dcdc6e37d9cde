"""Recurrent state (Mamba, linear attention, short convolution): its page depends on shapes, never on the block size."""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.kinds.errors import PaddedPageTooSmall
from kvhold_server.domain.kinds.sliding_window import same
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, StateCacheMode, cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class StateArray:
    """One array of a state."""

    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(LayerSpec):
    """How many states a request holds is decided by the engine's cache mode; a layer's own decides hash units."""

    kind: ClassVar[str] = "mamba"
    family: ClassVar[Family] = Family.STATE

    states: tuple[StateArray, ...]
    page_size_padded_bytes: int | None = None
    mamba_type: str = ""
    state_cache_mode: StateCacheMode = StateCacheMode.NONE
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment_tokens: int | None = None
    tp_replicated: bool = False

    @property
    def num_heads(self) -> int:
        """A state has no head axis."""
        return 1

    @property
    def num_states(self) -> int:
        """One per block."""
        return 1

    @property
    def content_size_bytes(self) -> int:
        """All arrays, one after another."""
        return sum(state.size_bytes for state in self.states)

    @property
    def padded_page_size_bytes(self) -> int | None:
        """The padding asked for."""
        return self.page_size_padded_bytes

    @property
    def own_state_mode(self) -> StateCacheMode | None:
        """As given."""
        return self.state_cache_mode

    @property
    def needs_zeroing(self) -> bool:
        """A new state must start from zero."""
        return True

    def check(self, layer_name: str, limits: Limits) -> None:
        """Raises PaddedPageTooSmall."""
        padded = self.page_size_padded_bytes
        if padded is not None and padded < self.content_size_bytes:
            raise PaddedPageTooSmall(layer_name=layer_name, padded_bytes=padded, unpadded_bytes=self.content_size_bytes)

    def max_request_blocks(self, limits: Limits) -> int:
        """The running state, those of drafts, and those that stay as prefixes."""
        if limits.state_cache_mode is StateCacheMode.ALL:
            return cdiv(limits.max_model_len_tokens, self.block_size_tokens) + self.num_speculative_blocks
        if limits.state_cache_mode is StateCacheMode.ALIGN:
            return 2 + self.num_speculative_blocks + self.num_prefill_checkpoint_blocks
        return 1 + self.num_speculative_blocks

    def min_request_blocks(self, limits: Limits) -> int:
        """A one-token request has its states, too."""
        return self.max_request_blocks(limits.with_len(1))

    def table_row_blocks(self, limits: Limits, num_tokens: int) -> int:
        """Aligned states sit at their token's position in the row."""
        if limits.state_cache_mode is StateCacheMode.ALIGN:
            return cdiv(num_tokens, self.block_size_tokens) + self.num_speculative_blocks
        return self.max_request_blocks(limits)

    def uniform_with(self, other: LayerSpec) -> bool:
        """States of the same page and the same number per request; shapes may differ."""
        return bool(other.family & Family.STATE) and all(
            same(self, other, field)
            for field in (
                "num_speculative_blocks",
                "num_prefill_checkpoint_blocks",
                "prefill_checkpoint_alignment_tokens",
                "page_size_bytes",
                "tp_replicated",
            )
        )

    def scaled(self, factor: int) -> LayerSpec:
        """The block grows, the state does not; its padding does."""
        padded = self.page_size_padded_bytes
        return dataclasses.replace(
            self,
            block_size_tokens=self.block_size_tokens * factor,
            page_size_padded_bytes=None if padded is None else padded * factor,
        )

    def padded_to(self, page_size_bytes: int) -> LayerSpec | None:
        """The only way to make a state's page larger."""
        return dataclasses.replace(self, page_size_padded_bytes=page_size_bytes)
