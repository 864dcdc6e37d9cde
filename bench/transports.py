"""The floor of three transports: an echo of a decode step's bytes, without any of our code behind it.

    python bench/transports.py [--calls 2000]

unary and stream are gRPC (asyncio server, blocking client, as ours), one thread is the same stream driven by its caller
alone, as our client does; socket is a length-framed unix socket served by an asyncio reader callback. Server and client
are pinned to different cores where there are two.
"""

import argparse
import asyncio
import os
import queue
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from stage import choose_cores

from kvhold_client.step_stream import open_stream

REQUEST, ANSWER = bytes(660), bytes(97)
LENGTH = struct.Struct("<I")


async def serve(place: Path) -> None:
    """Answers on both sockets until it is killed."""

    async def unary(request: bytes, context: Any) -> bytes:
        return ANSWER

    async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield ANSWER

    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor", handlers),))
    server.add_insecure_port(f"unix:{place}/grpc")
    await server.start()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{place}/frames")
    listener.listen()
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    peer, _ = await loop.sock_accept(listener)

    def readable() -> None:
        if peer.recv(1 << 16):
            peer.send(LENGTH.pack(len(ANSWER)) + ANSWER)
        else:
            loop.remove_reader(peer)

    loop.add_reader(peer, readable)
    await asyncio.Event().wait()


def framed(place: Path) -> Callable[[], bytes]:
    """One round trip on the socket."""
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(f"{place}/frames")

    def call() -> bytes:
        peer.sendall(LENGTH.pack(len(REQUEST)) + REQUEST)
        return peer.recv(1 << 16)

    return call


def streamed(channel: grpc.Channel) -> Callable[[], bytes]:
    """One round trip on an open stream."""
    pending: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def requests() -> Iterator[bytes]:
        while True:
            yield pending.get()

    answers = channel.stream_stream("/floor/Stream")(requests())

    def call() -> bytes:
        pending.put(REQUEST)
        return bytes(next(answers))

    return call


def one_thread(channel: grpc.Channel) -> Callable[[], bytes]:
    """The same without gRPC's threads in between."""
    stream = open_stream(channel, b"/floor/Stream")

    def call() -> bytes:
        stream.send(REQUEST)
        return stream.receive()

    return call


def median_us(call: Callable[[], bytes], calls: int) -> tuple[float, float]:
    """Median of the round trips, and the caller's CPU time (all threads) for one."""
    for _ in range(100):
        call()
    times, cpu = [], time.process_time()
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6, (time.process_time() - cpu) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
        return
    cores = choose_cores()
    with tempfile.TemporaryDirectory() as name:
        command = ["taskset", "-c", str(cores.daemon), sys.executable, __file__, "--serve", name]
        server = subprocess.Popen(command)
        os.sched_setaffinity(0, {cores.scheduler})
        while not Path(name, "frames").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        with grpc.insecure_channel(f"unix:{name}/grpc") as channel:
            unary = channel.unary_unary("/floor/Unary")
            ways: dict[str, Callable[[], bytes]] = {
                "unary": lambda: bytes(unary(REQUEST)),
                "stream": streamed(channel),
                "one thread": one_thread(channel),
                "socket": framed(Path(name)),
            }
            for way, call in ways.items():
                p50, cpu = median_us(call, arguments.calls)
                print(f"{way:10} p50 {p50:6.0f} µs   caller's CPU {cpu:6.0f} µs")
            server.kill()
            server.wait()
    sys.stdout.flush()
    os._exit(0)  # the thread that feeds the stream waits for ever


if __name__ == "__main__":
    main()
