"""Transport security of the TCP listener: mutual TLS, who may do without it, and whose tenant a caller is.

    unix socket            file mode and group decide who may connect; everybody who may is one trust domain
    TCP, loopback          as the unix socket, for tests
    TCP, else              mutual TLS, or --insecure said aloud; AdminService never: it needs a socket of its own

A client certificate's common name is the tenant: sessions are counted and limited for it whatever the request says.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvhold_server.config import ConfigError, ServerConfig, split_host_port
from kvhold_server.domain.errors import PreconditionFailed

COMMON_NAME = "x509_common_name"


@dataclass(eq=False)
class TenantMismatch(PreconditionFailed):
    """The request names another tenant than the caller's certificate; PERMISSION_DENIED on the wire."""

    template = "tenant {tenant!r} is not the caller's: its certificate is for {certified_tenant!r}"
    tenant: str
    certified_tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of the TCP listener. All three or none."""

    cert: Path
    key: Path
    client_ca: Path

    @classmethod
    def of(cls, config: ServerConfig) -> "TlsFiles | None":
        """Raises ConfigError if only some are given: half of TLS is none."""
        given = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_client_ca")}
        if not any(given.values()):
            return None
        for name, value in given.items():
            if not value:
                raise ConfigError("--tcp", name, "", "tls_cert, tls_key and tls_client_ca go together")
        return cls(**{name.removeprefix("tls_"): Path(value) for name, value in given.items()})

    def credentials(self) -> grpc.ServerCredentials:
        """Clients must show a certificate of the CA. Files are read again for each connection, so that rotated ones
        count without a restart. Raises ConfigError for files that cannot be read."""
        return grpc.dynamic_ssl_server_credentials(self._read(), self._read_again, require_client_authentication=True)

    def _read(self) -> Any:
        texts = {}
        for name, path in (("tls_key", self.key), ("tls_cert", self.cert), ("tls_client_ca", self.client_ca)):
            try:
                texts[name] = path.read_bytes()
            except OSError as error:
                raise ConfigError("--tcp", name, str(path), error.strerror or "cannot be read") from None
        chain = [(texts["tls_key"], texts["tls_cert"])]
        return grpc.ssl_server_certificate_configuration(chain, root_certificates=texts["tls_client_ca"])

    def _read_again(self) -> Any:
        try:
            return self._read()
        except ConfigError:
            return None  # in the middle of a rotation: the former files stay in use


def check_exposure(config: ServerConfig) -> None:
    """Refuses to open to a network what only a file mode would protect. Raises ConfigError."""
    if not config.tcp:
        return
    host, _ = split_host_port("--tcp", "tcp", config.tcp)
    if is_loopback(host):
        return
    if TlsFiles.of(config) is None and not config.insecure:
        rule = "beyond loopback needs tls_cert, tls_key and tls_client_ca, or --insecure"
        raise ConfigError("--tcp", "tcp", config.tcp, rule)
    if not config.admin_socket:
        raise ConfigError(
            "--tcp", "tcp", config.tcp, "beyond loopback needs admin_socket: AdminService is not for networks"
        )


def is_loopback(host: str) -> bool:
    """Of an address or "localhost"; any other name might be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def certified_tenant(context: Any) -> str | None:
    """Common name of the caller's certificate; None where there is none (unix socket, plaintext)."""
    names: Iterable[bytes] = context.auth_context().get(COMMON_NAME, ())
    return next((name.decode("utf-8", "replace") for name in names), None)


def tenant_of(context: Any, asked: str, default: str) -> str:
    """The tenant that a session is for. Raises TenantMismatch."""
    certified = certified_tenant(context)
    if certified is None:
        return asked or default
    if asked and asked != certified:
        raise TenantMismatch(asked, certified)
    return certified
