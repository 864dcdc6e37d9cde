"""A daemon as a process of its own, and a model small enough to map in a moment."""

from collections.abc import Callable, Iterator

import pytest

from kvhold.v1 import plan_pb2
from kvhold_client.client import Client
from kvhold_client.local_daemon import LocalDaemon
from kvhold_client.pools import PoolRequest

GRACE_PERIOD_S = 1.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    pytest.importorskip("prometheus_client")
    with LocalDaemon("--grace-period-s", str(GRACE_PERIOD_S)) as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.target) as connected:
        yield connected


def tiny_plan(num_blocks: int, *, sliding_window_tokens: int = 0) -> plan_pb2.PlanRequest:
    """Two layers of 1 KiB pages; with a window the second one is local."""
    geometry = plan_pb2.AttentionGeometry(num_kv_heads=1, head_size_elems=16, dtype=plan_pb2.DTYPE_BFLOAT16)
    full = plan_pb2.LayerSpec(block_size_tokens=16, geometry=geometry)
    full.full_attention.SetInParent()
    request = plan_pb2.PlanRequest(
        config=plan_pb2.PlannerConfig(
            layout=plan_pb2.LAYOUT_LBNHC,
            max_model_len_tokens=512,
            max_num_batched_tokens=1024,
            max_num_seqs=64,
            num_blocks_override=num_blocks,
            enable_prefix_caching=True,
        ),
        layer_specs=[full],
    )
    if sliding_window_tokens:
        local = plan_pb2.LayerSpec(block_size_tokens=16, geometry=geometry)
        local.sliding_window.sliding_window_tokens = sliding_window_tokens
        request.layer_specs.append(local)
    rank = request.ranks.add(available_memory_bytes=num_blocks * 2048)
    rank.layers.add(layer_name="a", layer_spec_index=0)
    rank.layers.add(layer_name="b", layer_spec_index=1 if sliding_window_tokens else 0)
    return request


@pytest.fixture
def open_pool(client: Client) -> Iterator[Callable[..., str]]:
    """Opens a pool of the tiny model and deletes it afterwards."""
    names = []

    def opener(name: str, num_blocks: int = 256, *, sliding_window_tokens: int = 0, **options: object) -> str:
        names.append(name)
        plan = tiny_plan(num_blocks, sliding_window_tokens=sliding_window_tokens)
        client.open_pool(PoolRequest(name=name, plan=plan, model="tiny", **options))  # type: ignore[arg-type]
        return name

    yield opener
    for name in names:
        client.delete_pool(name, force=True)
