"""The fd channel's view of the node: which region a token opens, and who maps what until when."""

from pathlib import Path

from kvhold_server.memory.errors import UnknownRegion
from kvhold_server.memory.process_identity import start_ticks
from kvhold_server.node.node import Node
from kvhold_server.rpc.fd_channel import FdChannel, FdChannelOptions, OpenedRegion, PeerMapping
from kvhold_server.rpc.fd_tokens import FdGrant
from kvhold_server.sessions.worker_watch import WatchId


def make_fd_channel(node: Node, path: Path, gid: int) -> FdChannel:
    """A channel that is not started yet."""
    watches: dict[int, WatchId] = {}

    def open_region(grant: FdGrant) -> OpenedRegion:
        live = node.pool(grant.pool)
        for region in live.regions:
            if region.rank == grant.rank and region.host == grant.host:
                backend = node.backends[live.identity.options.backend]
                fds = backend.open_fds(region, read_only=grant.read_only)
                return OpenedRegion(exported=backend.export(region), fds=fds)
        raise UnknownRegion(f"{grant.pool}/{grant.rank}")

    def mapped(mapping: PeerMapping) -> None:
        if not mapping.grant.read_only:  # who cannot write delays nobody
            watches[mapping.mapping_id] = node.worker_mapped(
                mapping.grant.pool, mapping.grant.rank, mapping.grant.owner, mapping.pid, is_watched=True
            )

    def gone(mapping: PeerMapping) -> None:
        watch = watches.pop(mapping.mapping_id, None)
        if watch is not None:
            node.worker_gone(watch, process_ended=mapping.pid > 0 and not start_ticks(mapping.pid))

    most = node.limits.max_exports
    options = FdChannelOptions(group_gid=gid, max_tokens=most, max_connections=max(most, node.limits.max_sessions))
    return FdChannel(path, open_region=open_region, on_peer_mapped=mapped, on_peer_gone=gone, options=options)
