"""The part of CBOR (RFC 8949) that extra keys are made of: integers, byte and text strings, arrays, null, booleans.

A first byte has the kind in its upper three bits and, below, a small number or how many bytes of number follow.
"""

from typing import TypeAlias

Value: TypeAlias = "int | bytes | str | bool | list[Value] | None"
MAX_DEPTH = 16
_SIMPLE: dict[int, bool | None] = {0xF4: False, 0xF5: True, 0xF6: None}


def cbor_value(data: bytes) -> Value:
    """One encoded value. Raises ValueError for anything else, or for what follows it."""
    value, end = _value(data, 0, MAX_DEPTH)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes after the value")
    return value


def _value(data: bytes, at: int, depth: int) -> tuple[Value, int]:
    if at >= len(data) or not depth:
        raise ValueError("ends too early, or is nested too deep")
    first = data[at]
    if first in _SIMPLE:
        return _SIMPLE[first], at + 1
    kind, (number, at) = first >> 5, _number(data, at)
    if kind == 0:
        return number, at
    if kind == 1:
        return -1 - number, at
    if kind in (2, 3):
        text = data[at : at + number]
        if len(text) != number:
            raise ValueError("a string ends too early")
        return (text if kind == 2 else text.decode()), at + number
    if kind != 4 or number > len(data) - at:
        raise ValueError(f"no extra key begins with {first:#x}")
    items: list[Value] = []
    for _ in range(number):
        item, at = _value(data, at, depth - 1)
        items.append(item)
    return items, at


def _number(data: bytes, at: int) -> tuple[int, int]:
    low = data[at] & 31
    if low < 24:
        return low, at + 1
    size = {24: 1, 25: 2, 26: 4, 27: 8}.get(low, 0)
    digits = data[at + 1 : at + 1 + size]
    if not size or len(digits) != size:
        raise ValueError("a number ends too early, or has no length")
    return int.from_bytes(digits, "big"), at + 1 + size
