"""Lookups over random holes, by the pool and by the naive model: every class of groups, drafters, several bounds."""

import random

import pytest

from kvhold_server.domain.pool_config import GroupKind, PoolConfig
from kvhold_server.pool.origin import Origin
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.sequence import Sequence
from tests.model.naive import Key, NaivePool, Seq
from tests.model.pair import chunked, full, mamba, of_kind, pool_of, window


def big(*groups: object, **more: object) -> PoolConfig:
    return pool_of(*groups, num_blocks=400, max_model_len=4096, **more)  # type: ignore[arg-type]


CONFIGS: dict[str, PoolConfig] = {
    "full_eagle": big(full(), use_eagle=True),
    "window": big(window(4, 9)),
    "window_eagle": big(window(4, 9), use_eagle=True),
    "chunk": big(chunked(4, 12)),
    "chunk_window1": big(chunked(4, 8), window(4, 1)),
    "three_windows_eagle": big(full(), window(4, 5), window(4, 9), window(4, 13), use_eagle=True),
    "two_eagle": big(full(), window(4, 5, is_eagle=True), window(4, 9), window(4, 13, is_eagle=True), use_eagle=True),
    "coarse_eagle": big(full(8), window(4, 5), window(8, 9), unit=4, block=8, use_eagle=True),
    "windows_eagle": big(window(4, 5), window(8, 9), unit=4, block=8, use_eagle=True),
    "coarse_window": big(full(4), window(8, 9), window(8, 17), unit=4, block=8, use_eagle=True),
    "equal_specs": big(full(), full(), of_kind(GroupKind.MLA), window(4, 9), window(4, 9)),
    "full_chunk_window": big(full(), chunked(4, 12), window(4, 9)),
    "mamba_alone": big(mamba(16), unit=16, block=16),
    "mamba_fine": big(full(16), mamba(16), unit=4, block=16),
    "mamba_fine_eagle": big(full(16), mamba(16), window(4, 5), window(4, 9), unit=4, block=16, use_eagle=True),
    "mamba_window_coarse": big(full(16), mamba(16), window(8, 9), unit=4, block=16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_pool_finds_what_the_model_finds(name: str) -> None:
    config = CONFIGS[name]
    rng = random.Random(name)
    for _ in range(250):
        num_units = rng.choice((6, 8, 12, 16, 20))
        pool, model = Pool(config), NaivePool(config)
        session = pool.open_session()
        assert session == model.open_session()
        holes = rng.choice((0.02, 0.1, 0.25, 0.5))
        kept = [
            (unit, gid)
            for gid, group in enumerate(config.groups)
            for unit in range(num_units)
            if (group.block_size_tokens // config.hash_unit_tokens == 1 or may_end(unit, config, gid, rng))
            and rng.random() > holes
        ]
        blocks = pool.store.take(len(kept), session)
        assert blocks == model.take(len(kept), session)
        for block, (unit, gid) in zip(blocks, kept, strict=True):
            digest, tokens = b"%d" % unit, (unit + 1) * config.hash_unit_tokens
            origin = Origin(gid, session, 1)
            origin.is_public = True
            pool.store.prefixes.publish(gid, [block], [digest], origin, [tokens])
            model.add_key(block, Key(gid, digest, tokens, session, 0))
        sequence = Sequence(1, len(config.groups))
        sequence.hashes = [b"%d" % unit for unit in range(num_units)]
        for limit in {rng.randint(0, num_units * config.hash_unit_tokens) for _ in range(4)} | {
            num_units * config.hash_unit_tokens
        }:
            hit = pool.groups.lookup(sequence, session, limit)
            expected = model.lookup(session, Seq(1, sequence.hashes), limit)
            assert (hit.tokens, hit.blocks, hit.boundary_tokens) == expected
            assert hit.tokens <= limit


def may_end(unit: int, config: PoolConfig, gid: int, rng: random.Random) -> bool:
    """Whole blocks, and now and then a prefix that ends inside one."""
    stride = config.groups[gid].block_size_tokens // config.hash_unit_tokens
    return (unit + 1) % stride == 0 or rng.random() < 0.2
