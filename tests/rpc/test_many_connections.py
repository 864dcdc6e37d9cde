"""After a daemon's restart all its clients connect in the same moment, while it is busy with something else."""

import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvhold_server.memory.descriptor_limit import raise_descriptor_limit
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
