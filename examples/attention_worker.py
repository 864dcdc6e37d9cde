"""Three processes, one cache: a writer, a reader that attends over the writer's blocks, and a successor.

    main        starts a daemon, opens a pool for a model of full, window, latent and recurrent layers, and computes
                everything once by itself in contiguous memory: the reference
    writer      admits a prompt, computes it into its blocks through the mapped views, publishes, decodes; then SIGKILL
    reader      while the writer lives: maps read-only, follows the writer's block tables, computes the next token
    successor   after the writer was killed: admits the same tokens, hits the writer's blocks, goes on decoding

Every logit of every process is compared bit by bit with the reference.

    python examples/attention_worker.py [--layout LBNHC|BLNHC|…] [--backend posix_shm|memfd]
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny_model as tiny
import torch

from kvhold.v1 import plan_pb2
from kvhold_client import Client, LocalDaemon, PoolRequest, PrefixHasher, Session
from kvhold_client.sequence import Sequence

POOL = "tiny"
BLOCK_SIZE_TOKENS = 16
NUM_BLOCKS = 64
PROMPT = [(7 * position * position + 3 * position + 5) % tiny.VOCABULARY for position in range(77)]
NUM_PREFILL_CHUNKS = 2
NUM_WRITER_TOKENS = 5
NUM_SUCCESSOR_TOKENS = 12
PAGE_BYTES = 2048  # equal for all four kinds, the recurrent one padded


def plan_request(layout: str) -> plan_pb2.PlanRequest:
    """What an engine with this model would send."""
    request = plan_pb2.PlanRequest(
        config=plan_pb2.PlannerConfig(
            strategy=plan_pb2.STRATEGY_MODERN,
            layout=plan_pb2.Layout.Value(f"LAYOUT_{layout}"),
            max_model_len_tokens=256,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            cache_block_size_tokens=BLOCK_SIZE_TOKENS,
            enable_prefix_caching=True,
            state_cache_mode=plan_pb2.STATE_CACHE_MODE_ALL,
        )
    )
    spec = {kind: request.layer_specs.add(block_size_tokens=BLOCK_SIZE_TOKENS) for kind in dict.fromkeys(tiny.KINDS)}
    for kind in ("full", "window"):
        spec[kind].geometry.num_kv_heads, spec[kind].geometry.head_size_elems = tiny.NUM_HEADS, tiny.HEAD_SIZE
    spec["full"].full_attention.SetInParent()
    spec["window"].sliding_window.sliding_window_tokens = tiny.WINDOW
    spec["latent"].geometry.num_kv_heads = 1
    spec["latent"].geometry.head_size_elems = tiny.LATENT_SIZE + tiny.ROTARY_SIZE
    spec["latent"].mla_attention.SetInParent()
    for kind in ("full", "window", "latent"):
        spec[kind].geometry.dtype = plan_pb2.DTYPE_BFLOAT16
    mamba = spec["state"].mamba
    mamba.states.add(shape=tiny.CONVOLUTION_SHAPE, dtype=plan_pb2.DTYPE_BFLOAT16)
    mamba.states.add(shape=tiny.RECURRENCE_SHAPE, dtype=plan_pb2.DTYPE_FLOAT32)
    mamba.page_size_padded_bytes = PAGE_BYTES
    mamba.state_cache_mode = plan_pb2.STATE_CACHE_MODE_ALL
    layers_per_kind = len(tiny.KINDS) // len(spec)
    rank = request.ranks.add(available_memory_bytes=NUM_BLOCKS * layers_per_kind * PAGE_BYTES)
    for name, kind in zip(tiny.LAYER_NAMES, tiny.KINDS, strict=True):
        rank.layers.add(layer_name=name, layer_spec_index=list(spec).index(kind))
    return request


def bits(logits: torch.Tensor) -> str:
    """Equal only for bitwise equal logits."""
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]


def reference() -> dict[str, Any]:
    """Everything in one process and contiguous memory: tokens, and the bits of the logits after each."""
    model, cache = tiny.TinyModel(), tiny.ContiguousCache(256)
    tokens = list(PROMPT)
    logit_bits = []
    for position in range(len(PROMPT) + NUM_WRITER_TOKENS + 1 + NUM_SUCCESSOR_TOKENS):
        logits = model.forward(tokens[position], position, cache)
        logit_bits.append(bits(logits))
        if position + 1 == len(tokens):
            tokens.append(int(logits.argmax()))
    return {"tokens": tokens, "bits": logit_bits}


class Engine:
    """One sequence of one session: admits it, computes it token by token into its blocks, publishes as it goes."""

    def __init__(self, client: Client, name: str, tokens: list[int]) -> None:
        pool = client.get_pool(POOL)
        self.session: Session = pool.open_session(client_name=name)
        self.region = pool.map_rank(0, session=self.session, library="torch")
        self.model = tiny.TinyModel()
        self.tokens = list(tokens)
        self.logit_bits: dict[int, str] = {}
        self._hashes = PrefixHasher(block_size_tokens=BLOCK_SIZE_TOKENS).sequence()
        self.sequence: Sequence = self.session.table.new_sequence(1, b"".join(self._hashes.extend(tokens)))

    def admit(self, **caps: int) -> int:
        """Returns the hit; the granted rest is computed."""
        self.session.begin_step()
        self.session.table.admit(self.sequence, num_tokens=len(self.tokens), **caps)
        (admission,) = self.session.table.flush().admitted
        self.cache = tiny.PagedCache(self.region, self.sequence.tables, BLOCK_SIZE_TOKENS)
        self.num_computed = admission.hit_tokens
        self._compute(admission.hit_tokens + admission.granted_tokens)
        return admission.hit_tokens

    def step(self, target: int) -> None:
        """One more scheduler step, up to `target` computed tokens."""
        self.session.begin_step()
        new = self._hashes.extend(self.tokens[self._hashes.num_tokens :])
        self.sequence.add_hashes(b"".join(new), len(new))
        self.session.table.extend(
            self.sequence, slots_needed=target, processed_tokens=self.num_computed, publish_tokens=target
        )
        outcome = self.session.table.flush()
        assert not outcome.refused_extends
        self.cache.tables = self.sequence.tables
        self._compute(target)

    def decode(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.step(len(self.tokens))

    def settle(self) -> None:
        """Says that every step so far is complete: what it published is everybody's now."""
        self.session.idle()

    def report(self, **more: Any) -> None:
        print(json.dumps({"tokens": self.tokens, "bits": self.logit_bits, **more}), flush=True)

    def _compute(self, target: int) -> None:
        for position in range(self.num_computed, target):
            logits = self.model.forward(self.tokens[position], position, self.cache)
            self.logit_bits[position] = bits(logits)
            if position + 1 == len(self.tokens):
                self.tokens.append(int(logits.argmax()))
        self.num_computed = target


