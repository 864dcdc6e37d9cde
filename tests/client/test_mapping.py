"""From a reserved region to views: write through one process, read through another, in every layout."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from kvhold_client.host_memory import RegionExport
from kvhold_client.layout import LAYOUTS, LayerContent, Placement, StateArray
from kvhold_client.mapping import MappedRegion, RankLayout, map_region
from kvhold_client.mapping_errors import (
    LayoutUnusable,
    MappingInUse,
    PageOutsideRegion,
    RegionNotMappable,
    RegionSizeMismatch,
)
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import Region, RegionRequest
from kvhold_server.memory.posix_shm import PosixShmBackend
from tests.client.mapping_cases import one_group_layout, region_bytes

READER = """
import sys
from kvhold_client.host_memory import RegionExport
from kvhold_client.mapping import map_region
from tests.client.mapping_cases import one_group_layout, region_bytes
name, order = sys.argv[1:]
layout = one_group_layout(order)
export = RegionExport(size_bytes=region_bytes(layout), shm_name=name)
with map_region([export], layout, library="numpy", read_only=True) as region:
    for layer, view in region.views.items():
        for block in range(view.shape[0]):
            for head in range(view.shape[1]):
                for state in range(view.shape[2]):
                    expected = (int(layer.split(".")[1]) * 31 + block) * 64 + head * 16 + state
                    assert (view[block, head, state] == expected).all(), (layer, block, head, state)
    del view
print("read everything")
"""


class Shm:
    """A daemon's side of one region."""

    def __init__(self, backend: PosixShmBackend) -> None:
        self.backend = backend

    def reserve(self, size_bytes: int, *, host: bool = False) -> tuple[Region, RegionExport]:
        region = self.backend.reserve(RegionRequest(pool=PoolName("m"), rank=0, size_bytes=size_bytes, host=host))
        exported = self.backend.export(region)
        return region, RegionExport(size_bytes=region.size_bytes, shm_name=exported.shm_name, host_resident=host)


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Shm]:
    backend = PosixShmBackend(tmp_path)
    yield Shm(backend)
    backend.close()


def bits(view: object) -> numpy.ndarray:
    """A torch or numpy view as numpy bytes, for comparison."""
    if isinstance(view, numpy.ndarray):
        return numpy.ascontiguousarray(view).view(numpy.uint8)
    import torch

    assert isinstance(view, torch.Tensor)
    return view.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("order", LAYOUTS)
