"""A pool's manifest is whole or not there, and names what it is about."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from kvhold_server.domain.ids import PoolName
from kvhold_server.memory.errors import SystemCallFailed
from kvhold_server.memory.pool_manifest import ManifestDirectory, PoolManifest, RegionFile

REGION = RegionFile(region_id="llama/0", device=3, inode=4711, size_bytes=1 << 30)
MANIFEST = PoolManifest(
    name=PoolName("llama"), request=b"\x00\xffrequest", content=b"content", backend="posix_shm", regions=(REGION,)
)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    directory = ManifestDirectory(tmp_path)
    others = [replace(MANIFEST, name=PoolName(name)) for name in ("..", "a.blocks", ".hidden", "a/b", "ü" * 20)]
    for manifest in [MANIFEST, *others]:
        directory.save(manifest)
    loaded, problems = ManifestDirectory(tmp_path).load()
    assert problems == []
    assert sorted(loaded, key=lambda m: m.name) == sorted([MANIFEST, *others], key=lambda m: m.name)
    assert {path.parent for path in tmp_path.rglob("*.json")} == {tmp_path / "pools"}


def test_saving_again_replaces_and_a_failure_keeps_the_old_one(tmp_path: Path) -> None:
    directory = ManifestDirectory(tmp_path)
    directory.save(MANIFEST)
    with (
        patch("os.replace", side_effect=OSError(28, "No space left on device")),
        pytest.raises(SystemCallFailed, match="space"),
    ):
        directory.save(replace(MANIFEST, content=b"new"))
    assert directory.load()[0] == [MANIFEST]
    directory.save(replace(MANIFEST, content=b"new"))
    assert [m.content for m in directory.load()[0]] == [b"new"]
    assert len(list((tmp_path / "pools").iterdir())) == 1


def test_a_deleted_pool_leaves_nothing(tmp_path: Path) -> None:
    directory = ManifestDirectory(tmp_path)
    directory.save(MANIFEST)
    directory.table_path(MANIFEST.name).write_bytes(b"table")
    directory.delete(MANIFEST.name)
    directory.delete(MANIFEST.name)
    assert list((tmp_path / "pools").iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"llama"', '"another"'),
        lambda text: text.replace('"inode"', '"no_such_field"'),
        lambda text: "[]",
        lambda text: "null",
    ],
)
def test_a_damaged_manifest_is_reported_and_the_others_are_loaded(tmp_path: Path, damage: object) -> None:
    directory = ManifestDirectory(tmp_path)
    directory.save(MANIFEST)
    directory.save(replace(MANIFEST, name=PoolName("whole")))
    path = tmp_path / "pools" / "llama.json"
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    manifests, problems = directory.load()
    assert [m.name for m in manifests] == ["whole"]
    assert [problem.path for problem in problems] == [str(path)]


def test_other_files_are_other_regions() -> None:
    assert MANIFEST.regions_text != replace(MANIFEST, regions=(replace(REGION, inode=4712),)).regions_text
