"""Makes the small trace that ships with kvhold: conversations that share a system prompt and grow turn by turn.

    python examples/make_trace.py > client/kvhold_client/replay/demo_trace.jsonl

Everything follows from the seed, so the file can be made again. The format is that of the Mooncake traces: one id for
each 512 prompt tokens, equal ids meaning equal content with everything before it.
"""

import json
import random
import sys

UNIT_TOKENS = 512
NUM_CONVERSATIONS = 48
SYSTEM_PROMPT_UNITS = 2
SEED = 20261130


def main() -> None:
    """Writes the trace to stdout, in order of arrival."""
    chance = random.Random(SEED)
    next_id = SYSTEM_PROMPT_UNITS
    requests = []
    for _ in range(NUM_CONVERSATIONS):
        ids = list(range(SYSTEM_PROMPT_UNITS))
        length = SYSTEM_PROMPT_UNITS * UNIT_TOKENS
        at_ms = chance.randrange(0, 60_000)
        for _ in range(chance.randint(2, 6)):
            length += chance.randint(150, 900)
            while len(ids) < length // UNIT_TOKENS:  # units that this turn completes
                ids.append(next_id)
                next_id += 1
            hash_ids = list(ids)
            if length % UNIT_TOKENS:  # what remains is named anew in each turn: it will have grown by the next
                hash_ids.append(next_id)
                next_id += 1
            output = chance.randint(24, 160)
            requests.append({"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": hash_ids})
            length += output  # the answer is part of the next prompt
            at_ms += chance.randrange(2_000, 20_000)
    for request in sorted(requests, key=lambda r: r["timestamp"]):
        sys.stdout.write(json.dumps(request) + "\n")


if __name__ == "__main__":
    main()
