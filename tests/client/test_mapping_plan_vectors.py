"""The address formula of every recorded plan: no two layers of a group overlap, and every address lies inside."""

import json
from collections import Counter
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest

from kvhold_client.layout import DTYPE_SIZE_BYTES, LAYOUTS, Placement, check_inside, page_strides
from kvhold_client.mapping_errors import LayoutUnusable

Json = dict[str, Any]
MAX_BLOCKS_CHECKED = 7


def shape_of(spec: Json, block_size: int) -> tuple[int, int, int]:
    """(heads, states, content bytes) of one page."""
    if spec["kind"] == "mamba":
        sizes = zip(spec["shapes"], spec["dtypes"], strict=False)
        return 1, 1, sum(prod(shape) * DTYPE_SIZE_BYTES[dtype] for shape, dtype in sizes)
    latent = spec["kind"] in ("mla_attention", "hidden_state", "sliding_window_mla")
    value_size = spec.get("head_size_v", 0 if latent else spec["head_size"])
    content = spec.get("state_content_bytes") or (spec["head_size"] + value_size) * DTYPE_SIZE_BYTES[spec["dtype"]]
    per_state = Fraction(str(spec.get("tokens_per_state", 1)))
    states = int(block_size / per_state) if per_state > 0 else 1
    return spec.get("num_head_slots") or spec["num_kv_heads"], states, content


def placements_of(row: Json, worker: Json, specs: dict[str, Json]) -> list[Placement]:
    """The recorded tensors with the inner strides that the layout implies."""
    layout = row["input"]["config"]["kv_cache_layout"]
    group_of = {name: group for group in worker["groups"] for name in group["layers"]}
    placements = []
    for tensor in worker["tensors"]:
        first = tensor["layers"][0]
        group = group_of[first]
        num_blocks = worker["num_blocks"]
        if first in worker.get("draft_layer_names", ()):
            num_blocks = worker["draft_num_blocks"]
        if tensor.get("host_resident"):
            num_blocks, layout_here = worker["hisparse_host_num_blocks"], "LBNHC"
        else:
            layout_here = layout
        page = group["page_size_bytes"]
        if group["kind"] == "uniform_type":
            page = group["layer_page_size_bytes"][group["layers"].index(first)]
        shape = shape_of(specs[first], group["block_size"]) if first in specs else (1, 1, page)
        placements.append(_placement(tensor, shape, page, num_blocks, layout_here, worker))
    return placements


def _placement(
    tensor: Json, shape: tuple[int, int, int], page: int, num_blocks: int, layout: str, worker: Json
) -> Placement:
    heads, states, content = shape
    if heads * states * content > page:  # unification changed the block behind the recorded spec: an opaque page
        heads, states, content = 1, 1, page
    strides = page_strides(
        layout,
        num_layers=len(tensor["layers"]),
        num_blocks=num_blocks,
        num_heads=heads,
        num_states=states,
        content_size_bytes=content,
        page_size_bytes=page,
        bytes_per_block=_bytes_per_block(tensor, worker),
    )
    if not _ignores_the_layout(tensor, page, layout):
        assert (tensor["layer_stride"], tensor["block_stride"]) == (
            strides.layer_stride_bytes,
            strides.block_stride_bytes,
        )
    return Placement(
        layer_names=tuple(tensor["layers"]),
        offset_bytes=tensor["offset"],
        layer_stride_bytes=tensor["layer_stride"],
        block_stride_bytes=tensor["block_stride"],
        head_stride_bytes=strides.head_stride_bytes,
        state_stride_bytes=strides.state_stride_bytes,
        page_size_bytes=page,
        num_blocks=num_blocks,
        num_heads=heads,
        num_states=states,
        content_size_bytes=content,
        host_resident=bool(tensor.get("host_resident")),
    )


def _bytes_per_block(tensor: Json, worker: Json) -> int:
    """The recorded number is that of the device groups alone, except with host-resident rows, where it is useless."""
    with_host_rows = worker.get("hisparse_host_num_blocks") is not None
    return int(tensor["block_stride"] if with_host_rows else worker["pool_bytes_per_block"])


