"""The invariants see what is wrong: a right plan, spoiled in one place at a time."""

from collections.abc import Callable
from typing import Any

import pytest

from kvhold.v1 import plan_pb2 as pb
from kvhold_server.planner.plan import plan
from kvhold_server.rpc.plan_codec import decode_plan_request, encode_plan_response
from tests.conformance.plan_invariants import broken_invariants

Spoil = Callable[[pb.Plan], Any]


def request(layout: str) -> pb.PlanRequest:
    """Two ranks with two full layers and three windows of the same page."""
    config = pb.PlannerConfig(layout=pb.Layout.Value(f"LAYOUT_{layout}"), max_model_len_tokens=64)
    config.max_num_batched_tokens = 64
    asked = pb.PlanRequest(config=config)
    geometry = pb.AttentionGeometry(num_kv_heads=2, head_size_elems=64, dtype=pb.DTYPE_BFLOAT16)
    asked.layer_specs.add(block_size_tokens=16, geometry=geometry).full_attention.SetInParent()
    asked.layer_specs.add(block_size_tokens=16, geometry=geometry).sliding_window.sliding_window_tokens = 32
    rank = asked.ranks.add(available_memory_bytes=400_000)
    for name, index in (("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 1)):
        rank.layers.add(layer_name=name, layer_spec_index=index)
    asked.ranks.add(available_memory_bytes=500_000, layers_of_rank=0)
    return asked


def reply_to(asked: pb.PlanRequest) -> pb.PlanResponse:
    return encode_plan_response(plan(decode_plan_request(asked)))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_right_plan_breaks_nothing(layout: str) -> None:
    asked = request(layout)
    assert broken_invariants(asked, reply_to(asked)) == []


def set_tensor(index: int, **values: int) -> Spoil:
    def spoil(made: pb.Plan) -> None:
        for name, value in values.items():
            setattr(made.ranks[0].tensors[index], name, value)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda made: made.ranks.pop(), "1 ranks planned of 2"),
        (lambda made: setattr(made.ranks[1], "num_blocks", 7), "different numbers of blocks"),
        (lambda made: made.ranks[1].groups.pop(), "ranks have different groups"),
        (lambda made: made.ranks[0].groups[0].layer_names.pop(), "grouped layers differ"),
        (lambda made: made.ranks[0].tensors.pop(), "placed layers differ"),
        (lambda made: made.ranks[0].tensors[0].layer_names.append("x"), "placed layers differ"),
        (lambda made: setattr(made, "fingerprint", ""), "no fingerprint"),
        (lambda made: setattr(made, "max_model_len_tokens", 65), "longer requests than asked"),
        (lambda made: setattr(made, "hash_block_size_tokens", 3), "hash block does not divide"),
        (lambda made: setattr(made, "max_concurrency", 0.5), "not one request"),
        (lambda made: setattr(made, "max_concurrency", 1e6), "concurrency"),
        (lambda made: setattr(made.ranks[0], "region_size_bytes", 1), "reaches"),
        (lambda made: setattr(made.ranks[0], "region_size_bytes", 10**9), "bytes planned of 400000"),
        (lambda made: setattr(made.ranks[0], "bytes_per_block", 100), "wider than a block"),
        (set_tensor(0, offset_bytes=-1), "reaches -1"),
        (set_tensor(0, layer_stride_bytes=100), "overlaps itself"),
        (set_tensor(0, block_stride_bytes=100), "overlaps itself"),
        (set_tensor(1, offset_bytes=8192), "share bytes under different ids"),
    ],
)
def test_one_spoiled_place_is_seen(spoil: Spoil, said: str) -> None:
    asked = request("LBHNC")
    reply = reply_to(asked)
    spoil(reply.plan)
    assert any(said in text for text in broken_invariants(asked, reply)), broken_invariants(asked, reply)
