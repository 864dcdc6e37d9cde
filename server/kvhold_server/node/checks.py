"""What a request about a pool must satisfy, whatever state the daemon is in."""

import re

from kvhold_server.domain.errors import InvalidField
from kvhold_server.memory.backend import Region
from kvhold_server.node.errors import LowBlocksNotReserved, NoMemoryHere, RankNotFound, RegionSizeMismatch
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.opening import OpenPoolCommand

POOL_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_name(name: str) -> None:
    """Pool names are file names, metric labels and words in messages."""
    if not POOL_NAME.fullmatch(name):
        raise InvalidField("name", name[:200], "must be 1..128 of A-Z a-z 0-9 . _ -")


def check_devices(command: OpenPoolCommand) -> None:
    """One device a rank, or none at all."""
    devices, plan = command.options.rank_device_indexes, command.plan
    if devices and plan and len(devices) != len(plan.ranks):
        rule = f"must have one entry a rank: {len(plan.ranks)}, or none"
        raise InvalidField("options.rank_device_indexes", f"{len(devices)} entries", rule)


def regions_to_export(live: LivePool, rank: int, *, expected_size_bytes: int, num_warmup_blocks: int) -> list[Region]:
    """The rank's regions, if this worker may map them.

    Raises RankNotFound, NoMemoryHere, RegionSizeMismatch, LowBlocksNotReserved.
    """
    if not 0 <= rank < max(1, live.num_ranks):
        raise RankNotFound(live.name, rank, live.num_ranks - 1)
    regions = [region for region in live.regions if region.rank == rank]
    if not regions:
        why = "it was made for simulation" if live.plan is None else f"rank {rank} has no layers"
        raise NoMemoryHere(live.name, why)
    size_bytes = regions[0].requested_bytes
    if expected_size_bytes and expected_size_bytes not in (size_bytes, regions[0].size_bytes):
        raise RegionSizeMismatch(live.name, rank, size_bytes, expected_size_bytes)
    reserved = live.identity.options.num_reserved_low_blocks
    if num_warmup_blocks > reserved:
        raise LowBlocksNotReserved(live.name, num_warmup_blocks, reserved)
    return regions
