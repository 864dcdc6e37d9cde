"""What a long cached prompt costs inside the daemon, without a wire, and what an index over runs could save at most.

    python bench/long_prompt.py [--blocks 8192]

Each step frees the prompt and admits it again. Medians of processor time in milliseconds; indented lines are parts of
the line above: those three are all that an index over runs of blocks would make independent of the length.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from step_handling import BLOCK, make_node

from kvhold.v1 import block_pb2 as pb
from kvhold_server.node.node import Node
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.prefix_index import PrefixIndex
from kvhold_server.rpc.pool_codec import wire_shape
from kvhold_server.rpc.step_answers import encode_step
from kvhold_server.rpc.step_codec import decode_step
from kvhold_server.sessions.session import Session

NUM_STEPS = 40
PARTS = (("look-up", PrefixIndex, "visible_prefix"), ("pin", BlockStore, "hold"), ("let go", BlockStore, "let_go"))

Laps = dict[str, list[float]]


def request(session: Session, step: int, num_blocks: int, digests: bytes) -> bytes:
    """Frees what the step before admitted, admits the same prompt under a new id."""
    message = pb.StepRequest(session_id=session.session_id, epoch=1, step=step, completed_step=step - 1)
    if step > 1:
        message.free.sequence_ids.append(step - 1)
    message.admit.sequence_ids.append(step)
    message.admit.num_tokens.append(num_blocks * BLOCK + 1)
    message.admit.num_hashes.append(num_blocks)
    message.admit.hashes = digests
    return message.SerializeToString()


def lap(laps: Laps, name: str, work: Callable[[], Any]) -> Any:
    """Does the work and notes its time."""
    begun = time.process_time()
    result = work()
    laps.setdefault(name, []).append((time.process_time() - begun) * 1e3)
    return result


@contextmanager
def watched(laps: Laps) -> Iterator[None]:
    """The calls of PARTS are laps of their own meanwhile."""
    originals = [getattr(owner, method) for _, owner, method in PARTS]
    for (name, owner, method), original in zip(PARTS, originals, strict=True):
        setattr(owner, method, _timed(laps, f"  {name}", original))
    try:
        yield
    finally:
        for (_, owner, method), original in zip(PARTS, originals, strict=True):
            setattr(owner, method, original)


def _timed(laps: Laps, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: lap(laps, name, partial(original, *args, **kwargs))


def measure_step(laps: Laps, node: Node, session: Session, data: bytes) -> None:
    """From the request's bytes to the answer's."""
    live = node.pools[session.pool]
    message = lap(laps, "parse", partial(pb.StepRequest.FromString, data))
    command = lap(laps, "decode", partial(decode_step, message, wire_shape(live), node.limits))
    answer = lap(laps, "node", partial(node.step, session, command))
    response = lap(laps, "encode", partial(encode_step, "bench", command, answer))
    lap(laps, "serialize", response.SerializeToString)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=8192)
    num_blocks = parser.parse_args().blocks
    node, session = make_node(1)
    digests = b"".join((i + 1).to_bytes(32, "big") for i in range(num_blocks))
    laps: Laps = {}
    with watched(laps):
        for step in range(1, NUM_STEPS + 1):
            data = request(session, step, num_blocks, digests)
            if step == 3:  # the first two publish, and meet what was published for the first time
                laps.clear()
            measure_step(laps, node, session, data)
    for name in ("parse", "decode", "node", *(f"  {name}" for name, *_ in PARTS), "encode", "serialize"):
        print(f"{name:10} {statistics.median(laps[name]):7.3f} ms")


if __name__ == "__main__":
    main()
