"""What a restarted daemon must know to offer its pools again: one small JSON file per pool, replaced as a whole.

    <state directory>/pools/<pool, percent-encoded>.json      how it was asked for, and which files hold its bytes
    <state directory>/pools/<pool, percent-encoded>.blocks    its block table
    <state directory>/pools/<pool, percent-encoded>.quotas    its tenants' quotas, if there ever were any

The request is opaque here: the shell stores the message that opened the pool and opens it again from that.
"""

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.errors import SystemCallFailed
from kvhold_server.memory.recovery_errors import ManifestUnreadable

VERSION: Final = 1
SUFFIX: Final = ".json"
MAX_MANIFEST_BYTES: Final = 64 << 20
BYTES: Final = frozenset({"request", "content", "former_content"})  # in base64


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFile:
    """A region's file as it was when the pool was made. A new file of the same name has another inode."""

    region_id: str
    device: int
    inode: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolManifest:
    """One pool."""

    name: PoolName
    request: bytes  # the message that opened it
    content: bytes  # the content identity of the current generation, as a message
    backend: str
    regions: tuple[RegionFile, ...]
    content_generation: int = 1
    former_content: bytes = b""  # of the generation before
    former_table_generation: int = 0  # the block table's: while it is still that, the contents are not replaced yet

    def replaced(self, content: bytes, generation: int, table_generation: int) -> "PoolManifest":
        """Saved before the block table begins a new generation, which replaces the contents."""
        return replace(
            self,
            content=content,
            content_generation=generation,
            former_content=self.content,
            former_table_generation=table_generation,
        )

    def as_before(self) -> "PoolManifest":
        """The contents were not replaced."""
        return replace(
            self,
            content=self.former_content,
            content_generation=self.content_generation - 1,
            former_content=b"",
            former_table_generation=0,
        )

    @property
    def regions_text(self) -> str:
        """Equal exactly when the same files hold the bytes."""
        return json.dumps([asdict(region) for region in self.regions], sort_keys=True)


class ManifestDirectory:
    """The pools of one state directory."""

    def __init__(self, state_directory: Path) -> None:
        """Makes the directory if it is not there. Raises OSError."""
        self.path = state_directory / "pools"
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def table_path(self, name: PoolName) -> Path:
        """Where the pool's block table lies."""
        return self.path / f"{_encoded(name)}.blocks"

    def quotas_path(self, name: PoolName) -> Path:
        """Where the quotas of the pool's tenants lie."""
        return self.path / f"{_encoded(name)}.quotas"

    def save(self, manifest: PoolManifest) -> None:
        """Whole or not at all, whenever the process dies. Raises SystemCallFailed (disk full: the old one stays)."""
        path = self._manifest_path(manifest.name)
        unfinished = path.with_name(f".{path.name}.new")
        try:
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(_dump(manifest))
            os.replace(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            code = error.errno or 0
            raise SystemCallFailed("write", str(path), code, type(error).__name__, os.strerror(code)) from error

    def load(self) -> tuple[list[PoolManifest], list[ManifestUnreadable]]:
        """All manifests by name, and what could not be read."""
        manifests: list[PoolManifest] = []
        problems: list[ManifestUnreadable] = []
        for path in sorted(self._files()):
            try:
                manifests.append(_load(path))
            except ManifestUnreadable as error:
                problems.append(error)
        return manifests, problems

    def read(self, name: PoolName) -> PoolManifest | None:
        """One pool's manifest; None if there is none that can be read."""
        try:
            return _load(self._manifest_path(name))
        except ManifestUnreadable:
            return None

    def delete(self, name: PoolName, *, keep_quotas: bool = False) -> None:
        """The pool is gone; first what names it, then what belongs to it."""
        self._manifest_path(name).unlink(missing_ok=True)
        self.table_path(name).unlink(missing_ok=True)
        if not keep_quotas:
            self.quotas_path(name).unlink(missing_ok=True)

    def _manifest_path(self, name: PoolName) -> Path:
        return self.path / f"{_encoded(name)}{SUFFIX}"

    def _files(self) -> Iterable[Path]:
        return (path for path in self.path.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))


def _encoded(name: PoolName) -> str:
    return quote(name, safe="").replace(".", "%2E")  # no name is hidden, or taken for another one's table


def _dump(manifest: PoolManifest) -> bytes:
    fields: dict[str, Any] = asdict(manifest)
    for key in BYTES:
        fields[key] = b64encode(fields[key]).decode()
    return json.dumps({"version": VERSION} | fields, indent=1).encode()


def _load(path: Path) -> PoolManifest:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError(f"is larger than {MAX_MANIFEST_BYTES} bytes")
        fields = json.loads(path.read_bytes())
        if fields.pop("version") != VERSION:
            raise ValueError("was written by another version")
        for key in BYTES & fields.keys():
            fields[key] = b64decode(fields[key], validate=True)
        fields["regions"] = tuple(RegionFile(**region) for region in fields["regions"])
        manifest = PoolManifest(**fields)
        if path.name != f"{_encoded(manifest.name)}{SUFFIX}":
            raise ValueError(f"is about pool {manifest.name!r}")
        return manifest
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManifestUnreadable(str(path), str(error)) from None
