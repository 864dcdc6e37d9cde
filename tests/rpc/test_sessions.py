"""SessionService over a real socket: what a session's life hangs on, and what its death releases."""

import asyncio
from pathlib import Path

import grpc

from kvhold.v1 import session_pb2 as pb
from tests.rpc.harness import ClientSession, RunningDaemon, refused, running

LIVE, GRACE = pb.SESSION_STATE_LIVE, pb.SESSION_STATE_GRACE


async def states(daemon: RunningDaemon) -> list[int]:
    listed = await daemon.sessions.ListSessions(pb.ListSessionsRequest(pool="p"))
    return [session.state for session in listed.sessions]


async def resume(daemon: RunningDaemon, token: str) -> ClientSession:
    opened = await daemon.sessions.OpenSession(pb.OpenSessionRequest(pool="p", resume_token=token))
    assert opened.outcome == pb.OPEN_SESSION_OUTCOME_RESUMED
    return ClientSession(daemon, opened)


async def test_a_dead_clients_blocks_are_free_after_grace_and_its_cache_stays(deadly_daemon: RunningDaemon) -> None:
    daemon = deadly_daemon
    await daemon.open_pool()
    session = await daemon.open_session()
    await session.keep_alive()
    await session.admit(1, 40, 1, 2)
    await session.step()
    session.break_stream()
    pool = daemon.node.pools["p"].pool  # type: ignore[index]
    await daemon.until(lambda: not daemon.node.sessions.sessions())
    assert (pool.counts().held, pool.counts().cached, pool.counts().quarantined) == (0, 2, 0)
    successor = await daemon.open_session()
    assert list((await successor.admit(1, 40, 1, 2)).admit.hit_tokens) == [32]
    assert (await refused(session.step())).reason == "SESSION_FENCED"


async def test_provisional_blocks_of_a_dead_client_are_never_served(deadly_daemon: RunningDaemon) -> None:
    daemon = deadly_daemon
    await daemon.open_pool()
    session = await daemon.open_session()
    await session.admit(1, 40, 1, 2)
    await daemon.until(lambda: not daemon.node.sessions.sessions())
    successor = await daemon.open_session()
    assert list((await successor.admit(1, 40, 1, 2)).admit.hit_tokens) == [0]


async def test_states_are_listed_without_secrets(daemon: RunningDaemon) -> None:
    await daemon.open_pool()
    session = await daemon.open_session(client_name="engine", tenant="red")
    assert await states(daemon) == [GRACE]
    await session.keep_alive()
    assert await states(daemon) == [LIVE]
    await session.admit(1, 40, 1, 2)
    listed = (await daemon.sessions.ListSessions(pb.ListSessionsRequest())).sessions[0]
    assert (listed.client_name, listed.tenant, listed.num_sequences, listed.num_held_blocks) == ("engine", "red", 1, 3)
    assert session.opened.session_id.startswith(listed.short_id) and len(listed.short_id) == 8
    assert session.opened.session_id not in str(listed) and session.opened.resume_token not in str(listed)
    session.break_stream()


async def test_resume_within_grace_keeps_everything_and_fences_the_old_epoch(daemon: RunningDaemon) -> None:
    await daemon.open_pool()
    session = await daemon.open_session()
    await session.keep_alive()
    await session.admit(1, 40, 1, 2)
    session.break_stream()
    resumed = await resume(daemon, session.opened.resume_token)
    assert (resumed.opened.epoch, resumed.opened.last_step) == (2, 1)
    await resumed.keep_alive()
    assert (await refused(session.step())).reason == "SESSION_FENCED"
    answer = await resumed.free(1)
    assert list(answer.num_freed_blocks) == [3]
    resumed.break_stream()


