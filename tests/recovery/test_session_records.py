"""Which sessions a successor finds, whenever the daemon dies."""

import os
from pathlib import Path

import pytest

from kvhold_server.failpoints import Failpoints, Stopped
from kvhold_server.memory.record_slots import PLACES
from kvhold_server.memory.recovery_errors import RecordsFull
from kvhold_server.memory.session_records import SessionRecord, SessionRecords

SLOT_BYTES = 1024


def record(name: str, epoch: int = 1, **changes: str) -> SessionRecord:
    texts = {"pool": "p", "client_name": "c", "tenant": "t", "token_digest": f"digest of {name} {epoch}"} | changes
    return SessionRecord(session_id=name, pid=7, epoch=epoch, **texts)


def reopen(path: Path, max_sessions: int = 4) -> list[SessionRecord]:
    records, former = SessionRecords.open(path, max_sessions=max_sessions)
    records.close()
    return former


def test_what_was_put_and_not_dropped_is_found_in_its_newest_state(tmp_path: Path) -> None:
    records, former = SessionRecords.open(tmp_path / "s", max_sessions=4)
    assert former == []
    for name in ("a", "b", "c"):
        records.put(record(name))
    records.put(record("b", epoch=2))
    records.drop("a")
    records.drop("a")
    records.close()
    assert sorted(reopen(tmp_path / "s"), key=lambda r: r.session_id) == [record("b", epoch=2), record("c")]
    assert len(reopen(tmp_path / "s")) == 2, "reading changes nothing"


def test_a_successor_goes_on_where_the_former_daemon_stopped(tmp_path: Path) -> None:
    for generation in range(1, 6):
        records, former = SessionRecords.open(tmp_path / "s", max_sessions=2)
        assert [r.epoch for r in former] == ([generation - 1] if generation > 1 else [])
        records.put(record("a", epoch=generation))
        records.put(record("b"))
        records.drop("b")
        records.close()


def test_the_file_is_bounded_and_a_full_one_still_takes_changes(tmp_path: Path) -> None:
    records, _ = SessionRecords.open(tmp_path / "s", max_sessions=2)
    records.put(record("a"))
    records.put(record("b"))
    with pytest.raises(RecordsFull):
        records.put(record("c"))
    for epoch in range(2, 9):
        records.put(record("a", epoch=epoch))
    records.drop("b")
    records.put(record("c"))
    records.close()
    assert {r.session_id: r.epoch for r in reopen(tmp_path / "s", 2)} == {"a": 8, "c": 1}


def test_long_texts_fit(tmp_path: Path) -> None:
    widest = record("x" * 64, client_name="\U0001f600" * 128, tenant="\U0001f600" * 64, pool="p" * 128)
    records, _ = SessionRecords.open(tmp_path / "s", max_sessions=1)
    records.put(widest)
    records.close()
    (found,) = reopen(tmp_path / "s")
    assert found.tenant == widest.tenant and widest.client_name.startswith(found.client_name) and found.client_name


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_in_the_middle_of_a_resume_leaves_one_of_the_two_states(tmp_path: Path, place: str) -> None:
    records, _ = SessionRecords.open(tmp_path / "s", max_sessions=2)
    records.put(record("a"))
    records._slots._hit = Failpoints.parse(f"{place}=raise")
    with pytest.raises(Stopped):
        records.put(record("a", epoch=2))
    records.close()
    assert reopen(tmp_path / "s", 2) == [record("a", epoch=1 if place == PLACES[0] else 2)]


def test_damaged_slots_are_nobody(tmp_path: Path) -> None:
    path = tmp_path / "s"
    records, _ = SessionRecords.open(path, max_sessions=3)
    for name in ("a", "b", "c"):
        records.put(record(name))
    records.close()
    data = bytearray(path.read_bytes())
    data[SLOT_BYTES + 20] ^= 1
    path.write_bytes(data)
    assert [r.session_id for r in reopen(path, 3)] == ["a", "c"]
    for junk in (b"", b"\xff" * 4 * SLOT_BYTES):
        path.write_bytes(junk)
        os.chmod(path, 0o600)
        assert reopen(path, 3) == []
