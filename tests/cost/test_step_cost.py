"""What a step costs in requests, bytes and function calls: the same on any machine. Bounds may only fall."""

from tests.cost.loopback import BLOCK, HASH_BYTES, Counted, Loopback, calls_of

STEPS = 32


def decode_costs(num_sequences: int, max_allotted_blocks: int = 2048) -> tuple[Counted, float]:
    """Of 32 decode steps; and the client's function calls per step."""
    loop = Loopback()
    loop.table.max_allotted_blocks = max_allotted_blocks
    sequences = loop.admit(num_sequences, lambda i: 64 + i % BLOCK)
    tokens = [64 + i % BLOCK for i in range(num_sequences)]
    for _ in range(BLOCK):
        loop.decode(sequences, tokens)
    loop.counted = Counted()
    calls = 0
    for _ in range(STEPS):
        calls += calls_of(lambda: loop.decode(sequences, tokens))
    return loop.counted, calls / STEPS


def test_eight_decode_steps_are_one_request() -> None:
    """Sequences draw what was allotted; after eight steps at the latest the daemon hears of it."""
    counted, _ = decode_costs(256)
    assert counted.requests <= STEPS / 8


def test_a_decode_step_is_one_request_where_nothing_is_allotted() -> None:
    counted, _ = decode_costs(256, max_allotted_blocks=0)
    assert counted.requests == STEPS


def test_a_step_in_which_nobody_needs_a_block_is_none() -> None:
    loop = Loopback()
    sequences = loop.admit(8, lambda i: 65)
    tokens = [65] * 8
    loop.counted = Counted()
    for _ in range(4 * BLOCK):
        loop.decode(sequences, tokens)
    assert loop.counted.requests <= 4, "one for each time that all of them enter a new block, or fewer"


def test_bytes_of_a_decode_step_are_digests_and_little_else() -> None:
    counted, _ = decode_costs(256)
    num_extends = 256 / BLOCK
    assert counted.request_bytes / STEPS <= num_extends * (HASH_BYTES + 8) + 60
    assert counted.response_bytes / STEPS <= num_extends * 5 + 40


def test_a_refused_head_sends_its_hashes_once() -> None:
    loop = Loopback(num_blocks=100)
    loop.admit(1, lambda i: 90 * BLOCK)
    (waiting,) = loop.admit(1, lambda i: 50 * BLOCK)
    for _ in range(40):
        loop.begin_step()
        loop.table.admit(waiting, num_tokens=50 * BLOCK)
        assert loop.table.flush().not_admitted == [waiting]
    first, *again = loop.counted.sizes[1:]
    assert first > 50 * HASH_BYTES
    assert max(again) < 100
    assert len(again) <= 3, "nothing has changed, so that the answer is known; it is asked again after 16 steps"


def test_the_client_calls_few_functions() -> None:
    """Per step a constant, and per sequence that needs a block a handful; silent sequences cost a comparison."""
    _, few = decode_costs(16)
    _, many = decode_costs(256)
    assert few <= 34
    assert (many - few) / 15 <= 16
    _, few = decode_costs(16, max_allotted_blocks=0)
    _, many = decode_costs(256, max_allotted_blocks=0)
    assert few <= 70
    assert (many - few) / 15 <= 12


def test_the_daemon_calls_few_functions() -> None:
    few, _ = decode_costs(16)
    many, _ = decode_costs(256)
    assert few.server_calls / STEPS <= 35
    assert (many.server_calls - few.server_calls) / STEPS / 15 <= 9
    few, _ = decode_costs(16, max_allotted_blocks=0)
    many, _ = decode_costs(256, max_allotted_blocks=0)
    assert few.server_calls / STEPS <= 195
    assert (many.server_calls - few.server_calls) / STEPS / 15 <= 14


def test_admitting_a_long_prompt_costs_the_daemon_a_few_calls_a_block() -> None:
    loop = Loopback()
    calls = []
    for num_blocks in (64, 2048):
        loop.counted = Counted()
        (sequence,) = loop.admit(1, lambda i, n=num_blocks: n * BLOCK)
        calls.append(loop.counted.server_calls)
        loop.table.finish(sequence)
        loop.begin_step()
        loop.table.flush(force=True)
    assert (calls[1] - calls[0]) / (2048 - 64) <= 2
