"""The checksum of recovery records: XXH3 where the package is installed, else CRC-32. A file says which one it uses.

A record's checksum is seeded with its position, so that a whole record in another's place is as wrong as a torn one.
Zero is never a checksum: it marks a record that says nothing.
"""

import zlib
from collections.abc import Callable
from enum import IntEnum

Checksum = Callable[[bytes, int], int]  # bytes, seed → 1 .. 2**64 − 1


class ChecksumKind(IntEnum):
    """Stored in file headers."""

    CRC32 = 1
    XXH3 = 2


def crc32(data: bytes, seed: int) -> int:
    """CRC-32 in the low half; the high half is constant, so that it is never zero."""
    return zlib.crc32(data, seed & 0xFFFFFFFF) | 1 << 32


def checksum_of(kind: int) -> Checksum | None:
    """The function, or None if this installation lacks it or the number means nothing."""
    if kind == ChecksumKind.CRC32:
        return crc32
    if kind == ChecksumKind.XXH3:
        try:
            import xxhash
        except ImportError:
            return None
        digest: Checksum = xxhash.xxh3_64_intdigest
        return digest
    return None


def best_kind() -> ChecksumKind:
    """The best kind that this installation has."""
    return ChecksumKind.XXH3 if checksum_of(ChecksumKind.XXH3) is not None else ChecksumKind.CRC32
