"""After a daemon's restart all its clients connect in the same moment, while it is busy with something else."""

import resource
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvhold_client.fd_client import fetch_region
from kvhold_client.mapping_errors import ChannelNotReachable
from kvhold_server.memory.descriptor_limit import raise_descriptor_limit
from kvhold_server.rpc.workers import make_fd_channel
from tests.rpc.harness import RunningDaemon

NUM_CLIENTS = 500


@pytest.mark.parametrize("suffix", ["", ".local", ".fd"])
async def test_five_hundred_connect_while_the_daemon_is_busy(daemon: RunningDaemon, suffix: str) -> None:
    """Nobody is refused: a client that does not wait gets EAGAIN from a full queue, and goes the slower way."""
    if int(Path("/proc/sys/net/core/somaxconn").read_text()) < NUM_CLIENTS:
        pytest.skip("net.core.somaxconn of this machine is smaller")
    raise_descriptor_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * NUM_CLIENTS + 100:
        pytest.skip("too few descriptors")
    path = f"{daemon.daemon.config.socket}{suffix}"
    with ExitStack() as stack:
        for _ in range(NUM_CLIENTS):  # without a turn of the event loop in between: nobody is accepted
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            client.connect(path)


async def test_as_many_may_have_memory_mapped_as_there_may_be_sessions(daemon: RunningDaemon, short_dir: Path) -> None:
    channel = make_fd_channel(daemon.node, short_dir / "x", -1)
    assert channel.options.max_connections >= daemon.node.limits.max_sessions


def full_listener(path: Path) -> tuple[socket.socket, list[socket.socket]]:
    """A socket whose queue is full, and those who fill it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(0)
    waiting = []
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            client.connect(str(path))
        except BlockingIOError:
            client.close()
            return listener, waiting
        waiting.append(client)


def test_a_worker_waits_in_a_full_queue_and_not_for_ever(short_dir: Path) -> None:
    listener, waiting = full_listener(short_dir / "full")
    with listener:
        begun = time.monotonic()
        with pytest.raises(ChannelNotReachable, match=r"not accepted within 0\.3 s"):
            fetch_region(str(short_dir / "full"), b"t", timeout_s=0.3)
        assert 0.2 < time.monotonic() - begun < 5
        accepting = threading.Timer(0.2, lambda: [listener.accept()[0].close() for _ in range(len(waiting) + 1)])
        accepting.start()
        with pytest.raises(Exception, match=r"(?i)closed|broken|reset|ended"):
            fetch_region(str(short_dir / "full"), b"t", timeout_s=5)
        accepting.join()
        for client in waiting:
            client.close()
