"""`kvhold doctor`, `config show`, `completion`: what a platform engineer types first."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvhold_client.cli import completion, doctor
from kvhold_client.cli.main import COMMANDS
from kvhold_server.config import load_with_origins
from tests.deploy.live import LiveDaemon, environment
from tests.deploy.load import Workload


def kvhold(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvhold_client", *arguments]
    return subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=60)


def findings(machine: doctor.Machine) -> dict[str, doctor.Finding]:
    return {finding.check: finding for finding in doctor.check_machine(machine)}


def test_doctor_finds_a_live_daemon_well(loaded: LiveDaemon) -> None:
    run = kvhold("doctor", "--target", loaded.target, "-o", "json")
    found = {finding["check"]: finding for finding in json.loads(run.stdout)}
    assert found["socket"]["verdict"] == found["health"]["verdict"] == found["versions"]["verdict"] == "ok"
    assert found["fd channel"]["verdict"] == "ok"
    assert run.returncode == (4 if any(f["verdict"] == "fail" for f in found.values()) else 0)


def test_doctor_says_that_nobody_listens(tmp_path: Path) -> None:
    path = tmp_path / "k.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    run = kvhold("doctor", "--target", f"unix:{path}", "--timeout", "1")
    assert run.returncode == 4
    assert "Connection refused" in run.stdout and "restart the daemon" in run.stdout


def test_k8s_02_doctor_names_path_uid_and_the_group_to_join(tmp_path: Path) -> None:
    """K8S-02: access is by group, and the answer to a refusal is the number of the group."""
    path = tmp_path / "k.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o660)
        if os.geteuid() == 0:
            os.chown(path, 4711, 4712)
        found = {f.check: f for f in doctor.check_target(f"unix:{path}")}
    assert f"mode 0660, uid {4711 if os.geteuid() == 0 else os.getuid()}" in found["access"].found
    if os.geteuid():
        assert found["access"].verdict == "ok"


def test_k8s_03_hidden_devices_are_named_as_the_reason(tmp_path: Path) -> None:
    """K8S-03: a claim in one container and void in the other."""
    (tmp_path / "nvidia0").touch()
    found = findings(doctor.Machine(environ={"NVIDIA_VISIBLE_DEVICES": "void"}, devices=tmp_path))["gpu"]
    assert found.verdict == "fail" and "claim" in found.fix


def test_k8s_05_small_shared_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """K8S-05: 64 MiB is what runtimes give; SIGBUS is no error message."""
    small = os.statvfs_result((4096, 4096, (64 << 20) // 4096, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    found = findings(doctor.Machine(environ={}))["shm"]
    assert found.verdict == "warn" and "emptyDir" in found.fix


def test_k8s_06_low_memlock_names_the_limit_and_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """K8S-06: the limit by its name, its value, and where to raise it."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = findings(doctor.Machine(environ={}))["memlock"]
    assert found.verdict == "warn"
    assert "RLIMIT_MEMLOCK 64" in found.found and "LimitMEMLOCK" in found.fix


def test_doctor_explains_variables_that_kubernetes_injects() -> None:
    injected = {"KVHOLD_SERVICE_HOST": "10.0.0.1", "KVHOLD_PORT": "tcp://10.0.0.1:9464", "KVHOLD_TARGET": "unix:/x"}
    found = findings(doctor.Machine(environ=injected))["environment"]
    assert found.verdict == "warn" and "enableServiceLinks" in found.fix
    assert findings(doctor.Machine(environ={"KVHOLD_TARGET": "unix:/x"}))["environment"].verdict == "ok"


def test_config_show_tells_where_each_value_is_from(tmp_path: Path) -> None:
    path = tmp_path / "kvhold.toml"
    path.write_text('lease_ttl_s = 7\nlog_level = "debug"\n[limits]\nmax_pools = 3\n')
    run = kvhold("config", "show", "--origin", "--config", str(path), "--log-level", "error", KVHOLD_GRACE_PERIOD_S="2")
    assert run.returncode == 0, run.stderr
    shown = {line.split(" = ")[0]: line.split("# ")[1] for line in run.stdout.splitlines()}
    assert shown["lease_ttl_s"] == shown["limits_max_pools"] == str(path)
    assert shown["log_level"] == "--log-level"
    assert shown["grace_period_s"] == "environment KVHOLD_GRACE_PERIOD_S"
    assert shown["socket"] == "default"


