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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from stage import Daemon, choose_cores

from kvhold_client.step_stream import open_stream

REQUEST, ANSWER = bytes(660), bytes(97)
LENGTH = struct.Struct("<I")
PAUSE_S = 0.003  # between calls, as between the steps of a device


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Of one way. In µs; CPU is that of all threads, for one call."""

    p50: float
    caller_cpu: float
    server_cpu: float


def measure(call: Callable[[], bytes], server: Daemon, *, calls: int, pause_s: float = 0.0) -> Floor:
    """Some round trips, with a pause after each: with one, caches are cold and cores asleep when a request comes."""
    for _ in range(50):
        call()
    times, caller, served = [], time.process_time(), server.cpu_s()
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
        if pause_s:
            time.sleep(pause_s)
    return Floor(
        p50=statistics.median(times) * 1e6,
        caller_cpu=(time.process_time() - caller) / calls * 1e6,
        server_cpu=(server.cpu_s() - served) / calls * 1e6,
    )


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
                live = Daemon(target="", pid=server.pid)
                warm = measure(call, live, calls=arguments.calls)
                cold = measure(call, live, calls=arguments.calls // 5, pause_s=PAUSE_S)
                cpu = f"CPU: caller {warm.caller_cpu:4.0f}, server {warm.server_cpu:4.0f} µs"
                after = f"after pauses: p50 {cold.p50:5.0f}, server {cold.server_cpu:4.0f} µs"
                print(f"{way:10} p50 {warm.p50:5.0f} µs   {cpu}   {after}")
            server.kill()
            server.wait()
    sys.stdout.flush()
    os._exit(0)  # the thread that feeds the stream waits for ever


if __name__ == "__main__":
    main()
