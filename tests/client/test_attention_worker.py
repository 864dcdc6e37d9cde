"""The worked worker: paged views against contiguous memory, bit by bit, with and without a daemon."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhold_client.host_memory import RegionExport
from kvhold_client.layout import DTYPE_SIZE_BYTES, LAYOUTS, LayerContent, Placement, StateArray, page_strides
from kvhold_client.mapping import MappedRegion, RankLayout, map_region
from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import RegionRequest
from kvhold_server.memory.posix_shm import PosixShmBackend

pytest.importorskip("torch")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import tiny_model as tiny  # noqa: E402

BLOCK = 16
NUM_BLOCKS = 40
PAGE = 2048
LAYERS_PER_KIND = 2


def local_layout(order: str) -> RankLayout:
    """The example's model planned by hand: four groups of two layers, side by side instead of aliased."""
    placements, groups, contents = [], [], {}
    for index, kind in enumerate(dict.fromkeys(tiny.KINDS)):
        names = tuple(n for n, k in zip(tiny.LAYER_NAMES, tiny.KINDS, strict=True) if k == kind)
        heads, content_elems = tiny.ROW_SHAPE.get(kind, (1, 0))
        states = (BLOCK, content_elems * 2) if content_elems else (1, PAGE)
        strides = page_strides(
            order, num_layers=LAYERS_PER_KIND, num_blocks=NUM_BLOCKS, num_heads=heads, num_states=states[0],
            content_size_bytes=states[1], page_size_bytes=PAGE, bytes_per_block=4 * LAYERS_PER_KIND * PAGE,
        )  # fmt: skip
        step = LAYERS_PER_KIND * PAGE * (1 if order[0] == "B" else NUM_BLOCKS)
        placements.append(
            Placement(
                layer_names=names, offset_bytes=index * step, num_blocks=NUM_BLOCKS, num_heads=heads,
                num_states=states[0], content_size_bytes=states[1] if content_elems else 0, page_size_bytes=PAGE,
                layer_stride_bytes=strides.layer_stride_bytes, block_stride_bytes=strides.block_stride_bytes,
                head_stride_bytes=strides.head_stride_bytes, state_stride_bytes=strides.state_stride_bytes,
            )
        )  # fmt: skip
        groups.append(names)
        contents.update(dict.fromkeys(names, _content(kind)))
    return RankLayout(placements=tuple(placements), groups=tuple(groups), contents=contents)


def _content(kind: str) -> LayerContent:
    if kind == "state":
        convolution = StateArray(shape=tiny.CONVOLUTION_SHAPE, dtype="bfloat16")
        recurrence = StateArray(shape=tiny.RECURRENCE_SHAPE, dtype="float32")
        assert convolution.size_bytes + recurrence.size_bytes <= PAGE and DTYPE_SIZE_BYTES["float32"] == 4
        return LayerContent(states=(convolution, recurrence))
    return LayerContent(dtype="bfloat16", key_size_elems=tiny.ROW_SHAPE[kind][1])


@pytest.fixture
def export(tmp_path: Path) -> Iterator[RegionExport]:
    backend = PosixShmBackend(tmp_path)
    size = 4 * LAYERS_PER_KIND * PAGE * NUM_BLOCKS
    region = backend.reserve(RegionRequest(pool=PoolName("tiny"), rank=0, size_bytes=size))
    yield RegionExport(size_bytes=region.size_bytes, shm_name=backend.export(region).shm_name)
    backend.close()


def shuffled_tables(num_tokens: int) -> list[list[int]]:
    """Blocks in random order, as a pool that has been used for a while hands them out."""
    rng = random.Random(11)
    return [rng.sample(range(1, NUM_BLOCKS), -(-num_tokens // BLOCK)) for _ in range(4)]


def compute(cache: tiny.Cache, num_tokens: int) -> list[bytes]:
    model = tiny.TinyModel()
    tokens = itertools.cycle([3, 141 % tiny.VOCABULARY, 59, 26, 5])
    return [model.forward(next(tokens), position, cache).numpy().tobytes() for position in range(num_tokens)]


@pytest.mark.parametrize("order", LAYOUTS)
def test_paged_attention_is_bit_identical_to_contiguous_in_every_layout(export: RegionExport, order: str) -> None:
    num_tokens = 70
    expected = compute(tiny.ContiguousCache(128), num_tokens)
    with map_region([export], local_layout(order), library="torch") as region:
        assert compute(tiny.PagedCache(region, shuffled_tables(num_tokens), BLOCK), num_tokens) == expected


def next_logits(region: MappedRegion, num_tokens: int) -> bytes:
    cache = tiny.PagedCache(region, shuffled_tables(num_tokens), BLOCK)
    logits: bytes = tiny.TinyModel().forward(7, num_tokens, cache).numpy().tobytes()
    return logits


@pytest.mark.parametrize("kind", ["full", "window", "latent", "state"])
def test_a_changed_byte_in_any_kind_of_layer_changes_the_answer(export: RegionExport, kind: str) -> None:
    """What the comparison is worth: the bytes are really read."""
    layout = local_layout("BLNHC")
    num_tokens = 69
    with map_region([export], layout, library="torch") as region:
        compute(tiny.PagedCache(region, shuffled_tables(num_tokens), BLOCK), num_tokens)
    with map_region([export], layout, library="torch", read_only=True) as region:
        before = next_logits(region, num_tokens)
        assert next_logits(region, num_tokens) == before  # reading changes nothing
    group = list(dict.fromkeys(tiny.KINDS)).index(kind)
    with map_region([export], layout, library="torch") as region:
        view = region.views[layout.groups[group][0]]
        array = view[1] if kind == "state" else view
        array[shuffled_tables(num_tokens)[group][(num_tokens - 1) // BLOCK]] += 1.0
        del view, array
    with map_region([export], layout, library="torch", read_only=True) as region:
        assert next_logits(region, num_tokens) != before


@pytest.mark.slow
@pytest.mark.timeout(300)  # four processes that import torch
@pytest.mark.parametrize(("layout", "backend"), [("LBNHC", "posix_shm"), ("BLHNC", "memfd")])
def test_a_successor_of_a_killed_writer_goes_on_with_identical_logits(
    repo_dir: Path, layout: str, backend: str
) -> None:
    path = os.pathsep.join(str(repo_dir / part) for part in ("proto", "server", "client"))
    command = [sys.executable, str(EXAMPLES / "attention_worker.py"), "--layout", layout, "--backend", backend]
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert run.returncode == 0, run.stderr
    assert "successor  hit 80 tokens of a process that was killed" in run.stdout
    assert run.stdout.count("bit for bit") == 3
