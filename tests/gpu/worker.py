"""A worker as a process of its own: maps what an owner exports and does what its standard input says, line by line.

python worker.py    first line: {"export": …, "layout": "LBNHC"}; then one command a line, one answer a line
"""

import gc
import json
import sys
import time
from typing import Any

import torch

from kvhold_client.block_copy import BlockCopy, copy_blocks, zero_blocks
from kvhold_client.host_memory import RegionExport
from kvhold_client.mapping import MappedRegion, map_region
from tests.client.mapping_cases import one_group_layout


def pattern(shape: tuple[int, ...], layer: int, device: torch.device) -> torch.Tensor:
    """Another value for every block, head and state of every layer; exact in bfloat16."""
    blocks, heads, states, _ = shape
    value = torch.arange(blocks, device=device)[:, None, None] * 5 + torch.arange(heads, device=device)[:, None] * 3
    value = (value + torch.arange(states, device=device) * 7 + layer * 11) % 251
    return value[..., None].expand(shape).to(torch.bfloat16)


def write(region: MappedRegion) -> bool:
    for layer, view in enumerate(region.views.values()):
        view.copy_(pattern(tuple(view.shape), layer, view.device))
    _synchronize()
    return True


def matches(region: MappedRegion) -> bool:
    views = region.views.values()
    return all(torch.equal(view, pattern(tuple(view.shape), layer, view.device)) for layer, view in enumerate(views))


def copies(region: MappedRegion) -> bool:
    before = [view.clone() for view in region.views.values()]
    copy_blocks(region, 0, [BlockCopy(1, 3), BlockCopy(2, 4)])
    zero_blocks(region, 0, [1])
    after = list(region.views.values())
    good = all(
        torch.equal(new[3], old[1]) and torch.equal(new[4], old[2]) for new, old in zip(after, before, strict=True)
    )
    return good and all(
        bool((new[1] == 0).all()) and torch.equal(new[2], old[2]) for new, old in zip(after, before, strict=True)
    )


def unmap(region: MappedRegion) -> bool:
    gc.collect()
    region.unmap()
    return not region.is_mapped


COMMANDS = {"write": write, "matches": matches, "copies": copies, "unmap": unmap}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    opening: dict[str, Any] = json.loads(sys.stdin.readline())
    how = opening["export"]
    export = RegionExport(
        size_bytes=how["size_bytes"],
        fd_socket_path=how["socket"],
        fd_token=bytes.fromhex(how["token"]),
        ipc_handle=bytes.fromhex(how["ipc_handle"]),
        ipc_offset_bytes=how["ipc_offset_bytes"],
        device_uuid=how["device_uuid"],
    )
    started_s = time.perf_counter()
    region = map_region([export], one_group_layout(opening["layout"]), library="torch")
    device = str(next(iter(region.views.values())).device)
    print(json.dumps({"map_s": time.perf_counter() - started_s, "device": device}), flush=True)
    for line in sys.stdin:
        print(json.dumps(COMMANDS[line.strip()](region)), flush=True)


if __name__ == "__main__":
    main()
