"""The local transport's own rules; what the calls do is test_blocks.py's subject, on both transports."""

import stat

import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from kvhold.v1 import block_pb2 as pb
from kvhold.v1 import session_pb2
from kvhold_server.rpc import local_transport
from kvhold_server.rpc.framed_calls import Answer
from kvhold_server.rpc.local_transport import LocalTokens
from tests.rpc.harness import RunningDaemon
from tests.rpc.local_blocks import HEADER, NUMBERS, Wire


async def opened(daemon: RunningDaemon) -> tuple[session_pb2.OpenSessionResponse, Wire]:
    """A session that asked for the transport, and its connection, welcomed."""
    await daemon.open_pool()
    session = await daemon.open_session(want_local_transport=True)
    wire = await Wire.open(session.opened.local_transport.socket_path)
    wire.send(0, session.opened.local_transport.token)
    assert await wire.receive() == (0, b"")
    return session.opened, wire


def step(session: session_pb2.OpenSessionResponse, number: int, **parts: object) -> bytes:
    request = pb.StepRequest(session_id=session.session_id, epoch=session.epoch, step=number, **parts)  # type: ignore[arg-type]
    return request.SerializeToString()


def reason(payload: bytes) -> str:
    info = ErrorInfo()
    assert Status.FromString(payload).details[0].Unpack(info)
    return info.reason


async def test_it_is_offered_only_to_those_who_ask(daemon: RunningDaemon) -> None:
    await daemon.open_pool()
    assert not (await daemon.open_session()).opened.HasField("local_transport")
    assert (await daemon.open_session(want_local_transport=True)).opened.HasField("local_transport")


async def test_its_socket_is_for_the_group_only(daemon: RunningDaemon) -> None:
    transport = daemon.daemon.local_transport
    assert transport is not None
    assert stat.S_IMODE(transport.path.stat().st_mode) == 0o660


async def test_requests_sent_ahead_are_answered_in_order(daemon: RunningDaemon) -> None:
    session, wire = await opened(daemon)
    for number in range(1, 6):
        admit = pb.AdmitItems(sequence_ids=[number], num_tokens=[16 * number])
        wire.send(NUMBERS["Step"], step(session, number, admit=admit))
    for number in range(1, 6):
        code, payload = await wire.receive()
        assert code == 0 and list(pb.StepResponse.FromString(payload).admit.num_blocks) == [number]
    wire.close()


