"""The approximate greatest common divisor: the group size that pads least."""

from collections.abc import Sequence


def approximate_gcd(values: Sequence[int], lower: int = 1) -> int:
    """The d in [lower, max(values)] that minimises the padding Σ(−v mod d); the largest of equally good ones.

    Values are positive and at least one. If all are smaller than `lower`, it is `lower`. Reads each different value
    once per candidate.
    """
    assert values and min(values) > 0
    low, high = max(1, lower), max(values)
    if low > high:
        return low
    weights: dict[int, int] = {}
    for value in values:
        weights[value] = weights.get(value, 0) + 1
    best, best_padding = low, None
    for candidate in range(high, low - 1, -1):
        padding = sum(-value % candidate * weight for value, weight in weights.items())
        if best_padding is None or padding < best_padding:
            best, best_padding = candidate, padding
    return best
