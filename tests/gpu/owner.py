"""A daemon's memory side as a process of its own: reserves a region, and serves its descriptors until it is killed.

python owner.py BACKEND SOCKET SIZE_BYTES NUM_TOKENS    prints one JSON line: how to map it, NUM_TOKENS times
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import MemoryBackend, RegionRequest
from kvhold_server.memory.cuda_driver import BindingsDriver
from kvhold_server.memory.cuda_ipc import CudaIpcBackend
from kvhold_server.memory.cuda_vmm import CudaVmmBackend
from kvhold_server.memory.memfd import MemfdBackend
from kvhold_server.rpc.fd_channel import FdChannel, FdChannelOptions, OpenedRegion
from kvhold_server.rpc.fd_tokens import FdGrant

BACKENDS = {
    "memfd": MemfdBackend,
    "cuda_vmm": lambda: CudaVmmBackend(BindingsDriver("cuda_vmm"), chunk_bytes=64 << 20),
    "cuda_ipc": lambda: CudaIpcBackend(BindingsDriver("cuda_ipc")),
}


async def serve(backend: MemoryBackend, path: Path, size_bytes: int, num_tokens: int) -> None:
    started_s = time.perf_counter()
    region = backend.reserve(RegionRequest(pool=PoolName("m"), rank=0, size_bytes=size_bytes))
    reserve_s = time.perf_counter() - started_s
    exported = backend.export(region)
    channel = FdChannel(
        path,
        open_region=lambda grant: OpenedRegion(exported=exported, fds=backend.open_fds(region)),
        on_peer_mapped=lambda mapping: None,
        on_peer_gone=lambda mapping: None,
        options=FdChannelOptions(max_tokens=num_tokens, token_ttl_s=600),
    )
    await channel.start()
    grant = FdGrant(owner="", pool=PoolName("m"), rank=0)
    how = {
        "size_bytes": region.size_bytes,
        "device_uuid": region.device_uuid,
        "ipc_handle": exported.handle.hex(),
        "ipc_offset_bytes": exported.offset_bytes,
        "num_chunks": len(exported.chunk_sizes_bytes),
        "tokens": [channel.issue(grant).hex() for _ in range(num_tokens)] if exported.has_fds else [],
        "socket": str(path) if exported.has_fds else "",
        "reserve_s": reserve_s,
    }
    print(json.dumps(how), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    backend_name, socket_path, size, tokens = sys.argv[1:]
    asyncio.run(serve(BACKENDS[backend_name](), Path(socket_path), int(size), int(tokens)))
