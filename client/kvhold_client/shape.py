"""What a client must know of a pool to mirror its block tables: groups, block sizes, what leaves a window when.

A sequence with n tokens has ceil(n / block_size) table entries in each paged group. Local kinds forget: after n tokens
were computed, a query reads nothing below `skip(n)`, and the daemon replaces the entries of blocks that lie wholly
below it by the null block (id 0).

    full             skip(n) = 0
    sliding window W skip(n) = n - W + 1 - extra retained       W=8, 4-token blocks, n=14: skip 7, entry 0 becomes null
    chunked local C  skip(n) = floor(n / C) * C
    state (mamba)    skip(n) = n - 1
"""

from dataclasses import dataclass

# Kinds that hold one block a sequence, however long it grows.
_SINGLE_BLOCK = frozenset({"circular_buffer", "ring", "kpool_tail", "cross_attention"})
_WINDOWS = frozenset({"sliding_window", "sliding_window_mla", "draft_sliding_window"})
_CHUNKED = frozenset({"chunked_local", "chunked_local_attention"})
NEVER = 2**62  # more tokens than any sequence has


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """One group: layers that share a block table."""

    kind: str
    block_size_tokens: int
    sliding_window_tokens: int = 0
    extra_retained_tokens: int = 0
    attention_chunk_size_tokens: int = 0

    @property
    def paged(self) -> bool:
        """Its table grows with the sequence."""
        return self.kind not in _SINGLE_BLOCK

    @property
    def forgets(self) -> bool:
        """Blocks leave its table while the sequence runs."""
        return self.kind in _WINDOWS or self.kind in _CHUNKED or self.kind == "mamba"

    def skip_tokens(self, computed_tokens: int) -> int:
        """Tokens that no query reads any more once `computed_tokens` are computed."""
        if self.kind in _WINDOWS:
            return max(0, computed_tokens - self.sliding_window_tokens + 1 - self.extra_retained_tokens)
        if self.kind in _CHUNKED:
            chunk = self.attention_chunk_size_tokens
            return computed_tokens // chunk * chunk
        if self.kind == "mamba":
            return max(0, computed_tokens - 1)
        return 0

    def next_release_tokens(self, num_released: int) -> int:
        """Computed tokens at which the block behind the first `num_released` ones leaves; NEVER if all are kept."""
        end = (num_released + 1) * self.block_size_tokens
        if self.kind in _WINDOWS:
            return end + self.sliding_window_tokens - 1 + self.extra_retained_tokens
        if self.kind in _CHUNKED:
            chunk = self.attention_chunk_size_tokens
            return -(-end // chunk) * chunk
        if self.kind == "mamba":
            return end + 1
        return NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """The pool as a scheduler sees it."""

    groups: tuple[GroupShape, ...]
    hash_size_bytes: int
    hash_block_size_tokens: int
    max_model_len_tokens: int = NEVER  # no table covers more

    @property
    def num_groups(self) -> int:
        """Tables of each sequence."""
        return len(self.groups)

    @property
    def grows_plainly(self) -> bool:
        """Extends take nothing but new blocks, as many as the slots say."""
        return all(group.paged and group.kind != "mamba" for group in self.groups)