def test_bytes_written_by_one_process_are_read_by_another(shm: Shm, order: str, repo_dir: Path) -> None:
    layout = one_group_layout(order)
    _, export = shm.reserve(region_bytes(layout))
    with map_region([export], layout, library="numpy") as region:
        for layer, view in region.views.items():
            blocks, heads, states, _ = view.shape
            ids = numpy.arange(blocks)[:, None, None] + int(layer.split(".")[1]) * 31
            view[...] = (ids * 64 + numpy.arange(heads)[:, None] * 16 + numpy.arange(states))[..., None]
        del view
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(repo_dir / d) for d in ("", "proto", "client"))}
    read = subprocess.run(
        [sys.executable, "-c", READER, export.shm_name, order],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert read.stdout.strip() == "read everything", read.stderr


@pytest.mark.parametrize("order", LAYOUTS)
def test_torch_and_numpy_see_the_same_elements(shm: Shm, order: str) -> None:
    torch = pytest.importorskip("torch")
    layout = one_group_layout(order)
    _, export = shm.reserve(region_bytes(layout))
    with (
        map_region([export], layout, library="torch") as written,
        map_region([export], layout, library="numpy") as read,
    ):
        for index, view in enumerate(written.views.values()):
            assert view.dtype == torch.bfloat16
            assert view.shape == (5, 2, 4, 16)
            view.copy_(torch.arange(view.numel(), dtype=torch.float32).reshape(view.shape) % 251 + index)
        for layer in written.views:
            assert (bits(written.views[layer]) == bits(read.views[layer])).all()
        del view


def test_key_and_value_are_the_halves_of_the_content(shm: Shm) -> None:
    layout = one_group_layout("BLNHC", head_size=8)
    _, export = shm.reserve(region_bytes(layout))
    with map_region([export], layout, library="numpy") as region:
        region.key("layers.1")[...] = 1
        region.value("layers.1")[...] = 2
        assert region.key("layers.1").shape == (5, 2, 4, 8)
        assert (region.views["layers.1"][..., :8] == 1).all()
        assert (region.views["layers.1"][..., 8:] == 2).all()
        assert (region.views["layers.0"] == 0).all()


def test_latent_rows_have_no_value(shm: Shm) -> None:
    placement = Placement(
        layer_names=("mla",), offset_bytes=0, layer_stride_bytes=4608, block_stride_bytes=4608, page_size_bytes=4608,
        num_blocks=1, num_states=4, state_stride_bytes=1152, head_stride_bytes=4608, content_size_bytes=1152,
    )  # fmt: skip
    content = LayerContent(dtype="bfloat16", key_size_elems=576)
    layout = RankLayout(placements=(placement,), groups=(("mla",),), contents={"mla": content})
    _, export = shm.reserve(region_bytes(layout))
    with map_region([export], layout, library="numpy") as region:
        assert region.views["mla"].shape == (1, 1, 4, 576)
        with pytest.raises(LayoutUnusable):
            region.value("mla")


def test_packed_formats_come_as_bytes(shm: Shm) -> None:
    layout = one_group_layout("LBNHC", dtype="float8_e4m3fn")
    packed = LayerContent(dtype="float8_e4m3fn", key_size_elems=8, value_size_elems=8, packed=True)
    layout = replace(layout, contents=dict.fromkeys(layout.contents, packed))
    _, export = shm.reserve(region_bytes(layout))
    with map_region([export], layout, library="numpy") as region:
        view = region.views["layers.0"]
        assert (view.dtype, view.shape) == (numpy.uint8, (5, 2, 4, 16))
        del view
        with pytest.raises(LayoutUnusable):
            region.key("layers.0")


def test_fp8_is_a_real_dtype_in_torch(shm: Shm) -> None:
    torch = pytest.importorskip("torch")
    layout = one_group_layout("LBNHC", dtype="float8_e4m3fn")
    _, export = shm.reserve(region_bytes(layout))
    with map_region([export], layout, library="torch") as region:
        assert region.views["layers.0"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_recurrent_layer_has_one_view_per_state(shm: Shm, library: str) -> None:
    pytest.importorskip(library)
    states = (StateArray(shape=(3, 4), dtype="bfloat16"), StateArray(shape=(2, 5), dtype="float32"))
    page = 128  # 24 + 40 bytes, padded
    placement = Placement(
        layer_names=("ssm",), offset_bytes=0, layer_stride_bytes=page, block_stride_bytes=page, page_size_bytes=page,
        num_blocks=4,
    )  # fmt: skip
    content = {"ssm": LayerContent(states=states)}
    layout = RankLayout(placements=(placement,), groups=(("ssm",),), contents=content)
    _, export = shm.reserve(region_bytes(layout))
    with map_region([export], layout, library=library) as region:
        convolution, recurrence = region.views["ssm"]
        assert tuple(convolution.shape) == (4, 3, 4)
        assert tuple(recurrence.shape) == (4, 2, 5)
        recurrence[2] = 1.5
        raw = region.make_view(placement, _bytes_of(placement))
        assert numpy.frombuffer(bits(raw)[2].tobytes()[24:64], dtype=numpy.float32).tolist() == [1.5] * 10
        del convolution, recurrence, raw


def _bytes_of(placement: Placement):  # type: ignore[no-untyped-def]
    from kvhold_client.layout import StridedView

    return StridedView(
        dtype="uint8",
        offset_bytes=placement.offset_bytes,
        shape=(placement.num_blocks, placement.page_size_bytes),
        strides_bytes=(placement.block_stride_bytes, 1),
    )


def test_states_that_do_not_fit_their_page_are_refused(shm: Shm) -> None:
    placement = Placement(
        layer_names=("ssm",), offset_bytes=0, layer_stride_bytes=64, block_stride_bytes=64, page_size_bytes=64,
        num_blocks=1,
    )  # fmt: skip
    content = {"ssm": LayerContent(states=(StateArray(shape=(17,), dtype="float32"),))}
    layout = RankLayout(placements=(placement,), groups=(("ssm",),), contents=content)
    _, export = shm.reserve(64)
    with map_region([export], layout, library="numpy") as region, pytest.raises(LayoutUnusable):
        _ = region.views


def test_kernel_blocks_split_a_dense_page_and_nothing_else(shm: Shm) -> None:
    layout = one_group_layout("LBHNC")
    _, export = shm.reserve(region_bytes(layout))
    with map_region([export], layout, library="numpy") as region:
        split = region.kernel_block_view("layers.1", 2)
        assert split.shape == (10, 2, 2, 16)
        split[...] = numpy.arange(10)[:, None, None, None]
        page = region.views["layers.1"][3].reshape(-1)
        assert set(page[: page.size // 2]) == {6}
        assert set(page[page.size // 2 :]) == {7}
        del split, page
        with pytest.raises(LayoutUnusable):
            region.kernel_block_view("layers.1", 3)
    for order, padding in (("BLHNC", 0), ("LHBNC", 0), ("LBNHC", 64)):
        layout = one_group_layout(order, padding_bytes=padding)
        with pytest.raises(LayoutUnusable):
            MappedRegion(layout, {}, read_only=False).kernel_block_view("layers.1", 2)


def test_unmap_refuses_while_a_view_lives_and_then_works(shm: Shm) -> None:
    for library in ("numpy", "torch"):
        pytest.importorskip(library)
        layout = one_group_layout("LBNHC")
        region, export = shm.reserve(region_bytes(layout))
        mapped = map_region([export], layout, library=library)
        kept = mapped.views["layers.0"]
        with pytest.raises(MappingInUse):
            mapped.unmap()
        kept[...] = 3  # still ours
        assert bits(mapped.views["layers.0"]).any()
        del kept
        gc.collect()
        mapped.unmap()
        mapped.unmap()
        assert not mapped.is_mapped
        with pytest.raises(RegionNotMappable):
            _ = mapped.views
        shm.backend.release(region)


def test_a_read_only_mapping_cannot_be_written(shm: Shm) -> None:
    layout = one_group_layout("LBNHC")
    _, export = shm.reserve(region_bytes(layout))
    with map_region([export], layout, library="numpy", read_only=True) as region, pytest.raises(ValueError):
        region.views["layers.0"][0] = 1


def test_attaching_writes_nothing(shm: Shm) -> None:
    """R11."""
    layout = one_group_layout("LHBNC")
    region, export = shm.reserve(region_bytes(layout))
    path = Path("/dev/shm") / export.shm_name
    path.write_bytes(os.urandom(region.size_bytes))
    before = path.read_bytes()
    with map_region([export], layout) as mapped:
        assert len(mapped.views) == 3
    assert path.read_bytes() == before


def test_the_bytes_outlive_the_daemon(shm: Shm) -> None:
    layout = one_group_layout("LBNHC")
    region, export = shm.reserve(region_bytes(layout))
    with map_region([export], layout, library="numpy") as mapped:
        mapped.views["layers.2"][...] = 7
        shm.backend.release(region)
        assert (mapped.views["layers.2"] == 7).all()
        mapped.views["layers.2"][...] = 8


def test_a_plan_that_does_not_fit_the_region_is_refused_before_mapping(shm: Shm) -> None:
    layout = one_group_layout("LBNHC", num_blocks=500)
    _, export = shm.reserve(4096)
    with pytest.raises(PageOutsideRegion) as caught:
        map_region([export], layout)
    assert caught.value.region_bytes == export.size_bytes


def test_a_region_shorter_than_its_export_is_refused_not_a_bus_error(shm: Shm) -> None:
    """K8S-05: SIGBUS is no error message."""
    layout = one_group_layout("LBNHC")
    _, export = shm.reserve(region_bytes(layout))
    os.truncate(f"/dev/shm/{export.shm_name}", 100)
    with pytest.raises(RegionSizeMismatch):
        map_region([export], layout)


def test_names_that_are_gone_or_wrong_are_typed_errors() -> None:
    layout = one_group_layout("LBNHC")
    for name in ("kvhold.nothing", "../etc/passwd", ""):
        with pytest.raises(RegionNotMappable):
            map_region([RegionExport(size_bytes=region_bytes(layout), shm_name=name)], layout)


def test_an_error_in_the_second_region_unmaps_the_first(shm: Shm) -> None:
    layout = one_group_layout("LBNHC")
    _, export = shm.reserve(region_bytes(layout))
    missing = RegionExport(size_bytes=4096, shm_name="kvhold.nothing", host_resident=True)
    before = _num_mappings(export.shm_name)
    with pytest.raises(RegionNotMappable):
        map_region([export, missing], layout)
    assert _num_mappings(export.shm_name) == before


def _num_mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


def test_views_go_to_other_libraries_without_copying(shm: Shm) -> None:
    """DLPack."""
    torch = pytest.importorskip("torch")
    layout = one_group_layout("BHLNC", dtype="float16")
    _, export = shm.reserve(region_bytes(layout))
    with map_region([export], layout, library="numpy") as region:
        taken = torch.from_dlpack(region.views["layers.1"])
        taken[2] = 5
        assert (region.views["layers.1"][2] == 5).all()
        with pytest.raises(MappingInUse):
            region.unmap()
        del taken
