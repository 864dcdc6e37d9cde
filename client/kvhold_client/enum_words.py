"""Names of enumeration values as people read them."""

from typing import Any


def enum_word(enum: Any, value: int, prefix: str) -> str:
    """STRATEGY_MODERN → modern. A number that this client does not know stays a number."""
    try:
        return str(enum.Name(value)).removeprefix(prefix).lower()
    except ValueError:
        return str(value)
