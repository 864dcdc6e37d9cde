"""The bodies of many blocks at once, from arrays of token ids.

Token ids take 1 to 5 bytes each, so a body is found by packing, not by slicing. With numpy, each piece of a body is a
64-bit word and a mask of the bytes in it that count; one selection over all words of many blocks packs them:

    words   [90][ token ][ token ] … [ token ][f6]     one row per block, 8 bytes per word
    mask     ·1   ··111    11111       ···11    ·1     →  bytes in order  →  cut at the rows' ends

Without numpy (the base install), bodies are joined from remembered encodings of single tokens; that is also the way for
few blocks, where the arrays would not pay. `docs/performance.md` has the numbers.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import index
from types import ModuleType
from typing import Any, Literal, cast

from kvhold_client.hash_encodings import Encoding

MAX_REMEMBERED_TOKENS = 1 << 20  # more than any vocabulary has: a caller that feeds noise must not cost memory
MIN_BULK_BLOCKS = 16  # below this, setting the arrays up costs more than it saves
CHUNK_TOKENS = 8192  # arrays of one chunk stay in the cache


class _TokenMemo(dict[int, bytes]):
    """Token id → its encoding, made on first use."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding

    def __missing__(self, token: int) -> bytes:
        if len(self) >= MAX_REMEMBERED_TOKENS:
            self.clear()
        encoded = self[token] = self._encoding.token(index(token))
        return encoded


def as_ints(tokens: Iterable[int]) -> list[int]:
    """The tokens as a list of Python's integers, whatever kind of array they come in."""
    to_list = getattr(tokens, "tolist", None)
    if to_list is not None:
        return cast(list[int], to_list())
    return tokens if isinstance(tokens, list) else list(tokens)


class BodyMaker:
    """Makes the bodies (without extra keys) of blocks of one size in one encoding."""

    def __init__(self, encoding: Encoding, block_size_tokens: int) -> None:
        self._encoding = encoding
        self._size = block_size_tokens
        self._before = encoding.before_tokens(block_size_tokens)
        self._after = encoding.after_tokens(block_size_tokens)
        self._memo = _TokenMemo(encoding)

    def bodies(self, tokens: Sequence[int]) -> list[bytes]:
        """One body per full block of `tokens`, a list or an array that numpy can look into; the tail is left out.

        Raises TypeError for what is no integer.
        """
        num_blocks = len(tokens) // self._size
        if num_blocks < MIN_BULK_BLOCKS or self._packer is None:
            return self._one_by_one(tokens[: num_blocks * self._size])
        chunk = max(CHUNK_TOKENS // self._size, 1) * self._size
        bodies: list[bytes] = []
        for start in range(0, num_blocks * self._size, chunk):
            piece = tokens[start : min(start + chunk, num_blocks * self._size)]
            packed = self._packer.pack(piece)
            bodies += self._one_by_one(piece) if packed is None else packed
        return bodies

    def _one_by_one(self, tokens: Sequence[int]) -> list[bytes]:
        tokens = as_ints(tokens)
        size, before, after, encoded, join = self._size, self._before, self._after, self._memo.__getitem__, b"".join
        return [
            join((before, *map(encoded, tokens[start : start + size]), after)) for start in range(0, len(tokens), size)
        ]

    @cached_property
    def _packer(self) -> "_Packer | None":
        try:
            import numpy
        except ImportError:
            return None
        return _Packer(numpy, self._encoding, self._size)


class _Packer:
    """The numpy way. `pack` is the only method that runs per prompt; the rest is tables."""

    def __init__(self, numpy: ModuleType, encoding: Encoding, block_size_tokens: int) -> None:
        form = encoding.token_form
        before, after = encoding.before_tokens(block_size_tokens), encoding.after_tokens(block_size_tokens)
        assert max(len(before), len(after)) <= 8
        order: Literal["big", "little"] = "big" if form.big_endian else "little"
        self._np: Any = numpy
        self._size = block_size_tokens
        self._dtype = ">u8" if form.big_endian else "<u8"
        self._shift = form.shift_bits
        self._limits = form.limits
        self._added = numpy.array(form.added, numpy.uint64)
        self._sizes = numpy.array(form.sizes_bytes, numpy.int64)
        self._edge_words = int.from_bytes(before, order), int.from_bytes(after, order)
        self._edge_size = len(before) + len(after)
        counts = numpy.array([*form.sizes_bytes, len(before), len(after)])[:, None]
        places = numpy.arange(8)[None, :]
        masks = places >= 8 - counts if form.big_endian else places < counts
        self._masks, self._edge_masks = masks[:-2], masks[-2:]

    def pack(self, tokens: Sequence[int]) -> list[bytes] | None:
        """Bodies of a whole number of blocks, or None if a token lies outside the tables: legal, but rare."""
        np = self._np
        try:  # array() reads a list three times as fast as numpy does, and refuses floats
            ids = np.asarray(array("q", tokens) if isinstance(tokens, list) else tokens)
        except OverflowError:
            return None
        if ids.dtype.kind not in "iu":
            raise TypeError(f"tokens are integers, not {ids.dtype}")
        if int(ids.min()) < 0 or int(ids.max()) >= self._limits[-1]:
            return None
        ids = ids.astype(np.uint64, copy=False).reshape(-1, self._size)
        kinds = sum((ids >= limit).view(np.uint8) for limit in self._limits[:-1])
        rows = len(ids)
        words = np.empty((rows, self._size + 2), self._dtype)
        words[:, 0], words[:, -1] = self._edge_words
        words[:, 1:-1] = (ids << np.uint64(self._shift)) + self._added.take(kinds)
        mask = np.empty((rows, self._size + 2, 8), bool)
        mask[:, 0], mask[:, -1] = self._edge_masks
        mask[:, 1:-1] = self._masks.take(kinds, axis=0)
        packed = np.compress(mask.ravel(), words.view(np.uint8).ravel()).tobytes()
        token_ends = self._sizes.take(kinds.ravel()).cumsum()[self._size - 1 :: self._size]
        ends = (token_ends + self._edge_size * np.arange(1, rows + 1)).tolist()
        assert len(packed) == ends[-1]
        return [packed[start:end] for start, end in zip([0, *ends], ends, strict=False)]
