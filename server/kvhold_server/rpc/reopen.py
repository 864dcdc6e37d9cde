"""At start: offering again the pools and sessions that a former daemon of this state directory had.

manifest ─▶ plan ─▶ adopt every region ─▶ scan the table ─▶ pool, RECOVERED      sessions of it may resume
               │            │                   │
               └────────────┴───────────────────┴─▶ regions given back; the next OpenPool is FRESH, with this reason
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvhold.v1 import pool_pb2 as pb
from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.ids import Epoch, PoolName, SessionId
from kvhold_server.memory.backend import MemoryBackend, Region, RegionRequest
from kvhold_server.memory.errors import UnknownRegion
from kvhold_server.memory.pool_manifest import PoolManifest
from kvhold_server.memory.process_identity import start_ticks
from kvhold_server.memory.recovery_errors import BlockTableUnusable
from kvhold_server.memory.session_records import SessionRecord, WorkerRecord
from kvhold_server.node.node import Node
from kvhold_server.node.opening import Opening
from kvhold_server.node.warm_restart import WarmRestart
from kvhold_server.rpc.fd_peer import open_pidfd
from kvhold_server.rpc.planning import make_plan
from kvhold_server.rpc.pool_codec import decode_open_pool
from kvhold_server.sessions.session import OpenRequest
from kvhold_server.sessions.session_table import RestoredSession
from kvhold_server.sessions.worker_watch import WatchId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerWorker:
    """A process that mapped a pool before the restart, and still runs."""

    watch_id: WatchId
    pid_fd: int  # the caller waits for it, and closes it


def reopen_all(node: Node, warm: WarmRestart) -> list[FormerWorker]:
    """Before the daemon serves. What cannot be kept is logged, and its memory given back. Does not fail.

    Returns the processes whose end the caller must report to the node.
    """
    manifests, problems = warm.manifests.load()
    for problem in problems:
        logger.warning("a pool is not offered again: %s", problem)
    for manifest in manifests:
        try:
            _reopen(node, warm, warm.as_recorded(manifest))
        except (KvholdError, ValueError) as error:  # ValueError: the message cannot be decoded
            _give_up(warm, manifest.name, error)
    log_notices(warm)
    for session in warm.former_sessions:
        _restore(node, warm, session)
    found = [(record, _watch(node, warm, record)) for record in warm.former_workers]
    for record, worker in found:
        if worker is None:
            node.client_died(record.session_id, record.pid)
    return [worker for _, worker in found if worker is not None]


def log_notices(warm: WarmRestart) -> None:
    """What was got over, and an operator should know of."""
    for notice in warm.take_notices():
        logger.warning("%s", notice)


def reclaim_all(node: Node) -> None:
    """Gives back memory that dead daemons left and nobody has adopted."""
    for backend in node.backends.values():
        report = backend.reclaim_stale()
        if report.names:
            logger.info("gave back %d bytes that nobody wants: %s", report.reclaimed_bytes, ", ".join(report.names))


def _reopen(node: Node, warm: WarmRestart, manifest: PoolManifest) -> None:
    request = pb.OpenPoolRequest.FromString(manifest.request)
    if manifest.content:
        request.content.ParseFromString(manifest.content)
    plan = make_plan(request.plan, node.limits)
    command = replace(decode_open_pool(request, plan, node.default_backend, node.limits), message=manifest.request)
    opening = node.begin_open_pool(command)
    assert isinstance(opening, Opening), "each manifest has a name of its own"
    regions: list[Region] = []
    backend = node.backends[command.options.backend]
    try:
        _adopt_all(backend, opening.requests, regions)
        made = replace(warm.recover(opening, backend, regions), quotas=warm.quotas(manifest.name))
    except BaseException:
        node.abort_open_pool(opening)
        for region in regions:
            backend.release(region)
        raise
    opened = node.finish_open_pool(opening, tuple(regions), made)
    opened.live.is_claimed = False
    opened.live.content_generation = manifest.content_generation
    found = opened.live.recovery
    kept, dropped = found.num_kept_blocks, found.num_dropped_blocks
    logger.info("pool %s is back: %d blocks kept, %d dropped, %.3f s", manifest.name, kept, dropped, found.duration_s)


def _adopt_all(backend: MemoryBackend, requests: Sequence[RegionRequest], adopted: list[Region]) -> None:
    """Appends one region a request, as the plan wants it. Raises UnknownRegion, RegionMismatch."""
    existing = {region.id: region for region in backend.list_existing()}
    for request in requests:
        found = existing.get(request.region_id)
        if found is None or found.size_bytes < request.size_bytes:
            raise UnknownRegion(request.region_id)
        adopted.append(backend.adopt(replace(found, requested_bytes=request.size_bytes)))


def _give_up(warm: WarmRestart, name: PoolName, error: Exception) -> None:
    if isinstance(error, BlockTableUnusable):
        reason, detail = error.reason_word, error.detail
    elif isinstance(error, KvholdError):
        reason, detail = ("REGION_MISSING" if isinstance(error, UnknownRegion) else error.reason()), str(error)
    else:
        reason, detail = "HEADER_CORRUPT", str(error)
    warm.give_up(name, reason, detail)
    logger.warning("pool %s begins fresh: %s: %s", name, reason, detail)


def _watch(node: Node, warm: WarmRestart, record: WorkerRecord) -> FormerWorker | None:
    """Watches a process again; None if it is gone, or what it maps is, or nobody could watch it before."""
    found = None
    is_here = PoolName(record.pool) in node.pools
    if not record.pid:  # it took the memory by name
        if is_here:  # recorded again under the same key, in one change: it is never forgotten in between
            node.worker_mapped(PoolName(record.pool), record.rank, record.session_id, 0, is_watched=False)
        else:
            warm.workers.drop(record.key)
        return None
    pid_fd = open_pidfd(record.pid) if is_here else -1
    if pid_fd >= 0:
        if record.start_ticks == start_ticks(record.pid):  # with the descriptor open the number cannot change hands
            watch_id = node.worker_mapped(
                PoolName(record.pool), record.rank, record.session_id, record.pid, is_watched=True
            )
            found = FormerWorker(watch_id=watch_id, pid_fd=pid_fd)
        else:
            os.close(pid_fd)
    warm.workers.drop(record.key)
    return found


def _restore(node: Node, warm: WarmRestart, record: SessionRecord) -> None:
    live = node.pools.get(PoolName(record.pool))
    if live is None:
        warm.records.drop(record.session_id)
        return
    request = OpenRequest(pool=live.name, client_name=record.client_name, tenant=record.tenant, pid=record.pid)
    session = node.sessions.restore(
        RestoredSession(
            session_id=SessionId(record.session_id),
            request=request,
            epoch=Epoch(record.epoch),
            token_digest=bytes.fromhex(record.token_digest),
            previous_token_digest=bytes.fromhex(record.previous_token_digest),
        ),
        node.now_s,
    )
    session.slot = live.pool.open_session()
    live.members.add(session.session_id)
    session.is_outdated = record.is_outdated
    node.recovering.begin(live, session, node.now_s)
