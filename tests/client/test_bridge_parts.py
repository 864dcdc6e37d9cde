"""Formats and ports of the event bridge."""

import cbor2
import msgpack
import pytest

from kvhold.v1 import event_pb2
from kvhold_client.bridge.cbor_values import cbor_value
from kvhold_client.bridge.engine_events import EventFormat, raw_hash
from kvhold_client.bridge.ports import check_apart, endpoint_of_rank
from kvhold_client.shape import GroupShape

FORM = EventFormat(
    groups=(
        GroupShape(kind="full", block_size_tokens=16),
        GroupShape(kind="sliding_window", block_size_tokens=16, sliding_window_tokens=128),
    )
)


@pytest.mark.parametrize(
    "value", [[], [1, -1, 23, 24, 255, 256, 2**32, -(2**40)], ["adapter", ["image", 300], b"\x00" * 40, None, True]]
)
def test_extra_keys_are_read_back(value: object) -> None:
    assert cbor_value(cbor2.dumps(value)) == value


@pytest.mark.parametrize("data", [b"", b"\x82\x01", b"\x18", b"\x62a", b"\xa0", b"\x01\x01", b"\x81" * 40 + b"\x01"])
def test_what_is_no_extra_key_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        cbor_value(data)


def test_fields_without_a_default_are_always_there_and_the_others_if_set() -> None:
    plain = event_pb2.BlocksStored(block_hashes=[b"\1" * 32], block_size_tokens=16, block_indexes=[0])
    assert FORM.stored(plain) == {
        "type": "BlockStored",
        "block_hashes": [0x0101010101010101],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    rich = event_pb2.BlocksStored(
        block_hashes=[b"\2" * 32],
        parent_block_hash=b"\1" * 32,
        group_id=1,
        block_size_tokens=16,
        token_ids=range(16),
        extra_keys=[cbor2.dumps(["poet", ["image", 3]])],
        lora_id=7,
        lora_name="poet",
        session_label="chat",
    )
    event = FORM.stored(rich)
    assert event["extra_keys"] == [["poet", ["image", 3]]] and event["token_ids"] == list(range(16))
    assert (event["lora_id"], event["lora_name"], event["session_id"]) == (7, "poet", "chat")
    assert (event["kv_cache_spec_kind"], event["kv_cache_spec_sliding_window"]) == ("sliding_window", 128)
    assert FORM.removed(event_pb2.BlocksRemoved(block_hashes=[b"\2" * 32], group_id=1)) == {
        "type": "BlockRemoved",
        "block_hashes": [0x0202020202020202],
        "medium": "GPU",
        "group_idx": 1,
    }


def test_kinds_have_the_engines_names() -> None:
    form = EventFormat(groups=(GroupShape(kind="chunked_local", block_size_tokens=16),))
    assert form.stored(event_pb2.BlocksStored())["kv_cache_spec_kind"] == "chunked_local_attention"


def test_evt_09_a_hash_with_its_top_bit_set_survives() -> None:
    """EVT-09: unsigned, in 64 bits; or the whole digest."""
    stored = event_pb2.BlocksStored(block_hashes=[b"\0" * 24 + (0xFFFFFFFFFFFFFFFE).to_bytes(8, "big")])
    event = msgpack.unpackb(msgpack.packb(FORM.stored(stored), use_bin_type=True))
    assert event["block_hashes"] == [0xFFFFFFFFFFFFFFFE]
    whole = EventFormat(groups=FORM.groups, hash_of=raw_hash)
    event = msgpack.unpackb(msgpack.packb(whole.stored(stored), use_bin_type=True))
    assert event["block_hashes"] == [stored.block_hashes[0]]


def test_evt_07_ranks_have_ports_of_their_own() -> None:
    """EVT-07: publish 5557 and replay 5558 cannot be right for four ranks; port 0 lets each find one."""
    assert [endpoint_of_rank("tcp://*:5557", rank) for rank in (0, 3)] == ["tcp://*:5557", "tcp://*:5560"]
    assert endpoint_of_rank("tcp://*:0", 3) == "tcp://*:0" and endpoint_of_rank("ipc:///tmp/e", 2) == "ipc:///tmp/e_dp2"
    check_apart("tcp://*:5557", "tcp://*:5561", 4)
    check_apart("tcp://*:0", "tcp://*:0", 4)
    check_apart("tcp://*:5557", "", 4)
    with pytest.raises(ValueError, match=r"5557\.\.5560 .* 5558\.\.5561, which overlap"):
        check_apart("tcp://*:5557", "tcp://*:5558", 4)
    with pytest.raises(ValueError, match="65535"):
        endpoint_of_rank("tcp://*:65535", 1)
