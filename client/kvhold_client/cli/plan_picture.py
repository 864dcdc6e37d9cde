"""What lies where in a block, drawn.

    block 0     0 B                                         160 KiB
    group 0     ████▓▓▓▓████▓▓▓▓████▓▓▓▓████▓▓▓▓████▓▓▓▓
    group 1     ████▓▓▓▓████▓▓▓▓████▓▓▓▓················

One page after the other in turn as █ and ▓, padding ░, nothing ·. A block's bytes are one run where blocks are
outermost. Where layers are, its pages lie in as many places, one for each layer: the picture puts them side by side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvhold_client.cli.units import format_bytes, format_count
from kvhold_client.layout import Placement
from kvhold_client.plan import Plan, PlannedGroup, PlannedRank

WIDTH = 64
MAX_RUNS_SHOWN = 4
PAGE, OTHER_PAGE, PADDING, NOTHING = "█", "▓", "░", "·"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Layers of one group that follow each other: where their pages of block 0 are."""

    group: int
    first_layer: str
    last_layer: str
    num_layers: int
    begin_bytes: int  # in the picture
    offset_bytes: int  # of the first page, in the region
    layer_stride_bytes: int
    page_size_bytes: int
    used_page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Block 0 of some equal ranks: as lines to print, and as numbers."""

    ranks: tuple[int, ...]
    lines: tuple[str, ...]
    runs: tuple[Run, ...]


def pictures(plan: Plan) -> list[Picture]:
    """One for each rank that lies otherwise than those before it."""
    alike: dict[PlannedRank, list[int]] = {}
    for number, rank in enumerate(plan.ranks):
        alike.setdefault(rank, []).append(number)
    return [
        Picture(ranks=tuple(numbers), lines=tuple(picture_lines(rank)), runs=tuple(runs_of(rank)))
        for rank, numbers in alike.items()
    ]


def runs_of(rank: PlannedRank) -> list[Run]:
    """The runs of all groups, in the order of the tensors."""
    runs = []
    for number, group in enumerate(rank.groups):
        cursor = 0
        names = set(group.layer_names)
        for placement in rank.placements:
            here = [name for name in placement.layer_names if name in names]
            if here:
                runs.append(_run(number, here, placement, rank, cursor))
                cursor += len(here) * placement.page_size_bytes
    return runs


def _run(group: int, names: Sequence[str], placement: Placement, rank: PlannedRank, cursor: int) -> Run:
    return Run(
        group=group,
        first_layer=names[0],
        last_layer=names[-1],
        num_layers=len(names),
        begin_bytes=_begin(placement, rank, cursor),
        offset_bytes=placement.offset_bytes + placement.layer_names.index(names[0]) * placement.layer_stride_bytes,
        layer_stride_bytes=placement.layer_stride_bytes,
        page_size_bytes=placement.page_size_bytes,
        used_page_bytes=placement.used_page_bytes,
    )


def _begin(placement: Placement, rank: PlannedRank, cursor: int) -> int:
    """Where the run begins in the picture: its offset in a block, or, layer after layer, that of one block's share."""
    if placement.block_stride_bytes == rank.bytes_per_block and placement.offset_bytes < rank.bytes_per_block:
        return placement.offset_bytes
    share = placement.offset_bytes // max(1, placement.num_blocks)
    return share if share >= cursor and share < rank.bytes_per_block else cursor


def picture_lines(rank: PlannedRank) -> Iterator[str]:
    """The drawing, a line per group, and where its runs begin."""
    runs = runs_of(rank)
    shown = [number for number, group in enumerate(rank.groups) if _in_blocks(group, rank)]
    label = max((len(f"group {number}") for number in shown), default=0)
    end = format_bytes(rank.bytes_per_block)
    yield f"{'block 0':<{label}}  0 B{end:>{WIDTH - 3}}"
    for number in shown:
        own = [run for run in runs if run.group == number]
        yield f"{f'group {number}':<{label}}  {_bar(own, rank.bytes_per_block)}"
        for run in own[:MAX_RUNS_SHOWN]:
            yield f"{'':<{label}}  {_described(run)}"
        if len(own) > MAX_RUNS_SHOWN:
            yield f"{'':<{label}}  … and {len(own) - MAX_RUNS_SHOWN} more"


def _in_blocks(group: PlannedGroup, rank: PlannedRank) -> bool:
    drafted = set(group.layer_names) & set(rank.draft_layer_names)
    return not group.host_resident and not drafted


def _bar(runs: Sequence[Run], block_bytes: int) -> str:
    return "".join(_cell(runs, block_bytes * (2 * column + 1) // (2 * WIDTH)) for column in range(WIDTH))


def _cell(runs: Sequence[Run], position: int) -> str:
    before = 0
    for run in runs:
        inside = position - run.begin_bytes
        if 0 <= inside < run.num_layers * run.page_size_bytes:
            page, rest = divmod(inside, run.page_size_bytes)
            if rest >= run.used_page_bytes:
                return PADDING
            return OTHER_PAGE if (page + before) % 2 else PAGE
        before += run.num_layers
    return NOTHING


def _described(run: Run) -> str:
    layers = run.first_layer if run.num_layers == 1 else f"{run.first_layer} … {run.last_layer}"
    padding = run.page_size_bytes - run.used_page_bytes
    text = f"{run.num_layers} × {format_bytes(run.page_size_bytes)} from byte {format_count(run.offset_bytes)}"
    if run.num_layers > 1:
        text += f", each {format_count(run.layer_stride_bytes)} behind the last"
    return f"{text}: {layers}" + (f" ({format_bytes(padding)} of each page are padding)" if padding else "")
