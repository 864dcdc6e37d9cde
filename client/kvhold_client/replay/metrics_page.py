"""Reads a daemon's /metrics page: enough of the text format for counters and gauges."""

import re
import urllib.error
import urllib.request
from dataclasses import dataclass

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPage:
    """Samples as (name, labels, value)."""

    samples: tuple[tuple[str, dict[str, str], float], ...]

    @classmethod
    def parse(cls, text: str) -> "MetricsPage":
        """Comments and lines that are no sample are left out."""
        found = []
        for line in text.splitlines():
            match = _SAMPLE.match(line) if line[:1] != "#" else None
            if match:
                found.append((match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
        return cls(samples=tuple(found))

    def total(self, name: str, **labels: str) -> int:
        """Sum of the samples of a name whose labels include these."""
        return int(
            sum(
                value
                for sample, has, value in self.samples
                if sample == name and all(has.get(key) == want for key, want in labels.items())
            )
        )


def fetch_metrics(url: str) -> MetricsPage | None:
    """The page now, or None if nobody serves it."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return MetricsPage.parse(answer.read().decode())
    except (OSError, urllib.error.URLError, ValueError):
        return None
