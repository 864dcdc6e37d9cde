"""The builder: columns in, one message out."""

from kvhold.v1 import block_pb2 as pb
from kvhold_client.results import ItemStatus
from kvhold_client.step import StepBuilder, decode_step


def test_an_optional_column_is_absent_until_an_item_needs_it() -> None:
    builder = StepBuilder(4)
    builder.extend(7, slots_needed=33)
    assert not builder.encode().extend.num_lookahead_tokens
    builder.extend(9, slots_needed=18, num_lookahead_tokens=2)
    builder.extend(11, slots_needed=1)
    message = builder.encode()
    assert list(message.extend.sequence_ids) == [7, 9, 11]
    assert list(message.extend.num_lookahead_tokens) == [0, 2, 0]


def test_an_item_without_expectation_expects_any_hit() -> None:
    builder = StepBuilder(4)
    builder.admit(1, num_tokens=8)
    builder.admit(2, num_tokens=8, expect_hit_tokens=4)
    builder.admit(3, num_tokens=8)
    assert list(builder.encode().admit.expect_hit_tokens) == [-1, 4, -1]


def test_hashes_are_joined_in_order_of_items() -> None:
    builder = StepBuilder(2)
    builder.admit(1, num_tokens=8, hashes=b"aabb")
    builder.admit(2, num_tokens=8)
    builder.admit(3, num_tokens=8, hashes=bytearray(b"cc"))
    message = builder.encode()
    assert message.admit.hashes == b"aabbcc"
    assert list(message.admit.num_hashes) == [2, 0, 1]


def test_a_cleared_builder_is_as_new() -> None:
    builder = StepBuilder(2)
    builder.free(1, preempted=True)
    builder.lookup(num_tokens=3, hashes=b"aa")
    builder.invalidate_blocks([5])
    builder.encode()
    builder.clear()
    assert builder.is_empty
    assert builder.encode().ByteSize() == 0


def test_parts_that_nobody_asked_for_are_not_in_the_message() -> None:
    builder = StepBuilder(2)
    builder.free(3, publish_tokens=16)
    message = builder.encode()
    assert message.HasField("free")
    assert not message.HasField("extend")
    assert not message.HasField("admit")


def test_answers_become_plain_columns() -> None:
    response = pb.StepResponse(boot_id="b", replayed=True, num_freed_blocks=[2])
    response.extend.statuses.append(pb.ITEM_STATUS_OUT_OF_BLOCKS)
    response.copies.group_ids.append(0)
    response.copies.source_block_ids.append(3)
    response.copies.target_block_ids.append(4)
    response.counts.num_blocks = 11
    response.counts.num_held_blocks = 5
    reply = decode_step(response)
    assert reply.extend_statuses == [ItemStatus.OUT_OF_BLOCKS]
    assert reply.copies[0].target_block_id == 4
    assert reply.counts.usage == 0.5


def test_statuses_have_the_numbers_of_the_wire() -> None:
    ours = {f"ITEM_STATUS_{status.name}": int(status) for status in ItemStatus}
    assert ours == {name: number for name, number in pb.ItemStatus.items() if number}
