"""What one step costs inside the daemon, without a wire: decode, fence, pool, encode, and each part by itself.

    python bench/step_handling.py [--items 16] [--groups 1]

Prints medians in microseconds for a step that extends `--items` running sequences by one block each and publishes one
block of each; the same number of sequences is freed and admitted between rounds, outside the measurement.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from kvhold.v1 import block_pb2 as pb
from kvhold_server.config import ServerConfig
from kvhold_server.domain.ids import PoolName
from kvhold_server.domain.pool_config import GroupConfig, GroupKind
from kvhold_server.memory.fake import FakeBackend
from kvhold_server.node.identity import PoolOptions, PoolOverrides
from kvhold_server.node.node import Node
from kvhold_server.node.node_values import Shell
from kvhold_server.node.opening import Opening, OpenPoolCommand
from kvhold_server.rpc.pool_codec import wire_shape
from kvhold_server.rpc.services.blocks import BlockService
from kvhold_server.rpc.step_answers import encode_step
from kvhold_server.rpc.step_codec import decode_step
from kvhold_server.sessions.lease import LeaseTerms
from kvhold_server.sessions.session import OpenRequest, Session

BLOCK = 16
NUM_STEPS = 200


def make_node(num_groups: int) -> tuple[Node, Session]:
    """A node with one simulated pool and one session."""
    secrets = iter(range(10**6))
    shell = Shell(boot_id="bench", clock=time.monotonic, new_secret=lambda: f"secret-{next(secrets)}")
    node = Node(
        shell=shell,
        backends={"fake": FakeBackend()},
        default_backend="fake",
        terms=LeaseTerms(lease_ttl_s=1e9, grace_s=1e9),
        limits=ServerConfig().limits,
    )
    groups = tuple(GroupConfig(kind=GroupKind.FULL, block_size_tokens=BLOCK) for _ in range(num_groups))
    overrides = PoolOverrides(groups=groups, num_blocks=100_000, max_model_len_tokens=1 << 20)
    command = OpenPoolCommand(name=PoolName("p"), plan=None, options=PoolOptions(backend="fake", overrides=overrides))
    opening = node.begin_open_pool(command)
    assert isinstance(opening, Opening)
    node.finish_open_pool(opening, (), node.make_pool(opening, ()))
    return node, node.open_session(OpenRequest(pool=PoolName("p")), "").session


def requests(session: Session, items: int) -> list[bytes]:
    """Encoded steps: admissions first, then one extend by a block of every sequence after the other."""
    ids = list(range(items))
    found = []
    for step in range(1, NUM_STEPS + 2):
        request = pb.StepRequest(session_id=session.session_id, epoch=1, step=step, completed_step=step - 1)
        tokens = step * BLOCK
        hashes = b"".join((step * 1000 + i).to_bytes(32, "big") for i in ids)
        if step == 1:
            request.admit.sequence_ids.extend(ids)
            request.admit.num_tokens.extend([tokens] * items)
            request.admit.num_hashes.extend([1] * items)
            request.admit.hashes = hashes
        else:
            request.extend.sequence_ids.extend(ids)
            request.extend.slots_needed.extend([tokens] * items)
            request.extend.processed_tokens.extend([tokens - BLOCK] * items)
            request.extend.publish_tokens.extend([tokens] * items)
            request.extend.num_hashes.extend([1] * items)
            request.extend.hashes = hashes
        found.append(request.SerializeToString())
    return found


def timed(laps: list[float], work: Callable[[], object]) -> object:
    """Runs the work and notes its time."""
    begun = time.perf_counter()
    result = work()
    laps.append((time.perf_counter() - begun) * 1e6)
    return result


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=16)
    parser.add_argument("--groups", type=int, default=1)
    args = parser.parse_args()
    parts: dict[str, list[float]] = {name: [] for name in ("parse", "decode", "node", "encode", "serialize", "whole")}
    node, session = make_node(args.groups)
    live = node.pools[PoolName("p")]
    for data in requests(session, args.items):
        request = timed(parts["parse"], lambda d=data: pb.StepRequest.FromString(d))
        command = timed(parts["decode"], lambda r=request: decode_step(r, wire_shape(live), node.limits))
        answer = timed(parts["node"], lambda c=command: node.step(session, c))
        response = timed(parts["encode"], lambda c=command, a=answer: encode_step("bench", c, a))
        timed(parts["serialize"], response.SerializeToString)
    node, session = make_node(args.groups)
    service = BlockService(node)
    for data in requests(session, args.items):
        timed(parts["whole"], lambda d=data: service.answer_step(pb.StepRequest.FromString(d)).SerializeToString())
    for name, laps in parts.items():
        print(
            f"{name:10s} {statistics.median(laps[1:]):8.1f} us   p90 {statistics.quantiles(laps[1:], n=10)[-1]:8.1f} us"
        )


if __name__ == "__main__":
    main()
