"""`kvhold doctor`: checks everything on this machine that an engine and its daemon need, and says what to fix.

Each check answers ok, warn or fail with what was found and, unless ok, what to do. Checks read; they change nothing.
Exit code 0 without a fail, 4 with one.
"""

import argparse
import ctypes
import ctypes.util
import grp
import os
import resource
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvhold_client import __version__
from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import OK, UNHEALTHY
from kvhold_client.cli.units import format_bytes
from kvhold_client.client import Client
from kvhold_client.errors import KvholdError
from kvhold_client.health import check_health
from kvhold_client.local_daemon import CLIENT_VARIABLES

GOOD, WARN, FAIL = "ok", "warn", "fail"
STYLES = {GOOD: "green", WARN: "yellow", FAIL: "red"}
DEFAULT_SHM_BYTES = 64 << 20  # what container runtimes give without being asked
MIN_OPEN_FILES = 4096
CLOCK_NOT_SYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer of one check."""

    check: str
    verdict: str
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where to look; tests point it elsewhere."""

    environ: Mapping[str, str]
    shm: Path = Path("/dev/shm")
    devices: Path = Path("/dev")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--local."""
    parser.add_argument("--local", action="store_true", help="check the machine only, ask no daemon")


def run(args: argparse.Namespace, console: Console) -> int:
    """Checks, shows, judges."""
    findings = list(check_machine(Machine(environ=os.environ)))
    if not args.local:
        findings = [*check_target(args.target), *check_daemon(args.target, args.timeout), *findings]
    if args.output == "json":
        console.json(findings)
    else:
        for finding in findings:
            verdict = console.styled(f"{finding.verdict:<4}", STYLES[finding.verdict])
            console.print(f"{verdict}  {finding.check:<12}{finding.found}")
            if finding.fix:
                console.print(f"{'':<18}→ {finding.fix}")
    return UNHEALTHY if any(finding.verdict == FAIL for finding in findings) else OK


# ---- the way to the daemon ------------------------------------------------------------------------------------------
def check_target(target: str) -> Iterator[Finding]:
    """The socket file: there, a socket, ours to use, somebody behind it."""
    if not target.startswith("unix:"):
        yield Finding(check="target", verdict=GOOD, found=f"{target}, over TCP")
        return
    path = Path(target.removeprefix("unix:"))
    try:
        status = path.stat()
    except FileNotFoundError:
        fix = "start the daemon, mount its socket directory, or set KVHOLD_TARGET"
        yield Finding(check="socket", verdict=FAIL, found=f"{path} does not exist", fix=fix)
        return
    except PermissionError:
        fix = f"join the group that owns {path.parent} (Kubernetes: supplementalGroups)"
        yield Finding(
            check="socket", verdict=FAIL, found=f"{path.parent} cannot be entered by uid {os.getuid()}", fix=fix
        )
        return
    if not stat.S_ISSOCK(status.st_mode):
        yield Finding(
            check="socket", verdict=FAIL, found=f"{path} is no socket", fix="remove it and restart the daemon"
        )
        return
    yield _socket_access(path, status)
    yield _answers(path, "socket")
    descriptors = Path(f"{path}.fd")
    if descriptors.exists():
        yield _answers(descriptors, "fd channel")
    else:
        yield Finding(
            check="fd channel",
            verdict=WARN,
            found=f"{descriptors} does not exist",
            fix="memory can be mapped by name only",
        )


def _socket_access(path: Path, status: os.stat_result) -> Finding:
    mode = stat.S_IMODE(status.st_mode)
    found = f"{path}, mode {mode:04o}, uid {status.st_uid}, gid {status.st_gid}"
    if mode & 0o002:
        return Finding(
            check="access", verdict=WARN, found=found, fix="anybody may connect: mode 0660 and a group are meant"
        )
    if os.access(path, os.R_OK | os.W_OK):
        return Finding(check="access", verdict=GOOD, found=found)
    who = f"uid {os.getuid()}, groups {','.join(map(str, sorted({os.getgid(), *os.getgroups()})))}"
    fix = f"we are {who}: join group {status.st_gid} ({_group_name(status.st_gid)}; Kubernetes: supplementalGroups)"
    return Finding(check="access", verdict=FAIL, found=found, fix=fix)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return "no name here"


def _answers(path: Path, check: str) -> Finding:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            return Finding(
                check=check,
                verdict=FAIL,
                found=f"{path}: {error.strerror}",
                fix="nobody listens there: restart the daemon",
            )
    return Finding(check=check, verdict=GOOD, found="somebody listens")


def check_daemon(target: str, timeout_s: float) -> Iterator[Finding]:
    """What it says about itself."""
    try:
        with Client(target, timeout_s=timeout_s) as client:
            capabilities = client.capabilities()
            health = {name: check_health(client, name) for name in ("liveness", "readiness")}
    except KvholdError as error:
        yield Finding(check="daemon", verdict=FAIL, found=str(error), fix="see the checks of the socket")
        return
    well = all(state == "SERVING" for state in health.values())
    found = ", ".join(f"{name} {state}" for name, state in health.items())
    yield Finding(
        check="health", verdict=GOOD if well else FAIL, found=found, fix="" if well else "it drains or starts: wait"
    )
    same = capabilities.server_version == __version__
    fix = "" if same else "they may differ in minor versions; upgrade the older one if a call is UNIMPLEMENTED"
    found = f"client {__version__}, daemon {capabilities.server_version}"
    yield Finding(check="versions", verdict=GOOD if same else WARN, found=found, fix=fix)
    yield Finding(check="backends", verdict=GOOD, found=", ".join(capabilities.memory_backends) or "none")


# ---- the machine ----------------------------------------------------------------------------------------------------
def check_machine(machine: Machine) -> Iterator[Finding]:
    """Limits, shared memory, devices, clock, environment."""
    checks: tuple[Callable[[Machine], Finding], ...] = (shm, memlock, open_files, pidfd, gpu, clock, environment)
    return (check(machine) for check in checks)


def shm(machine: Machine) -> Finding:
    """K8S-05: a pool larger than the mount ends in SIGBUS, not in an error."""
    try:
        status = os.statvfs(machine.shm)
    except OSError as error:
        return Finding(check="shm", verdict=FAIL, found=f"{machine.shm}: {error.strerror}", fix="mount a tmpfs there")
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{machine.shm}: {format_bytes(total)}, {format_bytes(free)} free"
    if total <= DEFAULT_SHM_BYTES:
        fix = "the runtime's default: mount an emptyDir of medium Memory (Docker: --shm-size) as large as the pools"
        return Finding(check="shm", verdict=WARN, found=found, fix=fix)
    return Finding(check="shm", verdict=GOOD, found=found)


def memlock(machine: Machine) -> Finding:
    """K8S-06: pinning host memory fails with a code that says nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = ["unlimited" if v == resource.RLIM_INFINITY else format_bytes(v) for v in (soft, hard)]
    found = f"RLIMIT_MEMLOCK {words[0]} (hard {words[1]})"
    if soft == resource.RLIM_INFINITY or soft >= 1 << 30 or os.geteuid() == 0:
        return Finding(check="memlock", verdict=GOOD, found=found)
    fix = "pools that pin host memory need as much: systemd LimitMEMLOCK=infinity, containers --ulimit memlock=-1"
    return Finding(check="memlock", verdict=WARN, found=found, fix=fix)