def test_config_show_output_is_a_configuration_again(tmp_path: Path) -> None:
    loaded = load_with_origins(["--socket", "/run/x.sock", "--limits-max-pools", "5", "--insecure"], {})
    top = [line for line in loaded.lines(with_origin=False) if not line.startswith("limits_")]
    path = tmp_path / "again.toml"
    path.write_text("\n".join(top))
    again = load_with_origins(["--config", str(path), "--limits-max-pools", "5"], {})
    assert again.config == loaded.config


def test_config_show_refuses_what_serve_would_refuse() -> None:
    run = kvhold("config", "show", "--lease-ttl-s", "soon")
    assert run.returncode == 2 and "must be a number" in run.stderr


def bash_completes(words: list[str]) -> list[str]:
    script = completion.SCRIPTS["bash"](completion.flags_by_command())
    ask = f'{script}\nCOMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _kvhold; echo "${{COMPREPLY[@]}}"'
    run = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=20, check=True)
    return run.stdout.split()


def test_bash_completes_commands_and_flags() -> None:
    assert bash_completes(["kvhold", "do"]) == ["doctor"]
    assert "--local" in bash_completes(["kvhold", "doctor", "--l"])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_completed(shell: str) -> None:
    script = completion.SCRIPTS[shell](completion.flags_by_command())
    assert all(name in script for name in COMMANDS)


def explain(loaded: LiveDaemon, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return kvhold("explain", "--target", loaded.target, "--pool", "chat", *arguments)


def test_explain_of_a_pool_attributes_every_token(loaded: LiveDaemon) -> None:
    answer = json.loads(explain(loaded, "-o", "json").stdout)
    assert answer["query_tokens"] > 0
    assert sum(answer["parts"].values()) == answer["query_tokens"]


def test_explain_of_a_prompt_names_the_first_missing_block(loaded: LiveDaemon) -> None:
    workload = Workload(seed=17 * 0)
    prompts = [workload.next(i) for i in range(3)]
    known = prompts[0].hashes[:4]
    hashes = ",".join(digest.hex() for digest in [*known, b"\x01" * 32, b"\x02" * 32])
    answer = json.loads(explain(loaded, "--hashes", hashes, "--num-tokens", "96", "-o", "json").stdout)
    full = next(group for group in answer["groups"] if group["kind"] == "full_attention")
    assert full["first_missing_block"] <= 4 and full["reason"] in ("NEVER_SEEN", "EVICTED")
    assert answer["hit_tokens"] <= full["hit_tokens"] <= 64


def test_explain_of_unknown_tokens_says_that_memory_would_not_help(loaded: LiveDaemon, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(" ".join(map(str, range(900_000, 900_064))))
    run = explain(loaded, "--tokens", str(path))
    assert run.returncode == 0, run.stderr
    assert "0 of 64 tokens would be hit" in run.stdout and "More memory would not help" in run.stdout


def test_explain_of_a_prompt_shorter_than_a_block_does_not_say_that_all_is_there(
    loaded: LiveDaemon, tmp_path: Path
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("1 2 3")
    shown = explain(loaded, "--tokens", str(path)).stdout
    assert "the prompt fills no block" in shown and "all there" not in shown


def test_explain_refuses_what_is_no_prompt(loaded: LiveDaemon, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("hello world")
    run = explain(loaded, "--tokens", str(path))
    assert run.returncode == 2 and "token ids" in run.stderr
    assert explain(loaded, "--hashes", "00").returncode == 2


def test_explain_of_a_pool_says_what_the_growth_that_was_asked_for_would_give(loaded: LiveDaemon) -> None:
    answer = json.loads(explain(loaded, "--more-memory", "20,35,10000", "-o", "json").stdout)
    evicted = answer["parts"]["miss: was evicted"]
    twenty, between, all_of_it = answer["more_memory"]
    assert twenty["more_percent"] == 20 and twenty["kept_tokens_at_least"] == twenty["kept_tokens_at_most"] <= evicted
    assert twenty["kept_tokens_at_least"] <= between["kept_tokens_at_least"] <= between["kept_tokens_at_most"]
    assert all_of_it["kept_tokens_at_most"] == evicted > 0
    hits = answer["parts"]["hit, own session"] + answer["parts"]["hit, another session"]
    assert twenty["hit_rate"] == pytest.approx((hits + twenty["kept_tokens_at_least"]) / answer["query_tokens"])
    shown = explain(loaded, "--more-memory", "20").stdout
    assert "+20 %" in shown and "+10 %" not in shown
    assert explain(loaded, "--more-memory", "many").returncode == 2
