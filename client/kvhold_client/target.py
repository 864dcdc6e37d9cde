"""Where a daemon listens: one spelling for command line, environment and code.

unix:/run/kvhold/kvhold.sock   a socket file (the usual case)
/run/kvhold/kvhold.sock        the same
127.0.0.1:7400, dns:///host:1  TCP, as gRPC spells it
"""

import os
from collections.abc import Mapping

TARGET_VARIABLE = "KVHOLD_TARGET"
SOCKET_VARIABLE = "KVHOLD_SOCKET"  # a setting of the daemon: one environment serves both

CONNECT_TIMEOUT_MS = 5000

# Every message has a bound; this is what the daemon accepts and sends by default.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024


def default_target(environ: Mapping[str, str] | None = None) -> str:
    """What `KVHOLD_TARGET` names, else the daemon's own `KVHOLD_SOCKET`, else a socket in the runtime directory."""
    env = os.environ if environ is None else environ
    named = env.get(TARGET_VARIABLE) or env.get(SOCKET_VARIABLE)
    if named:
        return normal_target(named)
    if env.get("XDG_RUNTIME_DIR"):
        return f"unix:{env['XDG_RUNTIME_DIR']}/kvhold/kvhold.sock"
    return f"unix:/tmp/kvhold-{os.getuid()}/kvhold.sock"


def normal_target(target: str) -> str:
    """Adds `unix:` to a bare path. Raises ValueError for an empty target."""
    if not target:
        raise ValueError("the target is empty: give unix:/path/to/socket or host:port")
    if target.startswith("unix://"):
        return "unix:" + target.removeprefix("unix://")
    if target.startswith(("/", "./", "../")):
        return f"unix:{os.path.abspath(target)}"
    return target


def beside(target: str, socket_path: str) -> str:
    """Where a further socket of the daemon is for us: in the directory of the socket that we use.

    The daemon names its own path; in another container the same directory may be mounted elsewhere.
    """
    if not target.startswith("unix:") or not socket_path:
        return socket_path
    return os.path.join(os.path.dirname(target.removeprefix("unix:")), os.path.basename(socket_path))


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int | str]]:
    """gRPC channel options: message bounds stated, quick reconnects on a local socket, no proxy for it."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 250),  # a refused local socket costs nothing to ask again
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # also bounds one attempt: a busy machine needs time
        ("grpc.enable_http_proxy", 0),
    ]
