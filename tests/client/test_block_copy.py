"""Block copies and zero-fills, against copying each layer's page by itself."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from kvhold_client import block_copy
from kvhold_client.block_copy import BlockCopy, copy_blocks, zero_blocks
from kvhold_client.host_memory import RegionExport
from kvhold_client.layout import LAYOUTS, Placement, layers_view
from kvhold_client.mapping import MappedRegion, RankLayout, map_region
from kvhold_client.mapping_errors import InvalidCopy
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.memory.posix_shm import PosixShmBackend
from tests.client.mapping_cases import one_group_layout, region_bytes

NUM_BLOCKS = 12


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[PosixShmBackend]:
    backend = PosixShmBackend(tmp_path)
    yield backend
    backend.close()


def filled(backend: PosixShmBackend, order: str, *, padding_bytes: int = 0, read_only: bool = False) -> RegionExport:
    layout = one_group_layout(order, num_blocks=NUM_BLOCKS, padding_bytes=padding_bytes)
    request = RegionRequest(pool=PoolName("m"), rank=0, size_bytes=region_bytes(layout))
    region = backend.reserve(request)
    name = backend.export(region).shm_name
    (Path("/dev/shm") / name).write_bytes(random.Random(3).randbytes(region.size_bytes))
    return RegionExport(size_bytes=region.size_bytes, shm_name=name)


def contents(export: RegionExport, order: str, padding_bytes: int = 0) -> numpy.ndarray:
    """[layer, block, …] as a copy."""
    layout = one_group_layout(order, num_blocks=NUM_BLOCKS, padding_bytes=padding_bytes)
    with map_region([export], layout, library="numpy", read_only=True) as region:
        return numpy.stack([view.copy() for view in region.views.values()])


def open_region(export: RegionExport, order: str, library: str, padding_bytes: int = 0) -> MappedRegion:
    layout = one_group_layout(order, num_blocks=NUM_BLOCKS, padding_bytes=padding_bytes)
    return map_region([export], layout, library=library)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("order", LAYOUTS)
def test_copies_reach_every_layer_and_nothing_else(
    backend: PosixShmBackend, order: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    monkeypatch.setattr(block_copy, "MAX_TEMPORARY_BYTES", 1000)  # several parts
    export = filled(backend, order)
    expected = contents(export, order)
    copies = [BlockCopy(1, 5), BlockCopy(1, 6), BlockCopy(2, 11), BlockCopy(0, 3), BlockCopy(10, 4)]
    for copy in copies:
        expected[:, copy.target] = expected[:, copy.source]
    with open_region(export, order, library) as region:
        copy_blocks(region, 0, copies)
    assert (contents(export, order) == expected).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
def test_zeroing_leaves_padding_and_other_blocks_alone(backend: PosixShmBackend, order: str, library: str) -> None:
    pytest.importorskip(library)
    export = filled(backend, order, padding_bytes=64)
    expected = contents(export, order, 64)
    expected[:, [2, 7]] = 0
    raw = (Path("/dev/shm") / export.shm_name).read_bytes()
    with open_region(export, order, library, 64) as region:
        zero_blocks(region, 0, [2, 7])
    assert (contents(export, order, 64) == expected).all()
    now = (Path("/dev/shm") / export.shm_name).read_bytes()
    page = expected[0, 0].nbytes
    changed = sum(a != b for a, b in zip(raw, now, strict=True))
    assert 0 < changed <= 2 * 3 * page


@pytest.mark.parametrize(
    "copies",
    [
        [BlockCopy(1, 2), BlockCopy(3, 2)],
        [BlockCopy(1, 2), BlockCopy(2, 3)],
        [BlockCopy(1, 0)],
        [BlockCopy(1, NUM_BLOCKS)],
        [BlockCopy(-1, 2)],
        [BlockCopy(NUM_BLOCKS, 2)],
    ],
    ids=["two writers", "a chain", "the null block", "target outside", "negative source", "source outside"],
)
def test_a_batch_without_a_defined_result_is_refused_before_anything_is_written(
    backend: PosixShmBackend, copies: list[BlockCopy]
) -> None:
    export = filled(backend, "LBNHC")
    before = (Path("/dev/shm") / export.shm_name).read_bytes()
    with open_region(export, "LBNHC", "numpy") as region, pytest.raises(InvalidCopy):
        copy_blocks(region, 0, copies)
    assert (Path("/dev/shm") / export.shm_name).read_bytes() == before


def test_a_read_only_mapping_copies_nothing(backend: PosixShmBackend) -> None:
    export = filled(backend, "LBNHC")
    layout = one_group_layout("LBNHC", num_blocks=NUM_BLOCKS)
    with map_region([export], layout, library="numpy", read_only=True) as region:
        with pytest.raises(InvalidCopy):
            copy_blocks(region, 0, [BlockCopy(1, 2)])
        with pytest.raises(InvalidCopy):
            zero_blocks(region, 0, [1])


def test_empty_batches_are_fine(backend: PosixShmBackend) -> None:
    export = filled(backend, "BHLNC")
    before = os.stat(f"/dev/shm/{export.shm_name}").st_size
    with open_region(export, "BHLNC", "numpy") as region:
        copy_blocks(region, 0, [])
        zero_blocks(region, 0, [])
    assert os.stat(f"/dev/shm/{export.shm_name}").st_size == before


def test_layers_that_share_their_bytes_are_copied_once(backend: PosixShmBackend) -> None:
    shared = Placement(
        layer_names=("full.0", "window.0"), offset_bytes=0, layer_stride_bytes=0, block_stride_bytes=64,
        page_size_bytes=64, num_blocks=4,
    )  # fmt: skip
    assert layers_view(shared).shape == (1, 4, 8)
    layout = RankLayout(placements=(shared,), groups=(("full.0",), ("window.0",)))
    region = backend.reserve(RegionRequest(pool=PoolName("m"), rank=0, size_bytes=256))
    export = RegionExport(size_bytes=region.size_bytes, shm_name=backend.export(region).shm_name)
    with map_region([export], layout, library="numpy") as mapped:
        mapped.views["full.0"][1] = 9
        copy_blocks(mapped, 1, [BlockCopy(1, 2)])
        assert (mapped.views["window.0"][2] == 9).all()
        assert not mapped.views["window.0"][3].any()
