"""Planner inputs through a daemon of our own: a row computed by hand, recorded rows, and rows that must fail."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhold_client import LocalDaemon
from tests.conformance import run

CONFIG = {"max_model_len": 256, "max_num_batched_tokens": 64, "kv_cache_layout": "LBNHC", "enable_prefix_caching": True}
NAMES = ["layers.0.attn", "layers.1.attn"]
PAGE = 16 * 8 * (128 + 128) * 2  # tokens × heads × (key + value) × bytes of bfloat16
BLOCKS = 80  # of two pages each, in 10 MiB and a rest that is too small for one more
REST = 1234
FULL = {"kind": "full_attention", "block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
# Two equal layers, one request of 256 tokens = 16 blocks: everything follows from these numbers.
BY_HAND: dict[str, Any] = {
    "id": "two_layers",
    "verdict": "exact",
    "oracle": "by hand",
    "input": {
        "config": CONFIG,
        "layer_specs": {
            "full": {
                "kind": "full_attention",
                "block_size": 16,
                "num_kv_heads": 8,
                "head_size": 128,
                "dtype": "bfloat16",
            }
        },
        "workers": [{"available_memory_bytes": BLOCKS * 2 * PAGE + REST, "layers": [[name, "full"] for name in NAMES]}],
    },
    "output": {
        "layer_costs": {"full": {"kind": "full_attention", "page_size_bytes": PAGE, "max_pages": 16, "num_states": 16}},
        "derived": {"max_in_flight_tokens": 64, "num_prefill_lookahead_tokens": 0},
        "max_model_len": 256,
        "workers": [
            {
                "num_blocks": BLOCKS,
                "groups": [
                    {
                        "layers": NAMES,
                        "kind": "full_attention",
                        "block_size": 16,
                        "page_size_bytes": PAGE,
                        "max_memory_usage_bytes": 16 * PAGE,
                        "max_pages": 16,
                        "is_eagle_group": False,
                        "host_resident": False,
                        "enable_kv_transfer": True,
                        "role": "default",
                        "prefix_cacheable": True,
                    }
                ],
                "tensors": [
                    {
                        "size": BLOCKS * 2 * PAGE,
                        "layers": NAMES,
                        "layer_stride": BLOCKS * PAGE,
                        "block_stride": PAGE,
                        "offset": 0,
                    }
                ],
                "pool_bytes_per_block": 2 * PAGE,
                "needed_bytes": 16 * 2 * PAGE,
                "needs_kv_cache_zeroing": False,
            }
        ],
        "scheduler_groups": [{"kind": "full_attention", "block_size": 16, "page_size_bytes": PAGE, "num_layers": 2}],
        "capacity_tokens": BLOCKS * 16,
        "max_concurrency": BLOCKS / 16,
        "cache_config_block_size": 16,
        "scheduler_block_size": 16,
        "hash_block_size": 16,
        "warnings": [],
    },
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with LocalDaemon() as daemon:
        yield daemon.target


def outcome(tmp_path: Path, endpoint: str, *rows: dict[str, Any]) -> int:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run.main(["plan", str(path), "--endpoint", endpoint])


def test_a_plan_computed_by_hand_comes_back(tmp_path: Path, endpoint: str) -> None:
    assert outcome(tmp_path, endpoint, BY_HAND) == 0


def test_too_little_memory_is_refused_with_the_recorded_code(tmp_path: Path, endpoint: str) -> None:
    starved = json.loads(json.dumps(BY_HAND)) | {"verdict": "error", "expect_code": "RESOURCE_EXHAUSTED"}
    starved["input"]["workers"][0]["available_memory_bytes"] = 0
    assert outcome(tmp_path, endpoint, starved) == 0


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("workers", 0, "num_blocks"), BLOCKS + 1),
        (("workers", 0, "tensors", 0, "layer_stride"), PAGE),
        (("workers", 0, "groups", 0, "layers"), NAMES[::-1]),
        (("layer_costs", "full", "page_size_bytes"), PAGE - 1),
        (("max_concurrency",), 5.000000000000001),
        (("warnings",), ["Add 3 padding layers"]),
        (("hash_block_size",), 8),
    ],
)
def test_a_difference_in_any_part_is_reported(
    tmp_path: Path, endpoint: str, capsys: pytest.CaptureFixture[str], path: tuple[str | int, ...], wrong: object
) -> None:
    row = json.loads(json.dumps(BY_HAND))
    place: Any = row["output"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = wrong
    assert outcome(tmp_path, endpoint, row) == 1
    shown = capsys.readouterr().out
    assert "FAIL two_layers" in shown and shown.endswith("0 passed, 1 failed, 0 skipped\n")


def test_an_expected_refusal_that_does_not_come_is_reported(tmp_path: Path, endpoint: str) -> None:
    assert outcome(tmp_path, endpoint, BY_HAND | {"verdict": "error", "expect_code": "RESOURCE_EXHAUSTED"}) == 1


@pytest.mark.parametrize("name", ["plan_modern.jsonl", "plan_legacy.jsonl"])
def test_recorded_rows_conform(shared_dir: Path, endpoint: str, name: str) -> None:
    assert run.main(["plan", str(shared_dir / "vectors" / name), "--endpoint", endpoint]) == 0


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"type": "header"}\nnot json\n')
    with pytest.raises(SystemExit, match=r"broken.jsonl:2: not JSON"):
        run.main(["hashes", str(path)])


def test_a_run_that_checked_nothing_does_not_pass(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert run.main(["hashes", str(path)]) == 1