def _ignores_the_layout(tensor: Json, page: int, layout: str) -> bool:
    """One tensor per layer at fixed regions (target, indexer and drafter layers that alias), whatever the layout."""
    return layout[0] == "B" and len(tensor["layers"]) == 1 and tensor["block_stride"] == page


def runs_of(placement: Placement) -> numpy.ndarray:
    """[start, end) of every contiguous run of some blocks: first, last, and some between."""
    blocks = numpy.unique(numpy.linspace(0, placement.num_blocks - 1, MAX_BLOCKS_CHECKED).astype(numpy.int64))
    axes = [numpy.arange(len(placement.layer_names)) * placement.layer_stride_bytes]
    axes.append(blocks * placement.block_stride_bytes)
    length = placement.used_page_bytes
    if not placement.is_dense:
        axes.append(numpy.arange(placement.num_heads) * placement.head_stride_bytes)
        axes.append(numpy.arange(placement.num_states) * placement.state_stride_bytes)
        length = placement.content_bytes
    flat = numpy.array([placement.offset_bytes], dtype=numpy.int64)
    for axis in axes:
        flat = (flat[:, None] + axis[None, :]).reshape(-1)
    return numpy.stack([flat, flat + length], axis=1)


def check_worker(worker: Json, placements: list[Placement]) -> None:
    for host in (True, False):
        sizes = {tensor["size"] for tensor in worker["tensors"] if bool(tensor.get("host_resident")) == host}
        if sizes:
            assert len(sizes) == 1, "one allocation"
            check_inside(placements, region_bytes=sizes.pop(), host_resident=host)
    for group in worker["groups"]:
        names = set(group["layers"])
        runs = [runs_of(placement) for placement in placements if names & set(placement.layer_names)]
        assert sum(len(p.layer_names) for p in placements if names & set(p.layer_names)) == len(names)
        if runs:
            ordered = numpy.concatenate(runs)
            ordered = ordered[numpy.argsort(ordered[:, 0], kind="stable")]
            assert (ordered[1:, 0] >= ordered[:-1, 1]).all(), f"layers of {group['layers'][:3]}… overlap"


def test_every_recorded_plan_keeps_its_layers_apart_and_inside(shared_dir: Path) -> None:
    num_workers = Counter[str]()
    for line in (shared_dir / "vectors" / "plan_modern.jsonl").open():
        row = json.loads(line)
        if row["verdict"] != "exact" or "workers" not in row["output"]:
            continue
        for index, worker in enumerate(row["output"]["workers"]):
            if not worker["tensors"]:
                continue
            layers = row["input"]["workers"][index]["layers"]
            specs = {name: row["input"]["layer_specs"][spec] for name, spec in layers}
            try:
                check_worker(worker, placements_of(row, worker, specs))
            except Exception as error:
                raise AssertionError(f"{row['id']}, worker {index}: {error}") from error
            num_workers[row["input"]["config"]["kv_cache_layout"]] += 1
    assert set(num_workers) == set(LAYOUTS)
    assert sum(num_workers.values()) > 350


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("num_blocks", [1, 4])
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("num_states", [1, 5])
def test_small_plans_fill_their_region_without_gap_or_overlap(
    layout: str, num_layers: int, num_blocks: int, num_heads: int, num_states: int
) -> None:
    content = 6
    page = num_heads * num_states * content
    strides = page_strides(
        layout, num_layers=num_layers, num_blocks=num_blocks, num_heads=num_heads, num_states=num_states,
        content_size_bytes=content, page_size_bytes=page, bytes_per_block=num_layers * page,
    )  # fmt: skip
    touched = numpy.zeros(num_layers * num_blocks * page, dtype=numpy.int64)
    for layer, block, head, state in numpy.ndindex(num_layers, num_blocks, num_heads, num_states):
        start = (
            layer * strides.layer_stride_bytes
            + block * strides.block_stride_bytes
            + head * strides.head_stride_bytes
            + state * strides.state_stride_bytes
        )
        touched[start : start + content] += 1
    assert (touched == 1).all()


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_a_padded_page_with_several_heads_cannot_be_scattered(layout: str) -> None:
    with pytest.raises(LayoutUnusable):
        page_strides(
            layout, num_layers=2, num_blocks=3, num_heads=2, num_states=4, content_size_bytes=8,
            page_size_bytes=128, bytes_per_block=256,
        )  # fmt: skip