async def test_who_sends_many_ahead_delays_the_others_by_one(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of each connection a turn: a flood in one packet is not answered in one go."""
    flooder, flood = await opened(daemon)
    session = await daemon.open_session(want_local_transport=True)
    wire = await Wire.open(session.opened.local_transport.socket_path)
    wire.send(0, session.opened.local_transport.token)
    assert await wire.receive() == (0, b"")
    transport = daemon.daemon.local_transport
    assert transport is not None
    method = transport.methods[NUMBERS["Step"]]
    answer, order = method.answer, list[str]()

    def noted(payload: bytes, session_id: str = "") -> Answer:
        order.append(session_id)
        return answer(payload, session_id)

    monkeypatch.setattr(method, "answer", noted)
    for number in range(1, 101):
        flood.send(NUMBERS["Step"], step(flooder, number))
    wire.send(NUMBERS["Step"], step(session.opened, 1))
    for _ in range(100):
        assert (await flood.receive())[0] == 0
    assert (await wire.receive())[0] == 0
    assert order.index(session.opened.session_id) <= 3 and len(order) == 101
    flood.close()
    wire.close()


async def test_a_request_in_pieces_is_put_together(daemon: RunningDaemon) -> None:
    session, wire = await opened(daemon)
    payload = step(session, 1, admit=pb.AdmitItems(sequence_ids=[1], num_tokens=[40]))
    for byte in HEADER.pack(len(payload) + 1, NUMBERS["Step"]) + payload:
        wire.writer.write(bytes([byte]))
        await wire.writer.drain()
    code, answer = await wire.receive()
    assert code == 0 and len(pb.StepResponse.FromString(answer).admit.block_ids) == 3
    wire.close()


async def test_a_token_opens_one_connection(daemon: RunningDaemon) -> None:
    session, wire = await opened(daemon)
    second = await Wire.open(session.local_transport.socket_path)
    second.send(0, session.local_transport.token)
    assert await second.ended()
    wire.close()


async def test_without_a_token_nothing_is_answered(daemon: RunningDaemon) -> None:
    session, wire = await opened(daemon)
    stranger = await Wire.open(session.local_transport.socket_path)
    stranger.send(NUMBERS["Step"], step(session, 1))
    assert await stranger.ended()
    wire.close()


async def test_a_connection_serves_its_own_session_only(daemon: RunningDaemon) -> None:
    """POOL-22: a pin has an owner, and nobody else can release it."""
    _, wire = await opened(daemon)
    other = await daemon.open_session()
    wire.send(NUMBERS["Free"], step(other.opened, 1))
    code, payload = await wire.receive()
    assert code == 9 and reason(payload) == "WRONG_SESSION"
    wire.close()


async def test_junk_gets_a_typed_error_and_the_connection_goes_on(daemon: RunningDaemon) -> None:
    session, wire = await opened(daemon)
    wire.send(NUMBERS["Step"], b"\xff\xff\xff")
    code, payload = await wire.receive()
    assert code == 3 and reason(payload) == "MALFORMED_MESSAGE"
    wire.send(99, b"")
    code, payload = await wire.receive()
    assert code == 3 and reason(payload) == "MALFORMED_MESSAGE"
    wire.send(NUMBERS["Step"], step(session, 1))
    assert (await wire.receive())[0] == 0
    wire.close()


@pytest.mark.parametrize("surplus", [1, 1000])
async def test_an_oversize_frame_is_refused_and_the_connection_goes_on(daemon: RunningDaemon, surplus: int) -> None:
    session, wire = await opened(daemon)
    limit = daemon.node.limits.max_message_bytes
    length = limit + 1 + surplus
    wire.writer.write(HEADER.pack(length, NUMBERS["Step"]) + bytes(length - 1))
    wire.send(NUMBERS["Step"], step(session, 1))
    code, payload = await wire.receive()
    assert code == 3 and reason(payload) == "MESSAGE_TOO_LARGE"
    assert (await wire.receive())[0] == 0
    wire.close()


async def test_a_frame_far_beyond_the_limit_ends_the_connection_with_a_typed_error(daemon: RunningDaemon) -> None:
    _, wire = await opened(daemon)
    wire.writer.write(HEADER.pack(2**31, NUMBERS["Step"]))
    code, payload = await wire.receive()
    assert code == 3 and reason(payload) == "MESSAGE_TOO_LARGE"
    assert await wire.ended()


async def test_a_client_that_does_not_read_is_not_read_from(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_transport, "MAX_UNSENT_BYTES", 1 << 16)
    session, wire = await opened(daemon)
    question = pb.LookupItems(num_tokens=[1] * 5000, num_hashes=[0] * 5000)
    request = pb.LookupRequest(session_id=session.session_id, epoch=session.epoch, lookup=question).SerializeToString()
    transport = daemon.daemon.local_transport
    assert transport is not None
    (connection,) = transport._connections
    wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(100):  # answers of 10 kB, far more than the sockets take
        wire.send(NUMBERS["Lookup"], request)
    await daemon.until(lambda: not connection._is_reading)
    wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
    for _ in range(100):
        assert (await wire.receive())[0] == 0
    assert connection._is_reading
    wire.close()


def test_tokens_expire_and_the_oldest_is_forgotten() -> None:
    now_s, names = [0.0], iter([b"a", b"b", b"c", b"d"])
    tokens = LocalTokens(lambda: now_s[0], lambda: next(names), max_tokens=2)
    for session_id in ("s1", "s2", "s3"):
        tokens.issue(session_id)
    assert tokens.redeem(b"a") is None
    assert tokens.redeem(b"b") == "s2" and tokens.redeem(b"b") is None
    now_s[0] = 31.0
    assert tokens.redeem(b"c") is None
