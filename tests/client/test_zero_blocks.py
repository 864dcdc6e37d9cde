"""Zeroing blocks of a group whose layers have pages of different sizes."""

from pathlib import Path

import numpy
import pytest

from kvhold_client.block_copy import zero_blocks
from kvhold_client.host_memory import RegionExport
from kvhold_client.layout import LayerContent, Placement
from kvhold_client.mapping import RankLayout, map_region
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.memory.posix_shm import PosixShmBackend

NUM_BLOCKS = 6


def segment(name: str, offset: int, page: int) -> Placement:
    return Placement(
        layer_names=(name,),
        offset_bytes=offset,
        layer_stride_bytes=page * NUM_BLOCKS,
        block_stride_bytes=page,
        page_size_bytes=page,
        num_blocks=NUM_BLOCKS,
        content_size_bytes=page,
    )


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_plan_26_each_segment_is_zeroed_by_its_own_stride(tmp_path: Path, library: str) -> None:
    """PLAN-26: pages of 16384 and of 4096; block 3 is [49152, 65536) of the one and [12288, 16384) of the other."""
    pytest.importorskip(library)
    large, small = segment("large", 0, 16384), segment("small", 16384 * NUM_BLOCKS, 4096)
    content = LayerContent(packed=True)
    layout = RankLayout(
        placements=(large, small), groups=(("large", "small"),), contents={"large": content, "small": content}
    )
    backend = PosixShmBackend(tmp_path)
    try:
        region = backend.reserve(RegionRequest(pool=PoolName("z"), rank=0, size_bytes=small.end_bytes))
        name = backend.export(region).shm_name
        file = Path("/dev/shm") / name
        file.write_bytes(b"\x01" * region.size_bytes)
        export = RegionExport(size_bytes=region.size_bytes, shm_name=name)
        with map_region([export], layout, library=library) as mapped:
            zero_blocks(mapped, 0, [3])
        held = numpy.frombuffer(file.read_bytes(), dtype=numpy.uint8)
    finally:
        backend.close()
    expected = numpy.ones(region.size_bytes, dtype=numpy.uint8)
    expected[49152:65536] = 0
    base = small.offset_bytes
    expected[base + 12288 : base + 16384] = 0
    assert (held == expected).all()
