"""Real bytes of a pool, and what kernels do with them: each token is a digest of its prompt, place and weights.

A state is a digest of the state before it and a token, so that it is right only if all of its past was.
"""

import mmap
import os
from dataclasses import dataclass, field
from hashlib import blake2b

from kvhold_client.results import StateHandoff
from kvhold_client.sequence import Sequence
from kvhold_server.memory.posix_shm import PosixShmBackend
from kvhold_server.node.live_pool import LivePool

UNIT, STATE_TOKENS, WINDOW_TOKENS = 4, 8, 10
TOKEN_BYTES, PAGE_BYTES = 16, 256
SHARED_TOKENS = 26  # prompts of one family have so many tokens in common: some whole blocks, and a part of one
KINDS = {"f": "full_attention", "w": "sliding_window", "s": "mamba"}


def digest(*parts: object, size: int = TOKEN_BYTES) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=size).digest()


def owner_of(prompt: int, place: int) -> int:
    return prompt % 3 if place < SHARED_TOKENS else prompt + 3


def token(prompt: int, place: int, version: int) -> bytes:
    return digest(owner_of(prompt, place), place, version)


def key(prompt: int, unit: int) -> bytes:
    """Digest of the prefix that ends with this unit."""
    return digest(owner_of(prompt, unit * UNIT + UNIT - 1), unit, size=32)


class Memory:
    """The region's bytes, as workers map them: they outlive the daemon."""

    def __init__(self, live: LivePool, backend: PosixShmBackend, groups: str) -> None:
        (fd,) = backend.open_fds(live.regions[0])
        self._bytes = mmap.mmap(fd, live.regions[0].size_bytes)
        os.close(fd)
        assert live.plan is not None
        self._places = []
        for group in live.config.groups:
            layer = "l" + str(next(i for i, kind in enumerate(groups) if KINDS[kind] == group.kind.value))
            tensor = next(t for t in live.plan.ranks[0].tensors if layer in t.layer_names)
            self._places.append((tensor, tensor.layer_names.index(layer)))

    def _at(self, group: int, block: int) -> int:
        tensor, layer = self._places[group]
        return tensor.page_offset_bytes(layer, block)

    def read(self, group: int, block: int, place: int = 0) -> bytes:
        at = self._at(group, block) + place * PAGE_BYTES // UNIT
        return self._bytes[at : at + TOKEN_BYTES]

    def write(self, group: int, block: int, value: bytes, place: int = 0) -> None:
        at = self._at(group, block) + place * PAGE_BYTES // UNIT
        self._bytes[at : at + TOKEN_BYTES] = value

    def copy(self, group: int, source: int, target: int) -> None:
        start, end = self._at(group, source), self._at(group, target)
        self._bytes[end : end + PAGE_BYTES] = self._bytes[start : start + PAGE_BYTES]

    def clear(self, block: int) -> None:
        for group in range(len(self._places)):
            at = self._at(group, block)
            self._bytes[at : at + PAGE_BYTES] = bytes(PAGE_BYTES)


@dataclass
class Run:
    """A sequence with what it truly consists of."""

    sequence: Sequence
    prompt: int
    tokens: list[bytes] = field(default_factory=list)
    states: list[bytes] = field(default_factory=lambda: [bytes(TOKEN_BYTES)])  # after so many tokens

    def compute(self, num: int, version: int) -> None:
        """So many tokens more, with these weights."""
        for place in range(len(self.tokens), len(self.tokens) + num):
            self.tokens.append(token(self.prompt, place, version))
            self.states.append(digest(self.states[-1], self.tokens[-1]))


@dataclass(frozen=True)
class Write:
    """What one step computes of one sequence, with its tables as they are then."""

    run: Run
    tables: list[list[int]]
    start: int
    end: int


@dataclass(frozen=True)
class Kernel:
    """All writes of one step."""

    step: int
    zeros: list[int]
    copies: list[tuple[int, int, int]]
    writes: list[Write]
    handoffs: list[StateHandoff]

    def execute(self, memory: Memory, kinds: list[str]) -> None:
        for block in self.zeros:
            memory.clear(block)
        for group, source, target in self.copies:
            memory.copy(group, source, target)
        for write in self.writes:
            for group, kind in enumerate(kinds):
                if kind == "mamba":
                    sequence_id = write.run.sequence.sequence_id
                    told = [h for h in self.handoffs if (h.group_id, h.sequence_id) == (group, sequence_id)]
                    _advance_state(memory, group, write, told)
                else:
                    _append_tokens(memory, group, write, WINDOW_TOKENS if kind == "sliding_window" else None)


def _append_tokens(memory: Memory, group: int, write: Write, window: int | None) -> None:
    table, tokens = write.tables[group], write.run.tokens
    for place in range(max(0, write.start - window + 1) if window else 0, write.start):
        found = memory.read(group, table[place // UNIT], place % UNIT)
        assert found == tokens[place], f"group {group}, token {place} of {write.start} in block {table[place // UNIT]}"
    for place in range(write.start, write.end):
        if table[place // UNIT]:
            memory.write(group, table[place // UNIT], tokens[place], place % UNIT)


def _advance_state(memory: Memory, group: int, write: Write, handoffs: list[StateHandoff]) -> None:
    """Where it begins inside a block and goes past its end, only the daemon knows that the state there is wanted."""
    table, states = write.tables[group], write.run.states
    if write.start:
        block = table[(write.start - 1) // STATE_TOKENS]
        assert memory.read(group, block) == states[write.start], f"state after {write.start} in block {block}"
    for told in handoffs:
        if write.start < told.boundary_tokens <= write.end:
            memory.write(group, told.block_id, states[told.boundary_tokens])
    memory.write(group, table[(write.end - 1) // STATE_TOKENS], states[write.end])