def open_files(machine: Machine) -> Finding:
    """Each client and each exported chunk costs a descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"RLIMIT_NOFILE {soft}"
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        return Finding(check="files", verdict=WARN, found=found, fix=f"at least {MIN_OPEN_FILES}: systemd LimitNOFILE")
    return Finding(check="files", verdict=GOOD, found=found)


def pidfd(machine: Machine) -> Finding:
    """The daemon watches its clients through pidfds (Linux 5.3)."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        fix = "dead clients are then noticed by their connections only; use Linux 5.3 or newer"
        return Finding(check="pidfd", verdict=WARN, found="pidfd_open does not work here", fix=fix)
    return Finding(check="pidfd", verdict=GOOD, found="processes can be watched")


def gpu(machine: Machine) -> Finding:
    """K8S-03: the control channel works without devices; mapping their memory does not."""
    visible = machine.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    nodes = sorted(path.name for path in machine.devices.glob("nvidia[0-9]*"))
    has_driver = ctypes.util.find_library("cuda") is not None
    if visible == "void":
        fix = "NVIDIA_VISIBLE_DEVICES=void: put the claim into this container too, or use the runtime class"
        return Finding(check="gpu", verdict=FAIL if nodes else WARN, found="devices are hidden on purpose", fix=fix)
    if nodes and not has_driver:
        fix = "the container runtime did not inject libcuda: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Finding(check="gpu", verdict=FAIL, found=f"{', '.join(nodes)} but no libcuda", fix=fix)
    if not nodes:
        return Finding(check="gpu", verdict=GOOD, found="no NVIDIA device: host memory only")
    return Finding(check="gpu", verdict=GOOD, found=f"{', '.join(nodes)}, visible {visible or 'all'}")


def clock(machine: Machine) -> Finding:
    """Leases use a clock that cannot jump; logs and events of several nodes are compared by one that can."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(512)) if hasattr(libc, "adjtimex") else -1
    if state < 0:
        return Finding(check="clock", verdict=GOOD, found="cannot be asked here; leases do not depend on it")
    if state == CLOCK_NOT_SYNCHRONISED:
        fix = "run an NTP client: leases do not depend on it, comparing logs and events of nodes does"
        return Finding(check="clock", verdict=WARN, found="not synchronised", fix=fix)
    return Finding(check="clock", verdict=GOOD, found="synchronised")


def environment(machine: Machine) -> Finding:
    """A Kubernetes Service named kvhold injects variables that look like settings."""
    ours = {key for key in machine.environ if key.startswith("KVHOLD_")} - set(CLIENT_VARIABLES)
    injected = sorted(
        key for key in ours if key.endswith(("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")) or "_PORT_" in key
    )
    if injected:
        fix = "a Service named kvhold injects them: set enableServiceLinks: false in the pod"
        return Finding(check="environment", verdict=WARN, found=", ".join(injected), fix=fix)
    return Finding(
        check="environment", verdict=GOOD, found=f"{len(ours)} settings of the daemon" if ours else "no settings"
    )
