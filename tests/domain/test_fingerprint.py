"""What a fingerprint depends on, that it is the same everywhere, and how a difference is named."""

import subprocess
import sys
from typing import Any

import pytest

from kvhold_server.domain.fingerprint import Difference, canonical, fingerprint_of, first_difference
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import Plan
from tests.planner.builders import chunked, full, mamba, many, planned, sliding

GIB = 2**30
LAYERS = many(4, full(), "f") | many(5, sliding(), "s")
STABLE = "653271f5ca6f15e900977f571ce80b38c8766c915cc50e26f92c0e50ca104318"


def base(**fields: Any) -> Plan:
    return planned(LAYERS, GIB, 1024, **fields)


def test_what_only_reports_does_not_count() -> None:
    one, longer = base(), planned(LAYERS, GIB + 1, 2048)
    assert one.num_blocks == longer.num_blocks and one.max_concurrency != longer.max_concurrency
    assert one.fingerprint == longer.fingerprint
    assert first_difference(one, longer) is None


@pytest.mark.parametrize(
    ("other", "path"),
    [
        (planned(LAYERS, GIB // 2, 1024), "rank_layouts[0].num_blocks"),
        (planned(LAYERS, GIB, 1024, layout=Layout.LBNHC), "layout"),
        (planned(many(4, full(), "f") | many(5, sliding(64), "s"), GIB, 1024), "sliding_window_tokens"),
        (
            planned(many(4, full(), "g") | many(5, sliding(), "s"), GIB, 1024),
            "rank_layouts[0].groups[0].layer_names[0]",
        ),
        (planned(many(4, full(), "f") | many(5, chunked(), "s"), GIB, 1024), "rank_layouts[0].groups[1].kind"),
        (planned(many(4, full(), "f") | many(5, full(heads=4), "s"), GIB, 1024), "groups[0].layer_names"),
        (planned(many(4, full(), "f") | many(5, mamba(8192), "s"), GIB, 1024), "groups[1].kind"),
    ],
)
def test_the_first_difference_is_named_with_both_values(other: Plan, path: str) -> None:
    one = base()
    assert one.fingerprint != other.fingerprint
    difference = first_difference(one, other)
    assert isinstance(difference, Difference) and path in difference.path
    assert difference.first != difference.second
    back = first_difference(other, one)
    assert back is not None and (back.first, back.second) == (difference.second, difference.first)


def test_equal_plans_of_different_requests_have_one_fingerprint() -> None:
    assert base().fingerprint == base().fingerprint == fingerprint_of(base())
    assert len(base().fingerprint) == 64


def test_another_process_with_another_hash_seed_agrees() -> None:
    program = "from tests.domain.test_fingerprint import base; print(base().fingerprint)"
    paths = [path for path in sys.path if path]
    for seed in ("0", "12345"):
        found = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": ":".join(paths), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == base().fingerprint


def test_the_canonical_form_of_today_stays() -> None:
    """A change here means that no running pool can be attached to any more: raise CANONICAL_VERSION with it."""
    assert base().fingerprint == STABLE
    assert canonical(base())["version"] == 1
