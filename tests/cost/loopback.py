"""A client's table on a daemon's service without a wire: every request is encoded, handled, decoded and counted."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from kvhold.v1 import block_pb2 as pb
from kvhold_client.sequence import Sequence
from kvhold_client.sequence_table import SequenceTable
from kvhold_client.shape import GroupShape, PoolShape
from kvhold_client.step_reply import StepReply
from kvhold_server.config import ServerConfig
from kvhold_server.domain.ids import PoolName
from kvhold_server.domain.pool_config import GroupConfig, GroupKind
from kvhold_server.memory.fake import FakeBackend
from kvhold_server.node.identity import PoolOptions, PoolOverrides
from kvhold_server.node.node import Node, Shell
from kvhold_server.node.opening import Opening, OpenPoolCommand
from kvhold_server.rpc.services.blocks import BlockService
from kvhold_server.sessions.lease import LeaseTerms
from kvhold_server.sessions.session import OpenRequest

BLOCK = 16
HASH_BYTES = 32


def calls_of(work: Callable[[], Any]) -> int:
    """Python functions called by `work`, and C functions called from Python."""
    num = 0

    def tick(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num - 1  # the end of profiling itself


@dataclass
class Counted:
    """What went over the loop."""

    requests: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    server_calls: int = 0
    sizes: list[int] = field(default_factory=list)  # of each request


class Loopback:
    """A pool with one plain group, one session, and its table."""

    def __init__(self, num_blocks: int = 20_000) -> None:
        secrets = iter(range(10**6))
        self._node = Node(
            shell=Shell(boot_id="loop", clock=lambda: 0.0, new_secret=lambda: f"secret-{next(secrets):028d}"),
            backends={"fake": FakeBackend()},
            default_backend="fake",
            terms=LeaseTerms(lease_ttl_s=1e9, grace_s=1e9),
            limits=ServerConfig().limits,
        )
        groups = (GroupConfig(kind=GroupKind.FULL, block_size_tokens=BLOCK),)
        overrides = PoolOverrides(groups=groups, num_blocks=num_blocks, max_model_len_tokens=1 << 20)
        options = PoolOptions(backend="fake", overrides=overrides)
        opening = self._node.begin_open_pool(OpenPoolCommand(name=PoolName("p"), plan=None, options=options))
        assert isinstance(opening, Opening)
        self._node.finish_open_pool(opening, (), self._node.make_pool(opening, ()))
        self._session = self._node.open_session(OpenRequest(pool=PoolName("p")), "").session
        self._service = BlockService(self._node)
        shape = PoolShape(
            groups=(GroupShape(kind="full_attention", block_size_tokens=BLOCK),),
            hash_size_bytes=HASH_BYTES,
            hash_block_size_tokens=BLOCK,
        )
        self.table = SequenceTable(shape, send=self._send)
        self.counted = Counted()
        self._part = 0

    def begin_step(self) -> None:
        """The next one; all before it are complete."""
        self._part = 0
        self.table.begin_step(self.table.step + 1, self.table.step)

    def decode(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """One step in which each sequence gets a token."""
        self.begin_step()
        for i, sequence in enumerate(sequences):
            tokens[i] += 1
            if tokens[i] > sequence.quiet_tokens:
                done = tokens[i] - 1
                sequence.add_hashes((sequence.sequence_id << 32 | done).to_bytes(HASH_BYTES, "big"))
                self.table.extend(sequence, slots_needed=tokens[i], processed_tokens=done, publish_tokens=done)
        self.table.flush()

    def admit(self, num: int, num_tokens: Callable[[int], int]) -> list[Sequence]:
        """New sequences, each of so many tokens, all hashes known and nobody else's."""
        first = len(self.table.sequences) + 1
        sequences = []
        self.begin_step()
        for i in range(num):
            digests = [
                ((first + i) << 32 | (b + 1) * BLOCK).to_bytes(HASH_BYTES, "big") for b in range(num_tokens(i) // BLOCK)
            ]
            sequences.append(self.table.new_sequence(first + i, b"".join(digests)))
            self.table.admit(sequences[-1], num_tokens=num_tokens(i))
        self.table.flush()
        return sequences

    def _send(self, request: pb.StepRequest) -> StepReply:
        request.session_id, request.epoch = self._session.session_id, 1
        request.step, request.part, request.completed_step = self.table.step, self._part, self.table.completed_step
        self._part += 1
        data = request.SerializeToString()
        replies: list[bytes] = []

        def handle() -> None:
            replies.append(self._service.answer_step(pb.StepRequest.FromString(data)).SerializeToString())

        profiler = sys.getprofile()
        self.counted.server_calls += calls_of(handle)
        sys.setprofile(profiler)
        self.counted.requests += 1
        self.counted.request_bytes += len(data)
        self.counted.response_bytes += len(replies[0])
        self.counted.sizes.append(len(data))
        return StepReply(pb.StepResponse.FromString(replies[0]))
