"""Who is on the other end of a unix socket, and a listener that only the right ones can reach."""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from kvhold_server.domain.errors import PreconditionFailed

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59
BACKLOG = 65_535  # connections that nobody has accepted yet; the kernel takes it down to net.core.somaxconn
_MAX_GROUPS_BYTES = 1024  # the most that Python asks the kernel for: 256 groups


@dataclass(eq=False)
class PeerNotAllowed(PreconditionFailed):
    """The peer could connect, but is not one of ours."""

    template = "{path}: uid {uid} gid {gid} is neither uid {owner_uid} nor in group {group_gid}"
    path: str
    uid: int
    gid: int
    owner_uid: int
    group_gid: int


@dataclass(eq=False)
class SocketInUse(PreconditionFailed):
    """Another daemon listens there, or the path is not a socket."""

    template = "{path}: {problem}"
    path: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The process that connected."""

    pid: int  # 0 where it is in a PID namespace that we cannot see
    uid: int
    gid: int
    groups: frozenset[int]  # supplementary


def peer_of(connection: socket.socket) -> Peer:
    """What SO_PEERCRED says."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return Peer(pid=pid, uid=uid, gid=gid, groups=_peer_groups(connection))


def check_peer(peer: Peer, path: Path, group_gid: int) -> None:
    """Raises PeerNotAllowed unless it is ourselves, root, or a member of the socket's group.

    The socket's mode says the same, unless somebody changes it.
    """
    if peer.uid in (0, os.geteuid()) or group_gid == peer.gid or group_gid in peer.groups:
        return
    raise PeerNotAllowed(str(path), peer.uid, peer.gid, os.geteuid(), group_gid)


def open_pidfd(pid: int) -> int:
    """-1 where the process is in another PID namespace, is gone, or the kernel or sandbox has no pidfds."""
    if pid <= 0 or not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _peer_groups(connection: socket.socket) -> frozenset[int]:
    """Supplementary groups of the peer; none where the kernel does not tell."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS_BYTES)
    except OSError:
        return frozenset()
    return frozenset(struct.unpack(f"{len(raw) // 4}I", raw[: len(raw) // 4 * 4]))


def listen(path: Path, *, mode: int, group_gid: int) -> socket.socket:
    """Binds, replacing a socket whose daemon is dead. `group_gid` −1: leave the group. Raises SocketInUse."""
    _remove_dead_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        old_umask = os.umask(0o177)  # nobody but us until mode and group are right
        try:
            listener.bind(str(path))
        finally:
            os.umask(old_umask)
        if group_gid >= 0:
            os.chown(path, -1, group_gid)
        os.chmod(path, mode)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SocketInUse(str(path), f"{error.strerror or error}") from error
    return listener


def _remove_dead_socket(path: Path) -> None:
    """A path that answers is somebody's; one that refuses is left over. Raises SocketInUse."""
    if not path.exists():
        return
    if not path.is_socket():
        raise SocketInUse(str(path), "exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise SocketInUse(str(path), f"{error.strerror or error}") from error
        else:
            raise SocketInUse(str(path), "a daemon listens there")
