"""What of a node survives its daemon, and how a successor finds it again.

    <state directory>/pools/x.json      how pool x was asked for, its regions' files         PoolManifest
    <state directory>/pools/x.blocks    a record per block of it                             BlockTable
    <state directory>/pools/x.quotas    what its tenants may hold, once that is bounded      QuotaRecords
    <state directory>/sessions          open sessions: ids, epochs, digests of tokens        SessionRecords
    <state directory>/workers           processes that map a pool writably                   WorkerRecords

    made       regions reserved ─▶ table created ─▶ manifest saved ─▶ the pool is answered
    restart    manifest read ─▶ regions adopted ─▶ table scanned ─▶ pool filled ─▶ sessions may resume
    deleted    manifest, table, quotas deleted ─▶ regions released

Only named memory outlives a daemon; pools elsewhere have no journal. Whatever does not fit is dropped with the reason,
and the pool begins fresh.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.ids import PoolName, SessionId
from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.memory.backend import MemoryBackend, Region
from kvhold_server.memory.block_table import BlockTable, garbage_collection_paused
from kvhold_server.memory.block_table_header import TableIdentity, generation_of, identity_digest
from kvhold_server.memory.page_checksums import BlockChecksums, spans_of_group
from kvhold_server.memory.pool_manifest import ManifestDirectory, PoolManifest, RegionFile
from kvhold_server.memory.process_identity import start_ticks
from kvhold_server.memory.quota_records import QuotaRecords
from kvhold_server.memory.recovery_errors import RecordsFull
from kvhold_server.memory.session_records import SessionRecord, SessionRecords, WorkerRecord, WorkerRecords
from kvhold_server.node.filling import drop_allotted, fill_from
from kvhold_server.node.identity import ContentIdentity
from kvhold_server.node.journal import BlockJournal
from kvhold_server.node.live_pool import RecoveryReport
from kvhold_server.node.opening import Opening, OpenPoolCommand
from kvhold_server.pool.pool import Pool
from kvhold_server.sessions.session import EndCause, Session
from kvhold_server.sessions.worker_watch import Watch, WatchId, WorkerWatch

MAX_TENANTS = 1024  # with quotas, a pool


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePool:
    """A pool with its journal, ready to be published."""

    pool: Pool
    journal: BlockJournal | None
    recovery: RecoveryReport
    quotas: dict[str, int] = field(default_factory=dict)  # tenant → blocks


class WarmRestart:
    """Owner of the state directory."""

    def __init__(
        self,
        state_directory: Path,
        *,
        boot_id: str,
        max_sessions: int,
        max_workers: int,
        max_tenants: int = MAX_TENANTS,
        hit: Callable[[str], None] | None = None,
    ) -> None:
        """Reads what a former daemon left. Raises OSError, ShmTooSmall, SystemCallFailed."""
        self.manifests = ManifestDirectory(state_directory)
        self.records, self.former_sessions = SessionRecords.open(
            state_directory / "sessions", max_sessions=max_sessions, hit=hit
        )
        self.workers, self.former_workers = WorkerRecords.open(
            state_directory / "workers", max_workers=max_workers, hit=hit
        )
        self.num_unrecorded_workers = 0  # the file was full
        self._notices: list[str] = []  # what went wrong and was got over
        self.lost: dict[PoolName, tuple[str, str]] = {}  # pools that could not be offered again → reason, detail
        self._boot_id = boot_id
        self._hit = hit
        self._by_name: dict[str, tuple[PoolName, SessionId | None]] = {}  # records of workers that nobody watches
        self._max_tenants = max_tenants
        self._quotas: dict[PoolName, QuotaRecords] = {}  # files that are open: of pools that have quotas

    # ------------------------------------------------------------------- pools
    def make(self, opening: Opening, backend: MemoryBackend, regions: Sequence[Region]) -> MadePool:
        """A fresh pool with an empty table, in place of whatever the name had. Slow (files); touches nothing shared."""
        command = opening.command
        if command.name not in self.lost:  # else it is the same pool to its operators, without its cache
            self.manifests.quotas_path(command.name).unlink(missing_ok=True)
        reason, detail = self.lost.pop(command.name, (opening.fresh_reason, opening.fresh_detail))
        pool = Pool(opening.config)
        if not is_persistent(command, backend):
            report = RecoveryReport(outcome="fresh", reason=reason, detail=detail)
            return MadePool(pool=pool, journal=None, recovery=report)
        files = _region_files(backend, regions)
        manifest = _manifest(command, files)
        table = BlockTable.create(
            self.manifests.table_path(command.name),
            _identity(command, manifest),
            num_blocks=opening.config.num_blocks,
            hash_size_bytes=command.options.hash_size_bytes,
            hit=self._hit,
        )
        self.manifests.save(manifest)
        journal = _journal(command, pool, table, backend, regions)
        report = RecoveryReport(outcome="fresh", reason=reason, detail=detail)
        return MadePool(pool=pool, journal=journal, recovery=report, quotas=self.quotas(command.name))

    def recover(self, opening: Opening, backend: MemoryBackend, regions: Sequence[Region]) -> MadePool:
        """The pool as a former daemon recorded it. Raises BlockTableUnusable."""
        command = opening.command
        manifest = _manifest(command, _region_files(backend, regions))
        table = BlockTable.open(
            self.manifests.table_path(command.name),
            _identity(command, manifest),
            num_blocks=opening.config.num_blocks,
            hash_size_bytes=command.options.hash_size_bytes,
            hit=self._hit,
        )
        with garbage_collection_paused():
            filled = fill_from(table, opening.config)
        found, pool, refused = filled.found, filled.pool, filled.refused
        if filled.problem:
            notice = f"pool {command.name}: no second look at its table, which took longer: {filled.problem}"
            self._notices.append(notice)
        table.forget(block for block in refused if 0 < block < opening.config.num_blocks)
        table.mark_clean(False)
        num_drawable = drop_allotted(pool, table)
        journal = _journal(command, pool, table, backend, regions)
        if journal.checksums is not None:
            journal.unverified = dict(zip(found.blocks, found.bytes_checksums, strict=True))
        report = RecoveryReport(
            outcome="recovered",
            num_kept_blocks=len(found.blocks) - len(refused) - num_drawable,
            num_dropped_provisional_blocks=num_drawable,
            num_dropped_torn_blocks=found.num_torn,
            num_dropped_generation_blocks=found.num_old_generation,
        )
        return MadePool(pool=pool, journal=journal, recovery=report)

    def save_content(
        self, name: PoolName, journal: BlockJournal, content: ContentIdentity, message: bytes, generation: int
    ) -> None:
        """A new content generation. Written down first, then it counts, with one update of the table's header: from the
        return on nothing can revive what was recorded before. Raises SystemCallFailed; then nothing has changed.
        """
        manifest = self.manifests.read(name)
        if manifest is not None:
            self.manifests.save(manifest.replaced(message, generation, journal.table.generation))
        journal.start_generation(identity_digest(repr(content)))

    def as_recorded(self, manifest: PoolManifest) -> PoolManifest:
        """Of a daemon that died while it replaced the contents: the block table says whether it had.

        Raises SystemCallFailed.
        """
        if manifest.former_table_generation and manifest.former_table_generation == generation_of(
            self.manifests.table_path(manifest.name)
        ):
            manifest = manifest.as_before()
            self.manifests.save(manifest)
        return manifest

    def forget_pool(self, name: PoolName) -> None:
        """The pool is deleted: its name is new again."""
        self._close_quotas(name)
        self._forget_by_name([key for key, (of, _) in self._by_name.items() if of == name])
        self.manifests.delete(name)
        self.lost.pop(name, None)

    def give_up(self, name: PoolName, reason: str, detail: str) -> None:
        """The pool's cache is lost through nobody's wish: who opens it next is told why, and its quotas hold on."""
        self._close_quotas(name)
        self.manifests.delete(name, keep_quotas=True)
        self.lost[name] = (reason, detail)

    # ------------------------------------------------------------------ quotas
    def quotas(self, name: PoolName) -> dict[str, int]:
        """What a former daemon was told that tenants may hold of the pool. Nothing, and a notice, if it cannot be read:
        a cache is not given up for that.
        """
        path = self.manifests.quotas_path(name)
        if not path.exists():
            return {}
        try:
            records, former = QuotaRecords.open(path, max_tenants=self._max_tenants, hit=self._hit)
        except KvholdError as error:
            self._notices.append(f"pool {name} begins without quotas: {error}")
            return {}
        self._quotas[name] = records
        if records.problem:
            self._notices.append(f"pool {name} begins without quotas: {records.problem}")
        return former

    def take_notices(self) -> list[str]:
        """What went wrong and was got over since the last call: one line each, for the log."""
        taken = []
        while self._notices:  # a pool may be opened meanwhile, in a thread
            taken.append(self._notices.pop(0))
        return taken

    def set_quota(self, name: PoolName, tenant: str, max_held_blocks: int) -> None:
        """From the return on a successor knows it; 0: unbounded. Raises RecordsFull, ShmTooSmall, SystemCallFailed."""
        records = self._quotas.get(name)
        if not max_held_blocks:
            if records is not None:
                records.drop(tenant)
            return
        if records is None:
            path = self.manifests.quotas_path(name)
            records, _ = QuotaRecords.open(path, max_tenants=self._max_tenants, hit=self._hit)
            self._quotas[name] = records
        records.put(tenant, max_held_blocks)

    def _close_quotas(self, name: PoolName) -> None:
        records = self._quotas.pop(name, None)
        if records is not None:
            records.close()

    # ---------------------------------------------------------------- sessions
    def session_changed(self, session: Session) -> None:
        """Opened, resumed or ended: a successor must know. An ended one is remembered until its blocks are settled."""
        if session.end_cause is EndCause.CLOSED:
            self.records.drop(session.session_id)
            return
        self.records.put(
            SessionRecord(
                session_id=session.session_id,
                pool=session.pool,
                client_name=session.request.client_name,
                tenant=session.request.tenant,
                pid=session.request.pid,
                epoch=session.epoch,
                token_digest=session.token_digest.hex(),
                previous_token_digest=session.previous_token_digest.hex(),
                is_outdated=session.is_outdated,
            )
        )

    def session_gone(self, session: Session) -> None:
        """Its blocks are settled."""
        self.records.drop(session.session_id)
        self._forget_by_name([key for key, (_, of) in self._by_name.items() if of == session.session_id])

    # ----------------------------------------------------------------- workers
    def worker_mapped(self, watch: Watch, all_watches: WorkerWatch) -> None:
        """A process maps a rank: a successor must wait for it, too. One that took the memory by name cannot be proven
        gone; it is remembered until it takes it otherwise, or its session is settled.
        """
        by_name = f"{watch.pool}/{watch.rank}/{watch.session_id or ''}"
        if not watch.is_watched:
            self._remember(by_name, watch)
            self._by_name[by_name] = watch.pool, watch.session_id
            return
        if watch.pid:
            self._remember(self._worker_key(watch.id), watch)
        if by_name in self._by_name and not all_watches.has_unwatched(watch.pool, watch.rank, watch.session_id):
            self._forget_by_name([by_name])

    def worker_gone(self, watch_id: WatchId) -> None:
        """It is gone for certain."""
        self.workers.drop(self._worker_key(watch_id))

    def _remember(self, key: str, watch: Watch) -> None:
        record = WorkerRecord(
            key=key,
            pool=watch.pool,
            rank=watch.rank,
            session_id=watch.session_id or "",
            pid=watch.pid,
            start_ticks=start_ticks(watch.pid) if watch.pid else 0,
        )
        try:
            self.workers.put(record)
        except RecordsFull:
            self.num_unrecorded_workers += 1

    def _forget_by_name(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            del self._by_name[key]
            self.workers.drop(key)

    def _worker_key(self, watch_id: WatchId) -> str:
        return f"{self._boot_id}.{watch_id}"

    def close(self) -> None:
        """Unmaps the files; they stay for the next daemon."""
        self.records.close()
        self.workers.close()
        for name in list(self._quotas):
            self._close_quotas(name)


def is_persistent(command: OpenPoolCommand, backend: MemoryBackend) -> bool:
    """Whether the pool's bytes outlive the daemon, and its blocks can be recorded."""
    return backend.keeps_regions and command.plan is not None and bool(command.message)


