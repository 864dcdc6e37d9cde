"""The two byte forms in which a block is hashed, spelled out so that no library or Python version can change them.

A block is the triple (parent digest, tuple of token ids, extra keys or None):

    CBOR    83 · 58 20 <parent> · 90 <tokens> · f6                 RFC 8949, shortest forms, definite lengths
    pickle  80 05 95 <u64 length> · 43 20 <parent> 94 · 28 <tokens> 74 94 · 4e · 87 94 2e       protocol 5
            └────────── head ───────────────────┘   └────────────────── body ────────────────┘

Only the head depends on the parent, so all bodies of a prompt can be made at once (`bulk_tokens`), and the sequential
part of a chain is one concatenation and one digest per block (`chain`).

Pickle writes a reference (68 <index>) where an *object* comes again in one block, but writes an equal one out: a salt
that equals the adapter's name hashes differently if both are one string. We do the same, so that an engine's own
objects give the engine's own digests. It costs a hit, never a wrong one; prefer CBOR wherever the choice is yours.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

ExtraKey = str | int | bytes | None | tuple["ExtraKey", ...]
Digest = Callable[[bytes], "DigestState"]


class DigestState(Protocol):
    """What hashlib and xxhash constructors return."""

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """How the bytes of one token follow from its value, as tables over size classes, for making many at once.

    A token below `limits[k]` (and not below the one before) takes `sizes_bytes[k]` bytes: the last ones of the
    big-endian (or the first of the little-endian) form of the 64-bit integer `(token << shift_bits) + added[k]`.
    """

    limits: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    added: tuple[int, ...]
    shift_bits: int
    big_endian: bool


class Encoding(Protocol):
    """One byte form."""

    @property
    def token_form(self) -> TokenForm: ...

    def text(self, text: str) -> bytes:
        """The form of a lone string: what the seed of all chains is hashed from."""

    def token(self, token: int) -> bytes:
        """The form of one token id."""

    def before_tokens(self, num_tokens: int) -> bytes:
        """What a body starts with."""

    def after_tokens(self, num_tokens: int) -> bytes:
        """What a body without extra keys ends with."""

    def with_extra(self, body: bytes, extra: tuple[ExtraKey, ...]) -> bytes:
        """The body with these extra keys in place of None."""

    def chain(self, parent: bytes, bodies: Iterable[bytes], digest: Digest) -> list[bytes]:
        """Digest of each block, each the parent of the next. `parent` has the size of the digests."""


# ---- CBOR ----------------------------------------------------------------------------------------------------------

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = 0x00, 0x20, 0x40, 0x60, 0x80
_CBOR_NULL = b"\xf6"


def _cbor_head(major: int, argument: int) -> bytes:
    """Type and length or value, in the shortest form."""
    if argument < 24:
        return bytes((major + argument,))
    if argument < 1 << 8:
        return bytes((major + 24, argument))
    for code, size in ((25, 2), (26, 4), (27, 8)):
        if argument < 1 << 8 * size:
            return bytes((major + code,)) + argument.to_bytes(size, "big")
    raise OverflowError(f"{argument} does not fit 64 bits")


def _cbor(value: ExtraKey) -> bytes:
    match value:
        case None:
            return _CBOR_NULL
        case str():
            data = value.encode()
            return _cbor_head(_TEXT, len(data)) + data
        case int():
            return _cbor_head(_UNSIGNED, value) if value >= 0 else _cbor_head(_NEGATIVE, -1 - value)
        case bytes():
            return _cbor_head(_BYTES, len(value)) + value
        case tuple():
            return _cbor_head(_ARRAY, len(value)) + b"".join(map(_cbor, value))


class CborEncoding:
    """Canonical CBOR."""

    token_form = TokenForm(
        limits=(24, 1 << 8, 1 << 16, 1 << 32),
        sizes_bytes=(1, 2, 3, 5),
        added=(0, 0x18 << 8, 0x19 << 16, 0x1A << 32),
        shift_bits=0,
        big_endian=True,
    )

    def text(self, text: str) -> bytes:
        return _cbor(text)

    def token(self, token: int) -> bytes:
        return _cbor(token)

    def before_tokens(self, num_tokens: int) -> bytes:
        return _cbor_head(_ARRAY, num_tokens)

    def after_tokens(self, num_tokens: int) -> bytes:
        return _CBOR_NULL

    def with_extra(self, body: bytes, extra: tuple[ExtraKey, ...]) -> bytes:
        return body[:-1] + _cbor(extra)

    def chain(self, parent: bytes, bodies: Iterable[bytes], digest: Digest) -> list[bytes]:
        head = _cbor_head(_ARRAY, 3) + _cbor_head(_BYTES, len(parent))
        hashes: list[bytes] = []
        add = hashes.append
        for body in bodies:  # hot: nothing else in here
            parent = digest(head + parent + body).digest()
            add(parent)
        return hashes


# ---- pickle, protocol 5 --------------------------------------------------------------------------------------------

MAX_FRAME_BYTES = 1 << 16  # where the pickler would begin another frame; real blocks are far from it
_MEMOIZE, _STOP = b"\x94", b"."
_TUPLE_OF = {1: b"\x85", 2: b"\x86", 3: b"\x87"}  # longer ones: a mark before the items and "t" after them


def _pickled_int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return bytes((0x4B, value))
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return bytes((0x8A, len(data))) + data


def _pickled_data(short: int, long: bytes, data: bytes) -> bytes:
    size = len(data)
    return (bytes((short, size)) if size < 1 << 8 else long + size.to_bytes(4, "little")) + data + _MEMOIZE


class _ExtraPickler:
    """Writes extra keys as a pickler does that has already memoised `num_memoised` objects."""

    def __init__(self, num_memoised: int) -> None:
        self._num_memoised = num_memoised
        self._memo: dict[int, int] = {}  # id of an object of the tree being written → its index

    def write(self, value: ExtraKey) -> bytes:
        if value is None:
            return b"N"
        if isinstance(value, int):
            return _pickled_int(value)
        if value == ():
            return b")"
        if (index := self._memo.get(id(value))) is not None:
            return bytes((0x68, index)) if index < 1 << 8 else b"j" + index.to_bytes(4, "little")
        match value:
            case str():
                data = _pickled_data(0x8C, b"X", value.encode("utf-8", "surrogatepass"))
            case bytes():
                data = _pickled_data(0x43, b"B", value)
            case tuple():
                items = b"".join(map(self.write, value))
                close = _TUPLE_OF.get(len(value))
                data = (items + close if close else b"(" + items + b"t") + _MEMOIZE
        self._memo[id(value)] = self._num_memoised
        self._num_memoised += 1
        return data


def _frame_head(size_bytes: int) -> bytes:
    """Protocol and frame of a pickle whose rest has this size. Raises ValueError beyond what fits one frame."""
    if size_bytes >= MAX_FRAME_BYTES:
        raise ValueError(
            f"a block of {size_bytes} bytes, extra keys included, is over the {MAX_FRAME_BYTES} of one frame"
        )
    return b"\x80\x05\x95" + size_bytes.to_bytes(8, "little")


class PickleEncoding:
    """What CPython's pickler writes for these values, protocol 5 (the highest of 3.8 to 3.14)."""

    token_form = TokenForm(
        limits=(1 << 8, 1 << 16, 1 << 31),
        sizes_bytes=(2, 3, 5),
        added=(0x4B, 0x4D, 0x4A),
        shift_bits=8,
        big_endian=False,
    )
    _end = b"\x87" + _MEMOIZE + _STOP  # of the triple

    def text(self, text: str) -> bytes:
        content = _ExtraPickler(0).write(text) + _STOP
        return _frame_head(len(content)) + content

    def token(self, token: int) -> bytes:
        return _pickled_int(token)

    def before_tokens(self, num_tokens: int) -> bytes:
        return _MEMOIZE if num_tokens in _TUPLE_OF else _MEMOIZE + b"("

    def after_tokens(self, num_tokens: int) -> bytes:
        return _TUPLE_OF.get(num_tokens, b"t") + _MEMOIZE + b"N" + self._end

    def with_extra(self, body: bytes, extra: tuple[ExtraKey, ...]) -> bytes:
        return body[: -1 - len(self._end)] + _ExtraPickler(2).write(extra) + self._end  # parent and tokens came before

    def chain(self, parent: bytes, bodies: Iterable[bytes], digest: Digest) -> list[bytes]:
        around_body = 2 + len(parent)
        parent_head = b"C" + len(parent).to_bytes(1, "little")
        heads: dict[int, bytes] = {}  # by size of the body, of which a prompt has few
        hashes: list[bytes] = []
        for body in bodies:  # hot
            size = len(body)
            if size not in heads:
                heads[size] = _frame_head(around_body + size) + parent_head
            parent = digest(heads[size] + parent + body).digest()
            hashes.append(parent)
        return hashes
