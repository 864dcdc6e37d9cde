"""Our encoder against prometheus_client's reader and writer, for everything that we export and for nasty labels."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from kvhold_server.exposition import OPENMETRICS_CONTENT_TYPE, TEXT_CONTENT_TYPE, expose, join
from kvhold_server.metrics import SnapshotCollector
from kvhold_server.observe.extra_metrics import ViewCollector
from tests.observe.views import node_view, pool_view, session_view

OPEN = "application/openmetrics-text; version=1.0.0"


class Fixed(Collector):
    def __init__(self, *families: Metric) -> None:
        self.families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self.families)


def registry(*collectors: Collector) -> CollectorRegistry:
    found = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        found.register(collector)
    return found


def real() -> tuple[Collector, Collector]:
    view = node_view(pool_view(), pool_view("code"), sessions=(session_view(3),))
    return SnapshotCollector(view.snapshot), ViewCollector(view)


def test_text_reads_as_what_the_general_writer_writes() -> None:
    ours, theirs = join(expose(real(), "")).decode(), generate_latest(registry(*real())).decode()
    assert list(read_text(ours)) == list(read_text(theirs))


def test_openmetrics_reads_as_what_the_general_writer_writes() -> None:
    ours, theirs = join(expose(real(), OPEN)).decode(), generate_openmetrics(registry(*real())).decode()
    assert list(read_openmetrics(ours)) == list(read_openmetrics(theirs))


@settings(max_examples=60, deadline=None)
@given(
    label=st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
    ),
    value=st.floats(allow_nan=False),
    is_open=st.booleans(),
)
def test_any_label_and_any_number_survive(label: str, value: float, is_open: bool) -> None:
    family = GaugeMetricFamily("kvhold_x", "Help.", labels=["pool"])
    family.add_metric([label], value)
    text = join(expose([Fixed(family)], OPEN if is_open else "")).decode()
    read = list(read_openmetrics(text) if is_open else read_text(text))
    assert [(s.labels, s.value) for s in read[0].samples] == [({"pool": label}, value)]


def test_exemplars_are_for_openmetrics_only() -> None:
    family = HistogramMetricFamily("kvhold_h", "Help.", labels=["method"])
    buckets = [("0.1", 1.0, Exemplar({"trace_id": "ab"}, 0.05, 12.5)), ("+Inf", 2.0)]
    family.add_metric(["m"], buckets, 3.0)
    read = list(read_openmetrics(join(expose([Fixed(family)], OPEN)).decode()))
    exemplar = read[0].samples[0].exemplar
    assert exemplar is not None and exemplar.timestamp is not None
    assert (exemplar.labels, exemplar.value, float(exemplar.timestamp)) == ({"trace_id": "ab"}, 0.05, 12.5)
    assert b"trace_id" not in join(expose([Fixed(family)], ""))


def test_counters_have_their_suffix_where_each_format_wants_it() -> None:
    family = CounterMetricFamily("kvhold_c", "Help.", value=7)
    assert (
        join(expose([Fixed(family)], ""))
        == b"# HELP kvhold_c_total Help.\n# TYPE kvhold_c_total counter\nkvhold_c_total 7.0\n"
    )
    assert b"# TYPE kvhold_c counter\nkvhold_c_total 7.0\n# EOF\n" in join(expose([Fixed(family)], OPEN))


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("", TEXT_CONTENT_TYPE), ("text/plain", TEXT_CONTENT_TYPE), ("*/*", TEXT_CONTENT_TYPE),
     ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", OPENMETRICS_CONTENT_TYPE)],
)  # fmt: skip
def test_format_is_what_the_scraper_accepts(accept: str, content_type: str) -> None:
    assert expose([], accept).content_type == content_type


def test_parts_are_small() -> None:
    family = GaugeMetricFamily("kvhold_x", "Help.", labels=["pool"])
    for i in range(1000):
        family.add_metric([str(i)], i)
    sizes = [part.count("\n") for part in expose([Fixed(family)], "").parts]
    assert max(sizes) <= 64 and sum(sizes) == 1002
