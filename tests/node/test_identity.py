"""The first difference is named by path, with both values."""

from dataclasses import replace

import pytest

from kvhold_server.node.identity import ByteFormat, ContentIdentity, PoolOptions, PoolOverrides, first_difference

OPTIONS = PoolOptions(backend="fake", rank_device_indexes=(0, 1))


@pytest.mark.parametrize(
    ("asked", "difference"),
    [
        (OPTIONS, ""),
        (replace(OPTIONS, backend="memfd"), "options.backend: 'fake' held, 'memfd' asked"),
        (replace(OPTIONS, rank_device_indexes=(0, 2)), "options.rank_device_indexes[1]: 1 held, 2 asked"),
        (replace(OPTIONS, rank_device_indexes=(0,)), "options.rank_device_indexes: 2 entries held, 1 asked"),
        (replace(OPTIONS, overrides=PoolOverrides(num_blocks=7)), "options.overrides.num_blocks: 0 held, 7 asked"),
    ],
)
def test_first_difference(asked: PoolOptions, difference: str) -> None:
    assert first_difference(OPTIONS, asked, "options") == difference


def test_only_the_first_is_named_and_bytes_are_hex() -> None:
    held, asked = ContentIdentity(model="a", hash_seed=b"\x01"), ContentIdentity(model="a", hash_seed=b"\x02")
    assert first_difference(held, asked) == "hash_seed: 01 held, 02 asked"
    assert first_difference(ByteFormat(engine="x" * 500), ByteFormat()).count("x") == 124