def writer(target: str, _: dict[str, Any]) -> None:
    with Client(target) as client:
        engine = Engine(client, "writer", PROMPT)
        assert engine.admit(max_new_tokens=len(PROMPT) // NUM_PREFILL_CHUNKS) == 0
        engine.step(len(PROMPT))
        engine.decode(NUM_WRITER_TOKENS)
        engine.settle()
        engine.report(tables=engine.sequence.tables, num_computed=engine.num_computed)
        signal.pause()  # until it is killed: its region stays mapped, its session open


def reader(target: str, seen: dict[str, Any]) -> None:
    with Client(target) as client, client.get_pool(POOL).map_rank(0, read_only=True, library="torch") as region:
        cache = tiny.PagedCache(region, seen["tables"], BLOCK_SIZE_TOKENS)
        position = seen["num_computed"]
        logits = tiny.TinyModel().forward(seen["tokens"][position], position, cache)
        print(json.dumps({"bits": {position: bits(logits)}}), flush=True)
        del cache


def successor(target: str, seen: dict[str, Any]) -> None:
    with Client(target) as client:
        engine = Engine(client, "successor", seen["tokens"])
        hit_tokens = engine.admit()
        engine.decode(NUM_SUCCESSOR_TOKENS)
        engine.report(hit_tokens=hit_tokens)
        engine.session.close()


ROLES = {"writer": writer, "reader": reader, "successor": successor}


def start(role: str, target: str, seen: dict[str, Any]) -> "subprocess.Popen[str]":
    command = [sys.executable, str(Path(__file__).resolve()), "--role", role, "--target", target]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    assert process.stdin is not None
    process.stdin.write(json.dumps(seen) + "\n")
    process.stdin.flush()
    return process


def answer(process: "subprocess.Popen[str]", role: str) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"the {role} failed with status {process.wait()}")
    result: dict[str, Any] = json.loads(line)
    return result


def compare(role: str, got: dict[str, Any], expected: dict[str, Any]) -> None:
    for position, logit_bits in got["bits"].items():
        if logit_bits != expected["bits"][int(position)]:
            raise SystemExit(f"{role}: the logits after token {position} are not those of the contiguous cache")
    tokens = got.get("tokens", [])
    if tokens != expected["tokens"][: len(tokens)]:
        raise SystemExit(f"{role}: other tokens than the contiguous cache's")
    print(f"{role:<10} {len(got['bits']):>3} logit vectors, bit for bit those of a contiguous cache")


def run(layout: str, backend: str) -> None:
    expected = reference()
    with LocalDaemon() as daemon, Client(daemon.target) as client:
        pool = client.open_pool(PoolRequest(name=POOL, plan=plan_request(layout), backend=backend))
        print(f"pool       {layout}, {backend}: {pool.info.counts.num_blocks} blocks, groups of", end=" ")
        print(", ".join(group.kind for group in pool.info.shape.groups))
        writing = start("writer", daemon.target, {})
        written = answer(writing, "writer")
        compare("writer", written, expected)
        reading = start("reader", daemon.target, written)
        compare("reader", answer(reading, "reader"), expected)
        reading.wait()
        writing.send_signal(signal.SIGKILL)
        writing.wait()
        continuing = start("successor", daemon.target, written)
        continued = answer(continuing, "successor")
        compare("successor", continued, expected)
        continuing.wait()
        full_blocks = len(written["bits"]) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
        if continued["hit_tokens"] != full_blocks:
            raise SystemExit(f"the successor hit {continued['hit_tokens']} tokens, not {full_blocks}")
        print(f"successor  hit {full_blocks} tokens of a process that was killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="LBNHC")
    parser.add_argument("--backend", default="posix_shm", choices=["posix_shm", "memfd"])
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        ROLES[arguments.role](arguments.target, json.loads(sys.stdin.readline()))
    else:
        run(arguments.layout, arguments.backend)


if __name__ == "__main__":
    main()
