"""Configuration: flags over environment over TOML file over defaults. The only reader of argv and the environment.

    kvhold serve --lease-ttl-s 10        flag          highest
    KVHOLD_LEASE_TTL_S=10                environment
    lease_ttl_s = 10                     kvhold.toml   (--config or KVHOLD_CONFIG)
    ServerConfig.lease_ttl_s             default       lowest

One name per setting in all four places. A key that nobody knows is an error in each, with the nearest known one.
Bounds on callers are `[limits]` in the file, KVHOLD_LIMITS_MAX_POOLS, --limits-max-pools.
"""

import argparse
import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhold_server.domain.errors import InvalidRequest
from kvhold_server.domain.service_limits import ServiceLimits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "KVHOLD_"
MAX_SOCKET_PATH_BYTES = 107  # sun_path holds 108 with the final zero
SOCKET_SUFFIXES = {"socket": ".local", "admin_socket": ""}  # the longest of what is put behind the path


@dataclass(eq=False)
class ConfigError(InvalidRequest):
    """A setting is unknown or has a value that cannot be used."""

    template = "{origin}: {setting} = {value!r}: {constraint}"
    origin: str  # "--flag", "environment", "default", or the file's path
    setting: str
    value: object
    constraint: str


def setting(default: Any, text: str, *, low: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field of a configuration: its default, help text, and what is allowed."""
    return field(default=default, metadata={"text": text, "low": low, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that a daemon can be told."""

    socket: str = setting("", "unix socket that engines connect to; empty: none")
    socket_gid: int = setting(-1, "group of the sockets, which have mode 0660; -1: the daemon's own", low=-1)
    tcp: str = setting("", "host:port that engines connect to; empty: none")
    insecure: bool = setting(False, "serve TCP beyond the loopback interface without TLS")
    tls_cert: str = setting("", "PEM file of the TCP listener's certificate chain")
    tls_key: str = setting("", "PEM file of its private key")
    tls_client_ca: str = setting(
        "", "PEM file of the CA whose client certificates are accepted; their name is the tenant"
    )
    local_transport: bool = setting(
        True, "offer the framed transport beside the unix socket: same messages, a tenth of the cost of gRPC"
    )
    admin_socket: str = setting("", "unix socket of AdminService; empty: on the engines' listeners")
    metrics: str = setting("", "host:port of /metrics over HTTP; empty: none")
    health: str = setting("", "host:port of grpc.health.v1 alone, plaintext, for probes; empty: none")
    backend: str = setting(
        "posix_shm", "default memory of pools", choices=("posix_shm", "memfd", "cuda_vmm", "cuda_ipc", "fake")
    )
    host_huge_pages: str = setting(
        "off", "huge pages under host memory; explicit ones for memfd only", choices=("off", "transparent", "explicit")
    )
    host_numa_node: int = setting(-1, "NUMA node that host memory is bound to; -1: none", low=-1)
    host_lock: bool = setting(False, "lock host memory, so that it is never swapped; needs RLIMIT_MEMLOCK")
    holder: str = setting(
        "", "socket of a holder: keeps memfd and device memory while daemons are replaced; empty: none"
    )
    state_dir: str = setting("", "directory of locks and block tables; empty: beside the socket")
    keep_pools: bool = setting(True, "named memory and what is cached in it outlive the daemon, for the next one")
    lease_ttl_s: float = setting(15.0, "a client that is silent for so long is taken for dead", low=0.05)
    grace_period_s: float = setting(5.0, "how long a dead client's session is kept for resuming", low=0.0)
    drain_deadline_s: float = setting(30.0, "how long sessions may go on after SIGTERM", low=0.0)
    tick_interval_s: float = setting(0.1, "how often leases are looked at", low=0.005)
    fake_device_bytes: int = setting(1 << 40, "memory of each device of the fake backend", low=1)
    log_level: str = setting("info", "least severity logged", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "how log lines look", choices=("text", "json"))
    tracing: str = setting("off", "trace ids in logs and exemplars, or spans too", choices=("off", "log", "otel"))
    limits: ServiceLimits = field(default_factory=ServiceLimits)

    @property
    def state_path(self) -> Path:
        """Where locks and block tables lie."""
        if self.state_dir:
            return Path(self.state_dir)
        return Path(self.socket).parent if self.socket else Path("/tmp") / f"kvhold-{os.getuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration, and where each of its values is from: "default", a file's path, "environment X", "--flag"."""

    config: ServerConfig
    origins: Mapping[str, str]  # flat name → origin, for every setting

    def lines(self, *, with_origin: bool) -> list[str]:
        """One `name = value` a line, as TOML has it; limits last."""
        values = {**dataclasses.asdict(self.config), **_prefixed(dataclasses.asdict(self.config.limits))}
        shown = [(name, _toml(values[name])) for name in self.origins]
        width = max(len(f"{name} = {value}") for name, value in shown) if with_origin else 0
        return [
            f"{f'{name} = {value}':<{width}}  # {self.origins[name]}" if with_origin else f"{name} = {value}"
            for name, value in shown
        ]


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> ServerConfig:
    """Merges all sources. Raises ConfigError, or SystemExit for --help and unknown flags."""
    return load_with_origins(argv, environ).config


def load_with_origins(argv: Sequence[str], environ: Mapping[str, str]) -> LoadedConfig:
    """As `load_config`, with the origin of every value."""
    flags = vars(_parser().parse_args(argv))
    file = flags.pop("config", None) or environ.get(ENV_PREFIX + "CONFIG")
    merged: dict[str, tuple[object, str]] = {}
    merged |= _from_file(file) if file else {}
    merged |= _from_environment(environ)
    merged |= {key: (value, f"--{key.replace('_', '-')}") for key, value in flags.items() if value is not None}
    values = {key: _convert(key, value, origin) for key, (value, origin) in merged.items()}
    limits = {key.removeprefix("limits_"): values.pop(key) for key in list(values) if key.startswith("limits_")}
    origins = dict.fromkeys(_settings(), "default") | {key: origin for key, (_, origin) in merged.items()}
    for name, suffix in SOCKET_SUFFIXES.items():
        _check_socket_path(origins[name], name, values.get(name, ""), suffix)
    return LoadedConfig(config=ServerConfig(**values, limits=ServiceLimits(**limits)), origins=origins)


def _check_socket_path(origin: str, name: str, path: str, suffix: str) -> None:
    most = MAX_SOCKET_PATH_BYTES - len(suffix)
    if len(os.fsencode(path)) > most:
        raise ConfigError(origin, name, path, f"must have at most {most} bytes; name one in a shorter directory")


def check_listeners(config: ServerConfig) -> None:
    """Raises ConfigError if no engine could reach a daemon of this configuration, or two listeners meet."""
    if not config.socket and not config.tcp:
        remedy = "nobody could reach a daemon without socket and tcp; e.g. --socket /run/kvhold/kvhold.sock"
        raise ConfigError("default", "socket", "", remedy)
    if config.socket and config.socket == config.admin_socket:
        remedy = "must differ from socket; empty: AdminService on the engines' socket"
        raise ConfigError("--admin-socket", "admin_socket", config.admin_socket, remedy)


def _prefixed(limits: dict[str, Any]) -> dict[str, Any]:
    return {f"limits_{name}": value for name, value in limits.items()}


def _toml(value: object) -> str:
    """A value as the file would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value)


def _settings() -> dict[str, dataclasses.Field[Any]]:
    """Every setting under its flat name."""
    own = {f.name: f for f in dataclasses.fields(ServerConfig) if f.name != "limits"}
    return own | {f"limits_{f.name}": f for f in dataclasses.fields(ServiceLimits)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvhold serve", description="Runs the daemon.", allow_abbrev=False, argument_default=None
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same settings")
    for name, spec in _settings().items():
        flag = f"--{name.replace('_', '-')}"
        text = f"{spec.metadata.get('text', 'bound on callers')} (default: {spec.default!r})".replace("%", "%%")
        if spec.type in (bool, "bool"):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag, metavar="X", help=text)
    return parser


def _from_file(path: str) -> dict[str, tuple[object, str]]:
    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError("--config", "config", path, error.strerror or "cannot be read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "config", path, f"is not TOML: {error}") from None
    limits = content.pop("limits", {})
    if not isinstance(limits, dict):
        raise ConfigError(path, "limits", limits, "must be a table")
    flat = content | {f"limits_{key}": value for key, value in limits.items()}
    return {key: (value, path) for key, value in flat.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    ours = {key: value for key, value in environ.items() if key.startswith(ENV_PREFIX) and key != ENV_PREFIX + "CONFIG"}
    return {key.removeprefix(ENV_PREFIX).lower(): (value, f"environment {key}") for key, value in ours.items()}


def _convert(key: str, value: object, origin: str) -> Any:
    """The value in the setting's own type, checked."""
    known = _settings()
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        raise ConfigError(
            origin, key, value, f"no such setting; did you mean {near[0]}?" if near else "no such setting"
        )
    spec = known[key]
    kind = spec.type if isinstance(spec.type, str) else spec.type.__name__
    try:
        converted = _CONVERTERS[kind](value)
    except (TypeError, ValueError):
        raise ConfigError(origin, key, value, f"must be {_KIND_WORDS[kind]}") from None
    low = 1 if key.startswith("limits_") else spec.metadata.get("low")
    if low is not None and converted < low:
        raise ConfigError(origin, key, value, f"must be at least {low}")
    choices = spec.metadata.get("choices")
    if choices and converted not in choices:
        raise ConfigError(origin, key, value, f"must be one of {', '.join(choices)}")
    return converted


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return words[str(value).lower()] if str(value).lower() in words else _not(value)


def _to_int(value: object) -> int:
    return _not(value) if isinstance(value, bool | float) else int(str(value))


def _to_float(value: object) -> float:
    number = float(str(value))
    return number if abs(number) < 1e18 else _not(value)


def _to_str(value: object) -> str:
    return value if isinstance(value, str) else _not(value)


def _not(value: object) -> Any:
    raise ValueError(value)


_CONVERTERS: dict[str, Callable[[object], Any]] = {"bool": _to_bool, "int": _to_int, "float": _to_float, "str": _to_str}
_KIND_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string"}


def split_host_port(origin: str, name: str, value: str) -> tuple[str, int]:
    """ "127.0.0.1:9400" or "[::1]:9400" → ("127.0.0.1", 9400). Raises ConfigError."""
    host, colon, port = value.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(origin, name, value, "must be host:port with a port of 0..65535")
    return host.strip("[]") or "127.0.0.1", int(port)
