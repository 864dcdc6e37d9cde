"""Names of shared-memory segments: deterministic, readable in `ls`, and reversible.

    kvhold.<instance>.<rank>.<kind>.<pool, percent-encoded>       kind: d (device part) or h (host-resident part)
    kvhold.<instance>.lock

`instance` is a digest of the instance directory, so that daemons that share a /dev/shm do not meet.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.backend import RegionId, RegionRequest
from kvhold_server.memory.errors import InvalidRegionRequest

PREFIX = "kvhold"
MAX_NAME_BYTES = 255  # NAME_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentName:
    """A parsed name."""

    instance: str
    pool: PoolName
    rank: int
    host: bool

    @property
    def region_id(self) -> RegionId:
        return RegionRequest(pool=self.pool, rank=self.rank, host=self.host, size_bytes=1).region_id


def instance_digest(instance_directory: Path) -> str:
    """Ten hex digits that stay the same as long as the directory does."""
    return hashlib.sha256(str(instance_directory.resolve()).encode()).hexdigest()[:10]


def lock_name(instance: str) -> str:
    return f"{PREFIX}.{instance}.lock"


def segment_name(instance: str, request: RegionRequest) -> str:
    """Raises InvalidRegionRequest when the pool's name does not fit in a file name."""
    kind = "h" if request.host else "d"
    name = f"{PREFIX}.{instance}.{request.rank}.{kind}.{quote(request.pool, safe='')}"
    if len(name) > MAX_NAME_BYTES:
        room = MAX_NAME_BYTES - len(name) + len(quote(request.pool, safe=""))
        raise InvalidRegionRequest("pool", request.pool, f"must be at most {room} bytes when percent-encoded")
    return name


def parse_segment_name(name: str) -> SegmentName | None:
    """None for a lock file and for whatever is not ours."""
    parts = name.split(".", 4)
    if len(parts) != 5 or parts[0] != PREFIX or parts[3] not in ("d", "h") or not parts[2].isdigit():
        return None
    return SegmentName(instance=parts[1], rank=int(parts[2]), host=parts[3] == "h", pool=PoolName(unquote(parts[4])))
