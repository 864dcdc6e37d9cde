"""Typed failures of memory backends: each says what was asked, what there is, and what to change."""

from dataclasses import dataclass

from kvhold_server.domain.errors import (
    AlreadyExists,
    Exhausted,
    InternalFault,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)


@dataclass(eq=False)
class OutOfDeviceMemory(Exhausted):
    """The device cannot hold the region now; it may fit once a holder lets go."""

    template = (
        "device {device}: {requested_bytes} bytes requested, {free_bytes} free of {total_bytes}; held here: {holders}"
    )
    device: str  # uuid, or "host"
    requested_bytes: int
    free_bytes: int  # what the driver or the kernel says; -1 where nobody can say
    total_bytes: int
    holders: str  # "pool llama rank 0: 1073741824 bytes; ...", or "nothing"


@dataclass(eq=False)
class ShmTooSmall(Exhausted):
    """The shared-memory file system cannot hold the region (a container's default is 64 MiB)."""

    template = (
        "{directory} has {free_bytes} bytes free of {size_bytes}, {requested_bytes} are needed; "
        "mount a larger one (Kubernetes: emptyDir with medium Memory and a sizeLimit; docker: --shm-size) "
        "or use the memfd backend, which needs no mount"
    )
    directory: str
    size_bytes: int
    free_bytes: int
    requested_bytes: int


@dataclass(eq=False)
class HostMemoryTooSmall(Exhausted):
    """Filling the region would get somebody killed by the kernel's out-of-memory killer."""

    template = (
        "{limit} leaves {free_bytes} bytes, {requested_bytes} are needed; raise the limit or shrink the pool; "
        "held here: {holders}"
    )
    limit: str  # "MemAvailable" or the control group's file
    free_bytes: int
    requested_bytes: int
    holders: str


@dataclass(eq=False)
class MemlockTooLow(Exhausted):
    """Pinning the region is not allowed."""

    template = (
        "RLIMIT_MEMLOCK is {limit_bytes} bytes, {requested_bytes} are needed to lock the region; "
        "raise it (ulimit -l, or the IPC_LOCK capability) or switch memory locking off"
    )
    limit_bytes: int
    requested_bytes: int


@dataclass(eq=False)
class HugePagesUnavailable(Exhausted):
    """The kernel has too few huge pages, or none at all for this kind of memory."""

    template = "huge pages ({kind}): {problem}"
    kind: str
    problem: str  # the kernel's setting, what it says and what it would have to say


@dataclass(eq=False)
class NumaBindFailed(PreconditionFailed):
    """The region cannot be bound to the NUMA node that was asked for."""

    template = "binding to NUMA node {numa_node}: {problem}"
    numa_node: int
    problem: str


@dataclass(eq=False)
class DriverCallFailed(InternalFault):
    """A driver call returned an error that none of the other types describes."""

    template = "{call} failed: {name} ({code}) {meaning}"
    call: str
    code: int
    name: str
    meaning: str


@dataclass(eq=False)
class SystemCallFailed(InternalFault):
    """The operating system refused something that should have worked."""

    template = "{call} on {path} failed: {name} ({code}) {meaning}"
    call: str
    path: str
    code: int
    name: str
    meaning: str


@dataclass(eq=False)
class BackendUnavailable(Unsupported):
    """This machine or installation cannot run the backend at all."""

    template = "memory backend {backend} cannot run here: {problem}"
    backend: str
    problem: str


@dataclass(eq=False)
class UnknownDevice(InvalidRequest):
    """There is no such device."""

    template = "device_index: {device_index} is not allowed: must be 0..{last_device_index}"
    device_index: int
    last_device_index: int


@dataclass(eq=False)
class InvalidRegionRequest(InvalidRequest):
    """A field of the region request is out of range."""

    template = "{field}: {value!r} is not allowed: {constraint}"
    field: str
    value: object
    constraint: str


@dataclass(eq=False)
class RegionExists(AlreadyExists):
    """The pool already has a region for this rank."""

    template = "region {region_id} exists already"
    region_id: str


@dataclass(eq=False)
class InstanceInUse(AlreadyExists):
    """Another live daemon owns the memory of this instance."""

    template = "{lock_path} is locked by a live daemon (pid {pid}); stop it or use another --state-dir"
    lock_path: str
    pid: int


@dataclass(eq=False)
class UnknownRegion(NotFound):
    """The region was released, or never existed."""

    template = "no region {region_id}"
    region_id: str


@dataclass(eq=False)
class RegionMismatch(PreconditionFailed):
    """What was found does not fit what the caller wants to adopt."""

    template = "region {region_id}: {problem}"
    region_id: str
    problem: str


@dataclass(eq=False)
class ExportNotPossible(PreconditionFailed):
    """This region's memory cannot leave the process in the way that was asked for."""

    template = "region {region_id} cannot be exported as {wanted}: {problem}"
    region_id: str
    wanted: str
    problem: str


@dataclass(eq=False)
class ResizeUnsupported(Unsupported):
    """The backend's regions keep the size that they were made with."""

    template = "memory backend {backend} cannot resize a region; open the pool again with the new size"
    backend: str


@dataclass(eq=False)
class ReservationTimedOut(Unavailable):
    """The deadline passed before memory was there; whatever the driver still returns is given back."""

    template = "reserving {requested_bytes} bytes for {region_id} took longer than {timeout_s} s: {problem}"
    region_id: str
    requested_bytes: int
    timeout_s: float
    problem: str
    retry_after_s: float


@dataclass(eq=False)
class HolderUnreachable(Unavailable):
    """The holder process does not answer, or refuses."""

    template = "the holder at {path}: {problem}"
    path: str
    problem: str
