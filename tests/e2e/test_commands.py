"""Commands against a running daemon."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import json_format

from kvhold_client.cli import main
from kvhold_client.cli.console import plain
from kvhold_client.client import Client
from kvhold_client.local_daemon import LocalDaemon
from kvhold_client.models import GIB, model_plan_request
from kvhold_client.pools import PoolRequest
from kvhold_client.shape import GroupShape
from tests.e2e.conftest import tiny_plan


def ask(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args), {}) == 0
    return capsys.readouterr().out


def test_status_is_ready_and_shows_pools(
    daemon: LocalDaemon, open_pool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    open_pool("shown", 64)
    shown = ask(capsys, "status", "--target", daemon.target)
    assert "ready" in shown
    assert "liveness SERVING, readiness SERVING" in shown
    assert "shown" in shown


def test_pools_and_sessions_as_json_have_the_same_numbers_as_the_client(
    daemon: LocalDaemon, client: Client, open_pool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = open_pool("numbers", 64)
    with client.get_pool(name).open_session(client_name="me") as session:
        session.begin_step()
        session.table.admit(session.table.new_sequence(1), num_tokens=33)
        session.table.flush()
        (pool,) = [
            p for p in json.loads(ask(capsys, "pools", "--target", daemon.target, "-o", "json")) if p["name"] == name
        ]
        assert pool["counts"]["num_held_blocks"] == 3
        (mine,) = json.loads(ask(capsys, "sessions", "--target", daemon.target, "--pool", name, "-o", "json"))
        assert (mine["client_name"], mine["num_sequences"], mine["num_held_blocks"]) == ("me", 1, 3)
        assert session.session_id not in json.dumps(mine), "a session's id is a secret"


def test_top_prints_one_screen_on_a_pipe(
    daemon: LocalDaemon, open_pool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    open_pool("seen", 64)
    shown = ask(capsys, "top", "--target", daemon.target)
    assert "seen" in shown
    assert "\x1b" not in shown


def test_plan_shows_what_the_planner_says(
    daemon: LocalDaemon, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = client.plan(model_plan_request("llama-3.1-8b", memory_bytes=40 * GIB))
    assert (plan.num_blocks, plan.capacity_tokens) == (20480, 327_680)
    shown = ask(capsys, "plan", "--model", "llama-3.1-8b", "--target", daemon.target)
    assert "20,479 usable + 1 null, 2 MiB each" in shown
    assert "327,680 tokens" in shown


def test_plan_of_gemma_names_windows_and_waste(daemon: LocalDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    shown = ask(capsys, "plan", "--model", "gemma-3-27b", "--target", daemon.target)
    assert shown.count("sliding_window 1024") == 6
    assert "full_attention" in shown
    assert "warning" in shown


def test_too_little_memory_is_a_failure_with_the_length_that_would_fit(
    daemon: LocalDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "llama-3.1-8b", "--memory", "1GiB", "--target", daemon.target], {}) == 1
    said = capsys.readouterr()
    assert "INSUFFICIENT_MEMORY" in said.err
    assert not said.out


def test_version_shows_the_daemons(daemon: LocalDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(ask(capsys, "version", "--target", daemon.target, "-o", "json"))
    assert found["daemon"]["version"]
    assert len(found["daemon"]["boot_id"]) >= 8


def test_a_request_file_plans_as_the_model_does(
    daemon: LocalDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "llama.json"
    path.write_text(json_format.MessageToJson(model_plan_request("llama-3.1-8b", memory_bytes=40 * GIB)))
    from_file = json.loads(ask(capsys, "plan", str(path), "--target", daemon.target, "-o", "json"))
    from_model = json.loads(ask(capsys, "plan", "--model", "llama-3.1-8b", "--target", daemon.target, "-o", "json"))
    assert from_file == from_model


def test_tensor_parallel_ranks_split_the_heads(daemon: LocalDaemon, client: Client) -> None:
    one = client.plan(model_plan_request("llama-3.1-8b", memory_bytes=40 * GIB))
    four = client.plan(model_plan_request("llama-3.1-8b", memory_bytes=40 * GIB, num_ranks=4))
    assert len(four.ranks) == 4
    assert four.ranks[3].bytes_per_block * 4 == one.ranks[0].bytes_per_block
    assert four.num_blocks == one.num_blocks * 4


def values_by_field(value: object, path: str = "") -> dict[str, list[object]]:
    """Every field of a JSON document with all the values that it has anywhere in it."""
    found: dict[str, list[object]] = {}
    parts = value.items() if isinstance(value, dict) else ((None, item) for item in value)  # type: ignore[attr-defined]
    for name, item in parts:
        here = f"{path}.{name}" if name else path
        found.setdefault(here, []).append(item)
        if isinstance(item, dict | list):
            for deeper, values in values_by_field(item, here).items():
                found.setdefault(deeper, []).extend(values)
    return found


# What these pools have no reason to fill.
MAY_BE_EMPTY = (
    "retained",
    "chunk",
    "provisional",
    "quarantined",
    "shared",
    "evicted",
    "preempted",
    "recovered",
    "other",
)


@pytest.mark.parametrize("command", ["pools", "status", "top"])
def test_no_field_of_a_pool_is_empty_whatever_the_pool_is(
    command: str, daemon: LocalDaemon, client: Client, open_pool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A field that a list never fills is a promise that nobody keeps."""
    name = open_pool("windows", 128, sliding_window_tokens=32)
    open_pool("simulated", simulated_groups=(GroupShape(kind="full", block_size_tokens=8),), simulated_num_blocks=9)
    with client.get_pool(name).open_session() as session:
        for turn, text in enumerate("aab"):
            session.begin_step()
            sequence = session.table.new_sequence(turn, text.encode() * 64)
            session.table.admit(sequence, num_tokens=33)
            session.table.flush()
            if text == "a":
                session.table.finish(sequence)
        answer = json.loads(ask(capsys, command, "--target", daemon.target, "-o", "json"))
    pools = answer if command == "pools" else answer["pools"]
    listed = {pool["name"]: pool for pool in pools}
    assert [group["kind"] for group in listed["windows"]["shape"]["groups"]] == ["full_attention", "sliding_window"]
    assert listed["windows"]["shape"] == json.loads(json.dumps(plain(client.get_pool(name).info.shape)))
    assert listed["windows"]["outcome"] == "fresh" and listed["windows"]["recovery_reason"]
    never = [field for field, values in values_by_field(pools).items() if not any(values)]
    assert not [field for field in never if not any(word in field for word in MAY_BE_EMPTY)]


def test_a_pool_that_a_former_daemon_had_is_listed_as_recovered(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = LocalDaemon(directory=tmp_path_factory.mktemp("d"))
    with daemon, Client(daemon.target) as client:
        pool = client.open_pool(PoolRequest(name="kept", plan=tiny_plan(64), model="tiny"))
        with pool.open_session() as session:
            session.begin_step()
            session.table.admit(session.table.new_sequence(1, b"h" * 64), num_tokens=33)
            session.table.flush()
            session.idle()
        daemon.kill()
        daemon.start()
        (listed,) = json.loads(ask(capsys, "pools", "--target", daemon.target, "-o", "json"))
        assert (listed["outcome"], listed["num_recovered_blocks"], listed["model"]) == ("recovered", 2, "tiny")
        client.delete_pool("kept", force=True)
