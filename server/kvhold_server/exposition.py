"""Metric families as text: Prometheus 0.0.4 or OpenMetrics 1.0, in small parts.

    CounterMetricFamily("kvhold_steps")    0.0.4:        # TYPE kvhold_steps_total counter
                                           OpenMetrics:  # TYPE kvhold_steps counter       … # EOF

Written by hand because the event loop makes it between scheduler steps: a line costs a few microseconds here, more than
ten times that in the general encoder, and there in one piece. Only what we export is supported: gauges, counters,
histograms, no timestamps, help texts of one line without backslash. A test compares it with prometheus_client's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
LINES_IN_PART = 16
KINDS = frozenset({"gauge", "counter", "histogram"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposition:
    """A scrape's answer in parts, made as they are taken: others may run in between."""

    content_type: str
    parts: Iterator[str]


def expose(collectors: Iterable[Collector], accept: str) -> Exposition:
    """In the format that the scraper accepts: OpenMetrics if it names it, else text."""
    if "application/openmetrics-text" in accept:
        return Exposition(content_type=OPENMETRICS_CONTENT_TYPE, parts=_parts(collectors, is_open=True))
    return Exposition(content_type=TEXT_CONTENT_TYPE, parts=_parts(collectors, is_open=False))


def _parts(collectors: Iterable[Collector], *, is_open: bool) -> Iterator[str]:
    for collector in collectors:
        for family in collector.collect():
            assert family.type in KINDS, family.type
            name = family.name if is_open or family.type != "counter" else f"{family.name}_total"
            yield f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n"
            for start in range(0, len(family.samples), LINES_IN_PART):
                yield "".join([_line(sample, is_open) for sample in family.samples[start : start + LINES_IN_PART]])
    if is_open:
        yield "# EOF\n"


def _line(sample: Sample, is_open: bool) -> str:
    pairs = ",".join([f'{name}="{_escaped(value)}"' for name, value in sorted(sample.labels.items())])
    shown = f"{sample.name}{{{pairs}}} {number(sample.value)}" if pairs else f"{sample.name} {number(sample.value)}"
    return f"{shown}{_exemplar(sample.exemplar)}\n" if is_open and sample.exemplar else f"{shown}\n"


def _exemplar(exemplar: Exemplar) -> str:
    pairs = ",".join([f'{name}="{_escaped(value)}"' for name, value in exemplar.labels.items()])
    moment = f" {exemplar.timestamp:.3f}" if exemplar.timestamp is not None else ""
    return f" # {{{pairs}}} {number(exemplar.value)}{moment}"


def number(value: float) -> str:
    """As both formats write it."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def _escaped(text: str) -> str:
    if "\\" in text or "\n" in text or '"' in text:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return text


def join(exposition: Exposition) -> bytes:
    """All of it at once."""
    return "".join(exposition.parts).encode()
