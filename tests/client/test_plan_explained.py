"""`kvhold plan` shows where bytes go; what it draws and what it puts into JSON say the same."""

import json
from typing import Any

import pytest

from kvhold_client.cli.main import main
from kvhold_client.cli.plan_explained import ranks_text
from kvhold_client.cli.plan_picture import WIDTH, picture_lines, runs_of
from kvhold_client.layout import Placement
from kvhold_client.local_daemon import LocalDaemon
from kvhold_client.plan import PlannedGroup, PlannedRank


def group(*names: str, **fields: Any) -> PlannedGroup:
    values: dict[str, Any] = {
        "kind": "full_attention",
        "layer_names": names,
        "block_size_tokens": 16,
        "page_size_bytes": 100,
        "max_request_blocks": 4,
        "max_request_bytes": 400,
        "prefix_cacheable": True,
        "is_eagle_group": False,
        "host_resident": False,
    }
    return PlannedGroup(**(values | fields))


def placement(*names: str, offset: int, stride: int, block: int, used: int = 100) -> Placement:
    return Placement(
        layer_names=names,
        offset_bytes=offset,
        layer_stride_bytes=stride,
        block_stride_bytes=block,
        page_size_bytes=100,
        num_blocks=10,
        content_size_bytes=used,
    )


def rank(block_bytes: int, groups: tuple[PlannedGroup, ...], placements: tuple[Placement, ...]) -> PlannedRank:
    return PlannedRank(
        num_blocks=10,
        bytes_per_block=block_bytes,
        needed_bytes=0,
        region_size_bytes=10 * block_bytes,
        host_region_size_bytes=0,
        groups=groups,
        placements=placements,
    )


def bars(of: PlannedRank) -> list[str]:
    return [line.split("  ")[1] for line in picture_lines(of) if line.startswith("group")]


BLOCK_OUTERMOST = rank(
    400,
    (group("a", "b", "c", "d"), group("e", "f")),
    (
        placement("a", "b", "c", "d", offset=0, stride=100, block=400),
        placement("e", "f", offset=0, stride=100, block=400, used=50),
    ),
)
LAYER_OUTERMOST = rank(
    400,
    (group("a", "b", "c", "d"), group("e", "f")),
    (
        placement("a", "b", "c", "d", offset=0, stride=1000, block=100),
        placement("e", "f", offset=0, stride=1000, block=100, used=50),
    ),
)


@pytest.mark.parametrize("of", [BLOCK_OUTERMOST, LAYER_OUTERMOST])
def test_pages_padding_and_nothing_are_drawn_in_proportion(of: PlannedRank) -> None:
    page = WIDTH // 4
    assert bars(of) == [
        "█" * page + "▓" * page + "█" * page + "▓" * page,
        "█" * (page // 2) + "░" * (page // 2) + "▓" * (page // 2) + "░" * (page // 2) + "·" * (2 * page),
    ]


def test_runs_say_where_the_bytes_of_block_0_are() -> None:
    runs = runs_of(LAYER_OUTERMOST)
    assert [(run.group, run.num_layers, run.offset_bytes, run.layer_stride_bytes) for run in runs] == [
        (0, 4, 0, 1000),
        (1, 2, 0, 1000),
    ]
    assert "50 B of each page are padding" in "\n".join(picture_lines(LAYER_OUTERMOST))


def test_mixed_pages_of_one_group_lie_behind_each_other_in_either_order_of_axes() -> None:
    together = (group("a", "b"),)
    block = (placement("a", offset=0, stride=100, block=200), placement("b", offset=100, stride=100, block=200))
    layer = (placement("a", offset=0, stride=1000, block=100), placement("b", offset=1000, stride=1000, block=100))
    assert bars(rank(200, together, block)) == bars(rank(200, together, layer)) == ["█" * 32 + "▓" * 32]


def test_what_lies_in_other_pools_is_not_drawn_into_the_block() -> None:
    other = rank(
        100,
        (group("a"), group("h", host_resident=True)),
        (placement("a", offset=0, stride=100, block=100), placement("h", offset=0, stride=100, block=100)),
    )
    assert len(bars(other)) == 1


def test_ranks_are_named_shortly() -> None:
    assert [ranks_text(ranks) for ranks in ([3], [0, 1, 2], [0, 2, 5])] == ["rank 3", "ranks 0–2", "ranks 0, 2, 5"]


def test_json_has_what_the_tables_show(capsys: pytest.CaptureFixture[str]) -> None:
    with LocalDaemon("--backend", "fake") as daemon:
        asked = ["plan", "--model", "gemma-3-27b", "--strategy", "compact", "--target", daemon.target]
        assert main(asked, {}) == 0
        shown = capsys.readouterr().out
        assert main([*asked, "-o", "json"], {}) == 0
        document = json.loads(capsys.readouterr().out)
    explained = document["explanation"]
    for share in explained["ranks"][0]["kinds"]:
        assert share["kind"] in shown
    assert {check["description"] for check in explained["checks"]} <= set(shown.replace("  ", "\n").split("\n"))
    assert f"{explained['longest_request_tokens']:,} tokens" in shown
    assert f"{explained['memory_steps'][1]['capacity_tokens']:,} tokens" in shown
    assert document["choice"]["chosen"]["description"] in shown
    assert all(line in shown for line in document["pictures"][0]["lines"])
    held = sum(share["request_bytes"] for share in explained["ranks"][0]["kinds"])
    wasted = sum(waste["size_bytes"] for waste in explained["ranks"][0]["request_waste"])
    assert held + wasted == explained["ranks"][0]["request_bytes"]


def test_bounds_of_compact_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "gemma-3-27b", "--strategy", "compact", "--max-groups", "4", "--keep-layout"]
    assert main([*asked, "-o", "json"], {}) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layout"] == "LBNHC"
    assert len(document["groups"]) <= 4
