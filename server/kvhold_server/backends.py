"""Which memory backends this daemon has, made from its configuration and from what the machine offers."""

import logging
from collections.abc import Callable
from pathlib import Path

from kvhold_server.config import ServerConfig
from kvhold_server.memory.backend import MemoryBackend
from kvhold_server.memory.cuda_driver import BindingsDriver
from kvhold_server.memory.cuda_ipc import CudaIpcBackend
from kvhold_server.memory.cuda_vmm import CudaVmmBackend
from kvhold_server.memory.device_with_host import DeviceWithHost
from kvhold_server.memory.errors import BackendUnavailable, HolderUnreachable, HugePagesUnavailable
from kvhold_server.memory.fake import FakeBackend
from kvhold_server.memory.host_pages import HostPageOptions, HugePages, check_numa_node
from kvhold_server.memory.kept import HolderClient, KeptBackend
from kvhold_server.memory.memfd import MemfdBackend, MemfdOptions
from kvhold_server.memory.posix_shm import PosixShmBackend, PosixShmOptions

logger = logging.getLogger(__name__)

_DEVICE_BACKENDS: dict[str, Callable[[], MemoryBackend]] = {
    "cuda_vmm": lambda: CudaVmmBackend(BindingsDriver("cuda_vmm")),
    "cuda_ipc": lambda: CudaIpcBackend(BindingsDriver("cuda_ipc")),
}
_WITH_DESCRIPTORS = frozenset({"cuda_vmm"})  # a holder can keep these


def make_backends(config: ServerConfig) -> dict[str, MemoryBackend]:
    """Named as in configuration and metrics; the default one first.

    Device backends are there where the machine has what they need. Raises BackendUnavailable, saying what is missing,
    only if the default one is not. Raises NumaBindFailed for a node that is not there, before any pool asks for it.
    """
    holder = _holder(config.holder) if config.holder else None
    pages = host_page_options(config)
    if pages.numa_node is not None:
        check_numa_node(pages.numa_node)
    if config.backend == "posix_shm" and pages.huge_pages is HugePages.EXPLICIT:
        raise HugePagesUnavailable("explicit", "named segments cannot have them; choose the memfd backend")
    memfd = _kept(MemfdBackend(MemfdOptions(pages=pages)), holder)
    device = _device_backends(config.backend, memfd, holder)
    made: dict[str, MemoryBackend] = {
        "posix_shm": PosixShmBackend(config.state_path, PosixShmOptions(pages=pages)),
        "memfd": memfd,
        "fake": FakeBackend(device_bytes=config.fake_device_bytes, num_devices=8),
        **device,
    }
    return {config.backend: made[config.backend], **made}


def host_page_options(config: ServerConfig) -> HostPageOptions:
    """What the operator wants of host memory."""
    return HostPageOptions(
        huge_pages=HugePages(config.host_huge_pages),
        numa_node=config.host_numa_node if config.host_numa_node >= 0 else None,
        lock=config.host_lock,
    )


def _device_backends(required: str, host: MemoryBackend, holder: HolderClient | None) -> dict[str, MemoryBackend]:
    made: dict[str, MemoryBackend] = {}
    for name, make in _DEVICE_BACKENDS.items():
        try:
            device = make()
            if name in _WITH_DESCRIPTORS:
                device = _kept(device, holder)
            made[name] = DeviceWithHost(device, host)
        except BackendUnavailable:
            if name == required:
                raise
    return made


def _holder(path: str) -> HolderClient:
    """One that is away may come: it is given then what it has not got. What an earlier daemon left is not seen."""
    holder = HolderClient(Path(path))
    try:
        holder.ask("list")
    except HolderUnreachable as error:
        logger.warning("%s: until it is there, nothing outlives this daemon; what it keeps is not offered again", error)
    return holder


def _kept(backend: MemoryBackend, holder: HolderClient | None) -> MemoryBackend:
    return backend if holder is None else KeptBackend(backend, holder)
