"""Time per block of prefix hashing against the obvious way: cbor2 (or pickle) and hashlib, block by block.

    .venv/bin/python bench/hashing.py [--tokens 131072] [--block-size 16]

CPU time, alternating, best of several rounds. Tokens are uniform over a vocabulary: the worst case for a memo of them.
"""

import argparse
import hashlib
import pickle
import random
import sys
import time
from array import array
from collections.abc import Callable

import cbor2
import numpy

from kvhold_client.hashing import PrefixHasher

MAX_RATIO = 0.5


def obvious(algorithm: str, parent: bytes, tokens: list[int], size: int) -> list[bytes]:
    """Written down as one would; also the check that ours are the same digests."""
    hashes = []
    for start in range(0, len(tokens), size):
        block = (parent, tuple(tokens[start : start + size]), None)
        encoded = cbor2.dumps(block, canonical=True) if algorithm == "sha256_cbor" else pickle.dumps(block, protocol=5)
        parent = hashlib.sha256(encoded).digest()
        hashes.append(parent)
    return hashes


def best_us(rounds: int, num_blocks: int, ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of CPU per block of each way, the ways taking turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            best[name] = min(best[name], (time.process_time() - start) / num_blocks * 1e6)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    size, num_tokens = arguments.block_size, arguments.tokens - arguments.tokens % arguments.block_size
    tokens = random.Random(1).choices(range(128_000), k=num_tokens)
    inputs = {"list": tokens, "array": array("I", tokens), "numpy": numpy.array(tokens, "int32")}
    missed = False
    for algorithm in ("sha256_cbor", "sha256"):
        hasher = PrefixHasher(block_size_tokens=size, algorithm=algorithm)
        expected = obvious(algorithm, hasher.none_hash, tokens, size)
        assert hasher.sequence().extend(tokens) == expected
        ways: dict[str, Callable[[], object]] = {
            "obvious": lambda a=algorithm, h=hasher: obvious(a, h.none_hash, tokens, size)  # type: ignore[misc]
        }
        for name, given in inputs.items():
            ways[name] = lambda h=hasher, g=given: h.sequence().extend(g)  # type: ignore[misc]
        best = best_us(arguments.rounds, num_tokens // size, ways)
        for name, us in best.items():
            print(f"{algorithm:12} {name:8} {us:6.2f} µs per block  {us / best['obvious']:5.2f}×")
        missed |= algorithm == "sha256_cbor" and best["numpy"] > MAX_RATIO * best["obvious"]
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
