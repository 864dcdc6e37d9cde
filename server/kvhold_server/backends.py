"""Which memory backends this daemon has, made from its configuration."""

from kvhold_server.config import ServerConfig
from kvhold_server.memory.backend import MemoryBackend
from kvhold_server.memory.fake import FakeBackend
from kvhold_server.memory.memfd import MemfdBackend
from kvhold_server.memory.posix_shm import PosixShmBackend


def make_backends(config: ServerConfig) -> dict[str, MemoryBackend]:
    """Named as in configuration and metrics; the default one first."""
    made: dict[str, MemoryBackend] = {
        "posix_shm": PosixShmBackend(config.state_path),
        "memfd": MemfdBackend(),
        "fake": FakeBackend(device_bytes=config.fake_device_bytes, num_devices=8),
    }
    return {config.backend: made[config.backend], **made}
