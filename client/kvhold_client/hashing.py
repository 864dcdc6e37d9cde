"""Prefix hashing: the name of a block is a digest over everything that its cache content depends on.

    seed ──▶ none_hash ──▶ H(none_hash, tokens 0..15, extra) ──▶ H(that, tokens 16..31, extra) ──▶ …

A digest therefore names the whole prefix up to the end of its block, and two sequences share a block exactly if they
share every token, adapter, media item and salt before it. Only full blocks have one. Digests equal those of the engine
that uses the same algorithm, seed and key style, so that its events and ours speak of the same blocks.

The cryptographic algorithms have a fixed public default seed: every process agrees without being told. The xxhash ones
can be collided on purpose, so they have none: give them a secret one, the same in every process that shares a pool.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from kvhold_client.bulk_tokens import BodyMaker, as_ints
from kvhold_client.hash_encodings import CborEncoding, Digest, Encoding, ExtraKey, PickleEncoding
from kvhold_client.hash_keys import KEY_STYLES, ExtraContent, ExtraKeys

DEFAULT_ALGORITHM = "sha256_cbor"
DEFAULT_SEED = "vllm-none-hash"  # what the engines use when no seed is configured
MAX_BLOCK_SIZE_TOKENS = 8192


def _sha256() -> Digest:
    return hashlib.sha256


def _xxh3_128() -> Digest:
    try:
        import xxhash
    except ImportError:
        raise ImportError("the xxhash algorithms need the xxhash package: pip install 'kvhold[xxhash]'") from None
    return cast(Digest, xxhash.xxh3_128)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashAlgorithm:
    """A byte form and a digest over it."""

    encoding: Callable[[], Encoding]
    digest: Callable[[], Digest]  # loads the library only if the algorithm is used
    digest_size_bytes: int
    default_seed: str | None


ALGORITHMS = {
    "sha256": HashAlgorithm(encoding=PickleEncoding, digest=_sha256, digest_size_bytes=32, default_seed=DEFAULT_SEED),
    "sha256_cbor": HashAlgorithm(
        encoding=CborEncoding, digest=_sha256, digest_size_bytes=32, default_seed=DEFAULT_SEED
    ),
    "xxhash": HashAlgorithm(encoding=PickleEncoding, digest=_xxh3_128, digest_size_bytes=16, default_seed=None),
    "xxhash_cbor": HashAlgorithm(encoding=CborEncoding, digest=_xxh3_128, digest_size_bytes=16, default_seed=None),
}


class PrefixHasher:
    """Hashes the blocks of one pool's sequences. Make one per engine; it is fixed, and remembers encodings of tokens.

    Raises ValueError for an unknown algorithm or style, a block size outside 1..MAX_BLOCK_SIZE_TOKENS, and a missing
    seed; ImportError if the algorithm's library is not installed.
    """

    def __init__(
        self,
        *,
        block_size_tokens: int,
        algorithm: str = DEFAULT_ALGORITHM,
        seed: str | None = None,
        key_style: str = "tagged",
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm: {algorithm!r} is none of {', '.join(ALGORITHMS)}")
        if key_style not in KEY_STYLES:
            raise ValueError(f"key_style: {key_style!r} is none of {', '.join(KEY_STYLES)}")
        if not 1 <= block_size_tokens <= MAX_BLOCK_SIZE_TOKENS:
            raise ValueError(f"block_size_tokens: {block_size_tokens} is outside 1..{MAX_BLOCK_SIZE_TOKENS}")
        chosen = ALGORITHMS[algorithm]
        self.algorithm = algorithm
        self.block_size_tokens = block_size_tokens
        self.digest_size_bytes = chosen.digest_size_bytes
        self._encoding = chosen.encoding()
        self._digest = chosen.digest()
        self._style = KEY_STYLES[key_style]
        self._bodies = BodyMaker(self._encoding, block_size_tokens)
        self.none_hash = none_hash(algorithm, seed)

    def sequence(self, content: ExtraContent | None = None) -> "SequenceHasher":
        """The hasher of one sequence, without tokens yet."""
        return SequenceHasher(self, ExtraKeys(content or ExtraContent(), self._style))

    def hash_block(
        self, parent: bytes | None, tokens: Sequence[int], extra: tuple[ExtraKey, ...] | None = None
    ) -> bytes:
        """Digest of one block of any length. No parent (or an empty one) means the first block of a sequence."""
        bodies = BodyMaker(self._encoding, len(tokens)).bodies(tokens)
        if extra is not None:
            bodies = [self._encoding.with_extra(bodies[0], extra)]
        return self._encoding.chain(parent or self.none_hash, bodies, self._digest)[0]

    def hash_blocks(self, parent: bytes, tokens: Sequence[int], extra: dict[int, tuple[ExtraKey, ...]]) -> list[bytes]:
        """Digests of the full blocks of `tokens`, which follow `parent`; `extra` by index into them."""
        bodies = self._bodies.bodies(tokens)
        for index, keys in extra.items():
            bodies[index] = self._encoding.with_extra(bodies[index], keys)
        return self._encoding.chain(parent, bodies, self._digest)


class SequenceHasher:
    """Follows one sequence as tokens are added to it. Tokens are only ever appended; drafts are not tokens.

    With blocks of 4: extend([1,2,3]) → []; extend([4,5]) → [h0]; extend([6,7,8,9]) → [h1]; hashes == [h0, h1].
    """

    def __init__(self, hasher: PrefixHasher, extra: ExtraKeys) -> None:
        self._hasher = hasher
        self._extra = extra
        self._pending: list[int] = []  # tokens of the block that is not full yet
        self.hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.hashes) * self._hasher.block_size_tokens + len(self._pending)

    def extend(self, tokens: Iterable[int]) -> list[bytes]:
        """Add known tokens: any iterable of integers, also arrays of array, numpy or torch.

        Returns the hashes of the blocks that became full. Raises TypeError, changing nothing, if a token is no integer.
        """
        size = self._hasher.block_size_tokens
        # A prompt in an array is looked into as it is; what follows comes in few tokens and is collected in a list.
        is_array = isinstance(tokens, array) or hasattr(tokens, "__array__")
        known = cast(Sequence[int], tokens) if is_array else as_ints(tokens)
        if self._pending:
            known = self._pending + as_ints(known)
        num_blocks = len(known) // size
        if not num_blocks:
            self._pending = list(as_ints(known))
            return []
        first = len(self.hashes)
        extra = {index - first: keys for index, keys in self._extra.of_blocks(first, num_blocks, size).items()}
        parent = self.hashes[-1] if self.hashes else self._hasher.none_hash
        new = self._hasher.hash_blocks(parent, known, extra)
        self._pending = as_ints(known[num_blocks * size :])
        self.hashes += new
        return new

    def extra_keys(self, index: int) -> tuple[ExtraKey, ...] | None:
        """What block `index` was hashed with besides its tokens; None for nothing. Consumers of events want it."""
        size = self._hasher.block_size_tokens
        return self._extra.of_block(index * size, (index + 1) * size) or None


def none_hash(algorithm: str, seed: str | None = None) -> bytes:
    """Parent of every first block. Raises ValueError if the algorithm needs a seed and gets none."""
    chosen = ALGORITHMS[algorithm]
    text = chosen.default_seed if seed is None else seed
    if text is None:
        raise ValueError(
            f"seed: {algorithm} can be collided on purpose, so it needs a secret seed shared by all processes"
        )
    return chosen.digest()(chosen.encoding().text(text)).digest()


def coarser(hashes: Sequence[bytes], *, unit_tokens: int, block_size_tokens: int) -> Sequence[bytes]:
    """The hashes of larger blocks: each is the last one inside it, which already covers all before.

    A tail that does not fill a block is left out. Units of 4, blocks of 8: [A, B, C, D, E] → [B, D]. Raises ValueError
    if a block is no whole number of units.
    """
    if unit_tokens < 1 or block_size_tokens % unit_tokens or not block_size_tokens:
        raise ValueError(f"block_size_tokens: {block_size_tokens} is no multiple of the hash unit, {unit_tokens}")
    step = block_size_tokens // unit_tokens
    return hashes if step == 1 else hashes[step - 1 :: step]


def group_key(block_hash: bytes, group_id: int) -> bytes:
    """Name of a block within one group: groups never share entries. Raises OverflowError beyond 32 bits."""
    return block_hash + group_id.to_bytes(4, "big")


def event_hash(block_hash: bytes) -> int:
    """The unsigned 64-bit integer that stands for a hash in the engines' event streams: its last eight bytes."""
    return int.from_bytes(block_hash[-8:], "big")
