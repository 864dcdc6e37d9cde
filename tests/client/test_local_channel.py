"""The local transport's client end against a peer that misbehaves."""

import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from kvhold.v1 import block_pb2 as pb
from kvhold_client.errors import Unreachable
from kvhold_client.local_channel import LocalChannel

WELCOME = b"\x01\0\0\0\0"


def peer(path: Path, behave: Callable[[socket.socket], None]) -> threading.Thread:
    """Welcomes one client, then behaves as told."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as client:
            client.recv(1 << 16)
            client.sendall(WELCOME)
            behave(client)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_a_daemon_that_does_not_answer_is_unreachable_in_time(tmp_path: Path) -> None:
    done = threading.Event()
    thread = peer(tmp_path / "s", lambda client: done.wait(30) and None)
    channel = LocalChannel(str(tmp_path / "s"), b"token", timeout_s=0.2)
    with pytest.raises(Unreachable, match="no answer in time"):
        channel.call(pb.StepRequest(step=1))
    done.set()
    thread.join(5)


def test_a_daemon_that_hangs_up_is_unreachable(tmp_path: Path) -> None:
    thread = peer(tmp_path / "s", lambda client: client.recv(1 << 16) and None)
    channel = LocalChannel(str(tmp_path / "s"), b"token", timeout_s=5)
    with pytest.raises(Unreachable, match="closed the connection"):
        channel.call(pb.StepRequest(step=1))
    thread.join(5)


def test_an_answer_may_come_in_pieces(tmp_path: Path) -> None:
    response = pb.StepResponse(num_freed_blocks=range(1000))
    payload = response.SerializeToString()
    frame = (len(payload) + 1).to_bytes(4, "little") + b"\0" + payload

    def dribble(client: socket.socket) -> None:
        client.recv(1 << 16)
        for start in range(0, len(frame), 700):
            client.sendall(frame[start : start + 700])

    thread = peer(tmp_path / "s", dribble)
    channel = LocalChannel(str(tmp_path / "s"), b"token", timeout_s=5)
    assert channel.call(pb.StepRequest(step=1)) == response
    channel.close()
    thread.join(5)


def test_an_interrupted_step_leaves_no_answer_to_the_next(tmp_path: Path) -> None:
    """The connection is given up: an answer that is left behind would be taken for another step's."""

    class Interrupted(BaseException):
        pass

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    def behave(client: socket.socket) -> None:
        client.recv(1 << 16)
        signal.pthread_kill(main, signal.SIGUSR1)
        done.wait(10)
        client.sendall(WELCOME)  # an empty response

    main, done, before = threading.get_ident(), threading.Event(), signal.signal(signal.SIGUSR1, interrupt)
    thread = peer(tmp_path / "s", behave)
    channel = LocalChannel(str(tmp_path / "s"), b"token", timeout_s=5)
    try:
        with pytest.raises(Interrupted):
            channel.call(pb.StepRequest(step=1))
    finally:
        signal.signal(signal.SIGUSR1, before)
        done.set()
    with pytest.raises(Unreachable, match="left behind"):
        channel.call(pb.StepRequest(step=2))
    thread.join(5)
