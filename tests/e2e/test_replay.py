"""The main job from its command line: schedulers as processes, real bytes, a kill, and numbers that agree."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvhold_client.client import Client
from kvhold_client.local_daemon import LocalDaemon
from kvhold_client.replay.sequential import STANDARD_CASES
from tests.e2e.conftest import GRACE_PERIOD_S


def kvhold(*args: str, timeout_s: float = 110) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kvhold_client", *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture
def own_trace(repo_dir: Path) -> Path:
    pytest.importorskip("numpy")
    return repo_dir / "client/kvhold_client/replay/demo_trace.jsonl"


@pytest.mark.slow
def test_a_killed_scheduler_costs_nothing_but_its_own_work(daemon: LocalDaemon, own_trace: Path) -> None:
    """Acceptance of the whole: every cached byte right, counts equal to /metrics, blocks freed, successor warm."""
    flags = ["--target", daemon.target, "--metrics-url", daemon.metrics_url, "--memory", "1GiB", "--limit", "70"]
    flags += ["--max-output-tokens", "40", "--live", "6", "--step-ms", "10", "--kill-one-after", "1", "-o", "json"]
    done = kvhold("replay", str(own_trace), *flags)
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert found["num_finished"] == 70
    assert found["num_mismatches"] == 0
    assert found["num_blocks_verified"] > 1000
    assert found["hit_tokens"] > found["query_tokens"] * 0.2
    assert len(found["agreements"]) == 4
    assert all(a["schedulers"] <= a["daemon"] for a in found["agreements"])
    assert found["kill"]["freed_after_s"] <= GRACE_PERIOD_S + 1
    assert 0 < found["inherited_hit_tokens"] <= found["inherited_query_tokens"]


@pytest.mark.slow
def test_a_hybrid_model_is_replayed_with_every_byte_right(daemon: LocalDaemon, own_trace: Path) -> None:
    flags = ["--target", daemon.target, "--model", "gemma-3-27b", "--memory", "1400MiB", "--limit", "24"]
    done = kvhold("replay", str(own_trace), *flags, "--max-output-tokens", "24", "--live", "2", "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert found["num_finished"] + found["num_skipped"] == 24
    assert found["num_finished"] > 5
    assert found["num_mismatches"] == 0


def test_without_memory_blocks_are_counted_and_no_bytes_are_written(daemon: LocalDaemon, own_trace: Path) -> None:
    flags = ["--target", daemon.target, "--backend", "fake", "--limit", "20", "--max-output-tokens", "4"]
    done = kvhold("replay", str(own_trace), *flags, "--schedulers", "1", "--memory", "2GiB")
    assert done.returncode == 0, done.stderr
    assert "none written" in done.stdout
    assert "20 finished" in done.stdout


def test_the_pool_of_a_replay_is_gone_afterwards(client: Client) -> None:
    assert not [pool for pool in client.list_pools() if pool.name.startswith("replay-")]


def test_the_sequential_rule_gives_the_same_totals_each_time(daemon: LocalDaemon, own_trace: Path) -> None:
    flags = ["--target", daemon.target, "--rule", "sequential", "--blocks", "40", "--conc", "3", "-o", "json"]
    first, second = (json.loads(kvhold("replay", str(own_trace), *flags).stdout)[0] for _ in range(2))
    assert first | {"seconds": 0} == second | {"seconds": 0}
    assert first["num_requests"] == 183
    assert 0 < first["hit_tokens"] == first["num_hit_blocks"] * 512 < first["query_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "num_live"), [(500, 1), (20000, 16)])
def test_published_hit_totals_are_reproduced_to_the_token(
    daemon: LocalDaemon, shared_dir: Path, num_blocks: int, num_live: int
) -> None:
    assert (num_blocks, num_live) in STANDARD_CASES
    recorded = [
        json.loads(line)
        for line in (shared_dir / "vectors/blocks/blocks_mooncake_hitrate.jsonl").read_text().splitlines()
    ]
    (expected,) = [r for r in recorded if r.get("num_blocks") == num_blocks and r.get("conc") == num_live]
    trace = str(shared_dir / "traces/conversation_trace.jsonl")
    flags = ["--rule", "sequential", "--blocks", str(num_blocks), "--conc", str(num_live), "-o", "json"]
    (found,) = json.loads(kvhold("replay", trace, "--target", daemon.target, *flags).stdout)
    assert found["hit_tokens"] == expected["hit_tokens"]
    assert found["query_tokens"] == expected["query_tokens"]
    assert found["num_skipped"] == expected["skipped"]
    assert found["num_hit_blocks"] == expected["hit_blocks"]
    assert found["num_full_blocks"] == expected["full_blocks"]


def test_a_restart_of_the_daemon_is_in_the_report(own_trace: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sessions come back by themselves: without a line about it nobody would know that anything had happened."""
    daemon = LocalDaemon("--grace-period-s", "8", directory=tmp_path_factory.mktemp("d"))
    with daemon:
        flags = ["--target", daemon.target, "--metrics-url", daemon.metrics_url, "--memory", "256MiB", "--limit", "40"]
        flags += ["--max-prompt-tokens", "1500", "--max-output-tokens", "60", "--live", "2", "--step-ms", "10"]
        command = [sys.executable, "-m", "kvhold_client", "replay", str(own_trace), *flags, "-o", "json"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        replay = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        with Client(daemon.target) as client:
            deadline = time.monotonic() + 30
            while sum(session.last_step > 5 for session in client.list_sessions()) < 2:
                assert replay.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        daemon.kill()
        daemon.start()
        out, said = replay.communicate(timeout=90)
    assert replay.returncode == 0, said + out
    found = json.loads(out)
    assert found["num_reconnects"] >= 2, "one of each scheduler"
    assert found["restarts"]["num_restarts"] == 1
    assert found["restarts"]["outcome"] == "recovered" and found["restarts"]["num_recovered_blocks"] > 0
    assert found["num_mismatches"] == 0 and found["agreements"] == []
