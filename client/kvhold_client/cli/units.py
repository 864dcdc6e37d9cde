"""Sizes and counts between people and numbers."""

import argparse
import math
import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = _UNITS[_letter] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """ "40GiB", "40G" (the same), "40GB" (decimal), "1073741824". Raises ArgumentTypeError, for argparse."""
    found = _SIZE.fullmatch(text)
    if not found or found[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 40GiB, 512MiB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def parse_seconds(text: str) -> float:
    """ "0.5": a time to wait, above 0. Raises ArgumentTypeError, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def format_bytes(size: float) -> str:
    """ "1.5 GiB"; exact below a KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_count(number: float) -> str:
    """ "12,345"."""
    return f"{number:,.0f}"


def format_share(part: float, whole: float) -> str:
    """ "12.3 %"; "-" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def format_seconds(seconds: float) -> str:
    """ "850 µs", "12.3 ms", "4.2 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
