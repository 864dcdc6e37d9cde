"""What a larger pool would have kept is told from the list of evicted hashes: compared with pools that are larger."""

from itertools import accumulate

import pytest

from kvhold_server.pool.pool import Pool
from kvhold_server.pool.values import GROWTH_PERCENTS
from tests.pool.test_field_reports import Story, group, make_pool

USABLE = 99  # 100 blocks with the null block
TEXT_TOKENS = 5  # one full block and a token


def ask_again_after(num_others: int, usable: int) -> tuple[Pool, int]:
    """A text, so many others, and the same text again: the pool and the hit."""
    pool = make_pool(group(), usable=usable)
    story = Story(pool)
    for text in ["A", *(f"X{i}" for i in range(num_others)), "B"]:
        story.run(text, TEXT_TOKENS)
    return pool, story.run("A", TEXT_TOKENS).hit_tokens


@pytest.mark.parametrize("num_others", [97, 103, 109, 118, 150, 190, 480, 600])
def test_growth_that_is_said_to_keep_a_prompt_keeps_it_and_less_does_not(num_others: int) -> None:
    pool, hit = ask_again_after(num_others, USABLE)
    statistics = pool.prefix_statistics()
    assert statistics.miss_evicted_tokens == sum(statistics.miss_evicted_by_growth_tokens)
    kept = dict(zip(GROWTH_PERCENTS, accumulate(statistics.miss_evicted_by_growth_tokens), strict=False))
    for percent in GROWTH_PERCENTS:
        _, larger = ask_again_after(num_others, USABLE + percent)
        assert (kept[percent] > 0) == (larger > hit), f"{percent} %"
