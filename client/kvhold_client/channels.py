"""Connections: plaintext over a unix socket or loopback, mutual TLS over a network.

    KVHOLD_CA            PEM of the CA that the daemon's certificate is from        all three, or none
    KVHOLD_CLIENT_CERT   PEM of our certificate chain; its name is our tenant
    KVHOLD_CLIENT_KEY    PEM of our private key

They count for TCP targets only: who may use a unix socket is decided by its file mode.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import grpc
import grpc.aio

from kvhold_client.target import channel_options

TLS_VARIABLES = ("KVHOLD_CA", "KVHOLD_CLIENT_CERT", "KVHOLD_CLIENT_KEY")


def open_channel(target: str) -> grpc.Channel:
    """A blocking connection; it is made by the first call. Raises ValueError for half a TLS configuration."""
    credentials = tls_credentials(target, os.environ)
    if credentials is None:
        return grpc.insecure_channel(target, options=channel_options())
    return grpc.secure_channel(target, credentials, options=channel_options())


def open_aio_channel(target: str) -> grpc.aio.Channel:
    """The same for asyncio."""
    credentials = tls_credentials(target, os.environ)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=channel_options())
    return grpc.aio.secure_channel(target, credentials, options=channel_options())


def tls_credentials(target: str, environ: Mapping[str, str]) -> grpc.ChannelCredentials | None:
    """None for plaintext. Raises ValueError if only some of the files are named, OSError if one cannot be read."""
    if target.startswith("unix:"):
        return None
    named = [environ.get(variable, "") for variable in TLS_VARIABLES]
    if not any(named):
        return None
    if not all(named):
        missing = ", ".join(v for v, name in zip(TLS_VARIABLES, named, strict=True) if not name)
        raise ValueError(f"mutual TLS needs {', '.join(TLS_VARIABLES)}: {missing} is not set")
    ca, cert, key = (Path(name).read_bytes() for name in named)
    return grpc.ssl_channel_credentials(ca, key, cert)
