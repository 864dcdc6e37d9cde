"""A backend whose regions outlive the daemon, because a holder process has their descriptors, too.

    reserve        inner.reserve ─▶ holder.put          (holder away: reserved all the same, and given again later)
    next daemon    list_existing ─▶ adopt               descriptors from the holder, bytes untouched
                   reclaim_stale                        what nobody adopted is dropped
    release        inner.release or close, then holder.drop

An adopted region is a row of descriptors and nothing else: that is all that exporting takes, and the driver is not
asked. It keeps its size.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvhold_server.memory.backend import (
    HOST_DEVICE_UUID,
    BackendHealth,
    ExportedRegion,
    ExportKind,
    MemoryBackend,
    MemoryUsage,
    ReclaimReport,
    Region,
    RegionId,
    RegionRequest,
)
from kvhold_server.memory.errors import (
    HolderUnreachable,
    RegionExists,
    RegionMismatch,
    ResizeUnsupported,
    UnknownRegion,
)
from kvhold_server.memory.fd_frames import Frame, FrameError, receive_frame, send_frame
from kvhold_server.memory.posix_shm import reopen
from kvhold_server.memory.region_table import RegionTable

HOLDER_TIMEOUT_S = 5.0


class HolderClient:
    """One request per connection."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ask(self, verb: str, fds: Sequence[int] = (), **fields: object) -> Frame:
        """Raises HolderUnreachable, also for a refusal."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
                connection.settimeout(HOLDER_TIMEOUT_S)
                connection.connect(str(self.path))
                send_frame(connection, {"verb": verb, **fields}, fds)
                reply = receive_frame(connection)
        except (OSError, FrameError) as error:
            raise HolderUnreachable(str(self.path), str(error)) from error
        if reply.fields.get("status") != "ok":
            raise HolderUnreachable(str(self.path), str(reply.fields.get("problem")))
        return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """Memory that another daemon made."""

    fds: tuple[int, ...]
    chunk_sizes_bytes: tuple[int, ...]


class KeptBackend(MemoryBackend):
    """Any backend that hands out descriptors, and a holder. Goes by the inner backend's name."""

    keeps_regions = True

    def __init__(self, inner: MemoryBackend, holder: HolderClient) -> None:
        self.name = inner.name
        self._inner = inner
        self._holder = holder
        self._made: dict[RegionId, Region] = {}  # by the inner backend
        self._adopted: RegionTable[Adopted] = RegionTable()
        self._not_given: set[RegionId] = set()  # the holder was away

    def granularity_bytes(self, device_index: int) -> int:
        return self._inner.granularity_bytes(device_index)

    def reserve(self, request: RegionRequest) -> Region:
        with self._adopted.claim(request.region_id):
            self._drop(request.region_id)  # a former daemon's, that nobody wanted to adopt
            region = self._inner.reserve(request)
            self._made[region.id] = region
        self._give(region)
        return region

    def export(self, region: Region) -> ExportedRegion:
        if region.id in self._made:
            return self._inner.export(region)
        held = self._adopted.get(region.id)
        return ExportedRegion(
            region_id=held.region.id,
            kind=ExportKind.FD,
            size_bytes=held.region.size_bytes,
            device_uuid=held.region.device_uuid,
            chunk_sizes_bytes=held.memory.chunk_sizes_bytes,
        )

    def open_fds(self, region: Region, *, read_only: bool = False) -> tuple[int, ...]:
        if region.id in self._made:
            return self._inner.open_fds(region, read_only=read_only)
        held = self._adopted.get(region.id)
        only_read = read_only and held.region.device_uuid == HOST_DEVICE_UUID  # a driver's file cannot be reopened
        return tuple(reopen(fd, read_only=only_read) for fd in held.memory.fds)

    def release(self, region: Region) -> None:
        if region.id in self._made:
            del self._made[region.id]
            self._inner.release(region)
        else:
            _close_all(self._adopted.take(region.id).memory.fds)
        self._not_given.discard(region.id)
        self._drop(region.id)

    def resize(self, region: Region, size_bytes: int) -> Region:
        if region.id not in self._made:
            self._adopted.get(region.id)
            raise ResizeUnsupported(f"{self.name} (adopted region)")
        resized = self._inner.resize(region, size_bytes)
        self._made[region.id] = resized
        self._give(resized)
        return resized

    def list_existing(self) -> tuple[Region, ...]:
        """Empty while the holder does not answer."""
        known = self._adopted.known_ids() | self._made.keys()
        return tuple(region for region in map(_region, self._entries().values()) if region.id not in known)

    def adopt(self, region: Region) -> Region:
        if region.id in self._made:
            raise RegionExists(region.id)
        with self._adopted.claim(region.id):
            about = self._entries().get(region.id)
            if about is None:
                raise UnknownRegion(region.id)
            sizes = _chunk_sizes(about)
            if _region(about).size_bytes != region.size_bytes or sum(sizes) != region.size_bytes:
                raise RegionMismatch(region.id, f"the holder has {sum(sizes)} bytes, expected {region.size_bytes}")
            fds = self._holder.ask("get", key=self._key(region.id)).fds
            if len(fds) != len(sizes):
                _close_all(fds)
                raise RegionMismatch(region.id, f"the holder has {len(fds)} descriptors for {len(sizes)} chunks")
            return self._adopted.publish(region, Adopted(fds=fds, chunk_sizes_bytes=sizes))

    def reclaim_stale(self) -> ReclaimReport:
        stale = self.list_existing()
        for region in stale:
            self._drop(region.id)
        inner = self._inner.reclaim_stale()
        return ReclaimReport(
            names=(*(region.id for region in stale), *inner.names),
            reclaimed_bytes=sum(region.size_bytes for region in stale) + inner.reclaimed_bytes,
            left_alone=inner.left_alone,
        )

    def health(self) -> BackendHealth:
        """Also gives the holder what it has not got: it may have been away, or another one may have taken its place."""
        inner = self._inner.health()
        try:
            self._not_given |= (self._made.keys() | self._adopted.known_ids()) - self._entries_or_raise().keys()
            for region_id in tuple(self._not_given):
                self._give_or_raise(self._made.get(region_id) or self._adopted.get(region_id).region)
        except HolderUnreachable as error:
            return BackendHealth(ok=inner.ok, detail=f"{inner.detail}; a restart would begin fresh: {error}")
        except UnknownRegion:  # released meanwhile
            self._not_given.clear()
        return inner

    def usage(self) -> MemoryUsage:
        inner = self._inner.usage()
        devices = tuple(
            replace(device, held_bytes=device.held_bytes + self._adopted.held_bytes(device.device_uuid))
            for device in inner.devices
        )
        return MemoryUsage(devices=devices, holdings=(*inner.holdings, *self._adopted.holdings()))

    def close(self, *, keep: bool = False) -> None:
        """`keep`: the holder keeps everything for the next daemon."""
        for held in self._adopted.all():
            if keep:
                _close_all(self._adopted.take(held.region.id).memory.fds)
            else:
                self.release(held.region)
        for region in tuple(self._made.values()):
            if not keep:
                self.release(region)
        self._made.clear()
        self._inner.close()

    def _give(self, region: Region) -> None:
        self._not_given.add(region.id)
        with suppress(HolderUnreachable):
            self._give_or_raise(region)

    def _give_or_raise(self, region: Region) -> None:
        about = {"region": asdict(region), "chunk_sizes_bytes": list(self.export(region).chunk_sizes_bytes)}
        fds = self.open_fds(region)
        try:
            self._holder.ask("put", fds, key=self._key(region.id), about=about)
        finally:
            _close_all(fds)
        self._not_given.discard(region.id)

    def _drop(self, region_id: RegionId) -> None:
        with suppress(HolderUnreachable):  # what it still has is nobody's, and the next start drops it
            self._holder.ask("drop", key=self._key(region_id))

    def _key(self, region_id: RegionId) -> str:
        """Several backends share one holder."""
        return f"{self.name}:{region_id}"

    def _entries(self) -> dict[str, Any]:
        try:
            return self._entries_or_raise()
        except HolderUnreachable:
            return {}

    def _entries_or_raise(self) -> dict[str, Any]:
        entries = self._holder.ask("list").fields.get("entries")
        ours = self._key(RegionId(""))
        found = entries.items() if isinstance(entries, dict) else ()
        return {key.removeprefix(ours): about for key, about in found if key.startswith(ours)}


def _region(about: Any) -> Region:
    """What we gave, in full: the holder gives it back as it was."""
    return Region(**about["region"])


def _chunk_sizes(about: Any) -> tuple[int, ...]:
    return tuple(about["chunk_sizes_bytes"])


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