def _manifest(command: OpenPoolCommand, files: tuple[RegionFile, ...]) -> PoolManifest:
    return PoolManifest(
        name=command.name, request=command.message, content=b"", backend=command.options.backend, regions=files
    )


def _identity(command: OpenPoolCommand, manifest: PoolManifest) -> TableIdentity:
    return TableIdentity.of(
        plan=command.identity.plan_fingerprint,
        byte_format=repr(command.byte_format),
        options=repr(command.options),
        regions=manifest.regions_text,
        content=repr(command.content),
    )


def _region_files(backend: MemoryBackend, regions: Sequence[Region]) -> tuple[RegionFile, ...]:
    files = []
    for region in regions:
        for fd in backend.open_fds(region, read_only=True):
            try:
                stat = os.fstat(fd)
            finally:
                os.close(fd)
            files.append(
                RegionFile(region_id=region.id, device=stat.st_dev, inode=stat.st_ino, size_bytes=stat.st_size)
            )
    return tuple(files)


def _journal(
    command: OpenPoolCommand, pool: Pool, table: BlockTable, backend: MemoryBackend, regions: Sequence[Region]
) -> BlockJournal:
    checksums = _checksums(command, pool.config, backend, regions) if command.options.verify_checksums else None
    return BlockJournal(
        pool=pool,
        table=table,
        content_digest=identity_digest(repr(command.content)),
        checksums=checksums,
        unverified={},
    )


def _checksums(
    command: OpenPoolCommand, config: PoolConfig, backend: MemoryBackend, regions: Sequence[Region]
) -> BlockChecksums:
    """Maps every region for reading; the views keep the mappings alive."""
    plan = command.plan
    assert plan is not None
    views = {}
    for region in regions:
        (fd,) = backend.open_fds(region, read_only=True)
        try:
            views[region.rank, region.host] = memoryview(mmap.mmap(fd, region.size_bytes, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
    return BlockChecksums(
        [
            [
                (view, spans_of_group(plan.ranks[rank], group, host=host))
                for (rank, host), view in sorted(views.items(), key=lambda item: item[0])
            ]
            for group in range(len(config.groups))
        ]
    )
