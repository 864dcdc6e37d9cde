"""SessionService: opening, the KeepAlive stream that a session's life hangs on, closing, listing."""

from collections.abc import AsyncIterator, Iterable
from itertools import accumulate
from typing import Any

from kvhold.v1 import session_pb2 as pb
from kvhold.v1 import session_pb2_grpc
from kvhold.v1.pool_pb2 import PrefixStats
from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.ids import PoolName
from kvhold_server.domain.service_limits import ServiceLimits
from kvhold_server.node.node import Node
from kvhold_server.pool.errors import UnknownPoolSession
from kvhold_server.pool.restore import HeldSequence
from kvhold_server.rpc.local_transport import LocalTransport
from kvhold_server.rpc.pool_codec import duration, encode_prefix_stats
from kvhold_server.rpc.tls import tenant_of
from kvhold_server.sessions.lease import SessionState
from kvhold_server.sessions.session import OpenRequest, Session

STATES = {SessionState.LIVE: pb.SESSION_STATE_LIVE, SessionState.GRACE: pb.SESSION_STATE_GRACE}
DEFAULT_TENANT = "default"


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """See the proto."""

    def __init__(self, node: Node, local: LocalTransport | None) -> None:
        self._node = node
        self._local = local

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        node = self._node
        opened = node.open_session(
            _open_request(request, node.limits, tenant_of(context, request.tenant, DEFAULT_TENANT)),
            request.resume_token,
            lambda live: decode_held(request.held, live.identity.options.hash_size_bytes, node.limits),
        )
        session, terms = opened.session, node.sessions.terms
        outcome = pb.OPEN_SESSION_OUTCOME_RESUMED if request.resume_token else pb.OPEN_SESSION_OUTCOME_OPENED
        if opened.must_reassert:
            outcome = pb.OPEN_SESSION_OUTCOME_REASSERTED
        response = pb.OpenSessionResponse(
            boot_id=node.boot_id,
            session_id=session.session_id,
            epoch=session.epoch,
            resume_token=opened.resume_token,
            lease_ttl=duration(terms.lease_ttl_s),
            grace_period=duration(terms.grace_s),
            outcome=outcome,
            last_step=session.steps.last_step,
            last_part=session.steps.last_part,
            lost_sequence_ids=opened.lost_sequence_ids,
        )
        if request.want_local_transport and self._local is not None:
            response.local_transport.socket_path = str(self._local.path)
            response.local_transport.token = self._local.tokens.issue(session.session_id)
        return response

    async def KeepAlive(
        self, request_iterator: AsyncIterator[pb.KeepAliveRequest], context: Any
    ) -> AsyncIterator[pb.KeepAliveResponse]:
        node = self._node
        session_id, stream = "", None
        try:
            async for message in request_iterator:
                if stream is None:
                    session_id = message.session_id
                    stream = node.attach_stream(session_id, message.epoch)
                elif message.session_id != session_id:
                    raise InvalidField("session_id", message.session_id[:8], "must be the stream's first one")
                node.keep_alive(session_id, message.epoch, stream)
                yield self._alive()
        finally:
            if stream is not None:
                node.stream_broken(session_id, stream)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        closed = self._node.close_session(request.session_id, request.epoch, request.completed_step)
        return pb.CloseSessionResponse(
            boot_id=self._node.boot_id,
            num_released_sequences=closed.num_sequences,
            num_released_blocks=closed.num_blocks,
        )

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:
        node = self._node
        if request.pool:
            node.pool(request.pool)
        sessions = node.sessions.sessions(PoolName(request.pool) if request.pool else None)
        return pb.ListSessionsResponse(boot_id=node.boot_id, sessions=[self._info(session) for session in sessions])

    def _alive(self) -> pb.KeepAliveResponse:
        node = self._node
        response = pb.KeepAliveResponse(boot_id=node.boot_id, lease_ttl=duration(node.sessions.terms.lease_ttl_s))
        if node.drain.is_draining:
            response.draining = True
            response.drain_deadline.CopyFrom(duration(node.drain_left_s))
        return response

    def _info(self, session: Session) -> pb.SessionInfo:
        node = self._node
        use = node.session_use(session)
        return pb.SessionInfo(
            short_id=session.short_id,
            pool=session.pool,
            client_name=session.request.client_name,
            tenant=session.request.tenant,
            state=STATES.get(session.state, pb.SESSION_STATE_QUARANTINED),
            epoch=session.epoch,
            num_sequences=use.num_sequences,
            num_held_blocks=use.num_held_blocks,
            num_quarantined_blocks=use.num_quarantined_blocks,
            last_step=session.steps.last_step,
            completed_step=session.steps.completed_step,
            age=duration(node.now_s - session.opened_at_s),
            grace_left=duration(node.sessions.grace_left_s(session, node.now_s)),
            pid=session.request.pid,
            quarantine_reason=node.sessions.quarantine_reason(session.session_id, node.now_s),
            prefix_stats=self._prefix_stats(session),
        )

    def _prefix_stats(self, session: Session) -> PrefixStats | None:
        live = self._node.pools.get(session.pool)
        try:
            return encode_prefix_stats(live.pool.prefix_statistics(session.slot)) if live is not None else None
        except UnknownPoolSession:  # it has ended, and waits for its workers
            return None


def decode_held(messages: Iterable[pb.HeldSequence], hash_size_bytes: int, limits: ServiceLimits) -> list[HeldSequence]:
    """What a client says it holds after a restart. Raises InvalidField."""
    held = []
    for i, m in enumerate(messages):
        path = f"held[{i}]"
        if i >= limits.max_held_sequences:
            raise InvalidField("held", f"more than {i} entries", f"must be at most {limits.max_held_sequences}")
        if sum(m.num_blocks) != len(m.block_ids) or min(m.num_blocks, default=0) < 0:
            raise InvalidField(f"{path}.num_blocks", sum(m.num_blocks), f"must add up to {len(m.block_ids)} block_ids")
        if len(m.hashes) % hash_size_bytes:
            rule = f"must be a multiple of {hash_size_bytes} bytes"
            raise InvalidField(f"{path}.hashes", f"{len(m.hashes)} bytes", rule)
        if min(m.num_tokens, m.num_prompt_tokens, m.publish_tokens) < 0:
            raise InvalidField(f"{path}.num_tokens", m.num_tokens, "must not be negative, nor the other counts")
        ends = list(accumulate(m.num_blocks))
        held.append(
            HeldSequence(
                sequence_id=m.sequence_id,
                num_tokens=m.num_tokens,
                num_prompt_tokens=m.num_prompt_tokens,
                publish_tokens=m.publish_tokens,
                tables=[list(m.block_ids[end - num : end]) for end, num in zip(ends, m.num_blocks, strict=True)],
                hashes=[m.hashes[at : at + hash_size_bytes] for at in range(0, len(m.hashes), hash_size_bytes)],
            )
        )
    return held


def _open_request(request: pb.OpenSessionRequest, limits: ServiceLimits, tenant: str) -> OpenRequest:
    for name, value, most in (
        ("client_name", request.client_name, limits.max_name_length),
        ("tenant", tenant, limits.max_tenant_length),
        ("request_id", request.request_id, limits.max_request_id_length),
    ):
        if len(value) > most:
            raise InvalidField(name, f"{len(value)} characters", f"must have at most {most} characters")
    return OpenRequest(
        pool=PoolName(request.pool),
        client_name=request.client_name,
        tenant=tenant,
        request_id=request.request_id,
        pid=request.pid,
    )