async def test_resume_with_a_wrong_token_or_too_late_is_refused(deadly_daemon: RunningDaemon) -> None:
    daemon = deadly_daemon
    await daemon.open_pool()
    session = await daemon.open_session()
    for token in ("guess", session.opened.session_id):
        request = pb.OpenSessionRequest(pool="p", resume_token=token)
        refusal = await refused(daemon.sessions.OpenSession(request))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "RESUME_REFUSED")
    await daemon.until(lambda: not daemon.node.sessions.sessions())
    request = pb.OpenSessionRequest(pool="p", resume_token=session.opened.resume_token)
    assert (await refused(daemon.sessions.OpenSession(request))).reason == "RESUME_REFUSED"


async def test_an_open_is_idempotent_by_request_id(daemon: RunningDaemon) -> None:
    await daemon.open_pool()
    first, again = [await daemon.open_session(request_id="r1") for _ in range(2)]
    assert first.opened == again.opened and len(daemon.node.sessions.sessions()) == 1


async def test_close_releases_at_once_and_is_idempotent(daemon: RunningDaemon) -> None:
    await daemon.open_pool()
    session = await daemon.open_session()
    await session.admit(1, 40, 1, 2)
    closed = await session.close()
    assert (closed.num_released_sequences, closed.num_released_blocks) == (1, 3)
    counts = daemon.node.pools["p"].pool.counts()  # type: ignore[index]
    assert (counts.held, counts.cached, counts.quarantined) == (0, 2, 0)
    assert (await session.close()).num_released_sequences == 0


async def test_a_silent_stream_is_a_dead_client(short_dir: Path) -> None:
    async with running(short_dir, lease_ttl_s=0.2, grace_period_s=0.1) as daemon:
        await daemon.open_pool()
        session = await daemon.open_session()
        head = session.head

        async def once() -> object:  # type: ignore[misc]
            yield pb.KeepAliveRequest(**head)
            await asyncio.sleep(5)

        stream = daemon.sessions.KeepAlive(once())
        await stream.read()
        await daemon.until(lambda: not daemon.node.sessions.sessions())
        stream.cancel()


async def test_keepalive_of_a_fenced_session_ends_with_the_reason(daemon: RunningDaemon) -> None:
    await daemon.open_pool()
    session = await daemon.open_session()
    await resume(daemon, session.opened.resume_token)
    head = session.head

    async def messages() -> object:  # type: ignore[misc]
        yield pb.KeepAliveRequest(**head)

    refusal = await refused(daemon.sessions.KeepAlive(messages()).read())
    assert refusal.reason == "SESSION_FENCED"


async def test_a_worker_that_still_maps_keeps_a_dead_schedulers_blocks_waiting(deadly_daemon: RunningDaemon) -> None:
    """R17: the scheduler's socket closes first while a worker still runs."""
    daemon = deadly_daemon
    await daemon.open_pool()
    session = await daemon.open_session()
    await session.admit(1, 40, 1, 2)
    node = daemon.node
    live = node.pools["p"]  # type: ignore[index]
    watch = node.worker_mapped(live.name, 0, session.opened.session_id, 4711, is_watched=True)
    await daemon.until(lambda: bool(node.sessions.dead()))
    await daemon.until(lambda: live.pool.counts().quarantined == 3)
    await asyncio.sleep(0.3)
    listed = (await daemon.sessions.ListSessions(pb.ListSessionsRequest())).sessions[0]
    assert listed.state == pb.SESSION_STATE_QUARANTINED and "4711" in listed.quarantine_reason
    assert listed.num_quarantined_blocks == 3
    node.worker_gone(watch)
    await daemon.until(lambda: live.pool.counts().quarantined == 0 and not node.sessions.sessions())


async def test_bounds_on_sessions(short_dir: Path) -> None:
    from kvhold_server.domain.service_limits import ServiceLimits

    async with running(short_dir, limits=ServiceLimits(max_sessions_per_pool=2, max_pools=1)) as daemon:
        await daemon.open_pool()
        for _ in range(2):
            await daemon.open_session()
        refusal = await refused(daemon.open_session())
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_POOL_SESSIONS")
        refusal = await refused(daemon.open_pool("q"))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_POOLS")
