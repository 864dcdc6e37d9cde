"""The container image's recipe and the systemd unit; `make image-test` builds and runs the image."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvhold_server.config import load_config


def test_dockerfile_is_clean(tool: Callable[[str], str], repo_dir: Path) -> None:
    run = subprocess.run([tool("hadolint"), "Dockerfile"], cwd=repo_dir, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout


def test_image_runs_as_a_number_and_has_no_compiler_torch_or_toolkit(repo_dir: Path) -> None:
    text = (repo_dir / "Dockerfile").read_text()
    stages = text.split("\nFROM ")
    assert len(stages) == 3, "what builds is not what runs"
    assert re.search(r"^USER 10001:10001$", stages[-1], re.M)
    assert "torch" not in re.sub(r"(?m)^#.*$", "", text)
    assert re.search(r'^ENTRYPOINT \["kvhold"\]$', stages[-1], re.M)


def test_image_and_chart_agree_on_user_and_version(repo_dir: Path) -> None:
    values = (repo_dir / "deploy" / "helm" / "kvhold" / "values.yaml").read_text()
    chart = (repo_dir / "deploy" / "helm" / "kvhold" / "Chart.yaml").read_text()
    version = re.search(r'^version = "(.+)"$', (repo_dir / "pyproject.toml").read_text(), re.M)
    assert "user: 10001" in values and "group: 10001" in values
    assert version and f'appVersion: "{version[1]}"' in chart
    assert f"ARG VERSION={version[1]}" in (repo_dir / "Dockerfile").read_text()


def test_a_container_starts_from_bytecode_of_all_that_it_imports(repo_dir: Path, tmp_path: Path) -> None:
    """Its root is read-only and the base image has none: compiling took most of a start's time."""
    final = (repo_dir / "Dockerfile").read_text().split("\nFROM ")[-1]
    found = re.search(r"""^RUN PYTHONDONTWRITEBYTECODE='' \S+/python -c "(.+)"$""", final, re.M)
    assert found
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(str(repo_dir / part) for part in ("proto", "server", "client")),
        "PYTHONPYCACHEPREFIX": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    subprocess.run([sys.executable, "-c", found[1]], env=environment, check=True, timeout=60)
    compiled = {path.name.split(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert {
        "block_table",
        "routes",
        "serve",
        "dataclasses",
        "exposition",
        "_server",
    } <= compiled


@pytest.fixture
def unit(deploy_dir: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(deploy_dir / "systemd" / "kvhold.service")
    return parser


def test_unit_restarts_and_waits_longer_than_a_drain(unit: configparser.ConfigParser, deploy_dir: Path) -> None:
    service = unit["Service"]
    config = load_config(["--config", str(deploy_dir / "systemd" / "kvhold.toml")], {})
    assert service["Restart"] == "always"
    assert int(service["TimeoutStopSec"]) > config.drain_deadline_s
    assert config.socket.startswith(f"/run/{service['RuntimeDirectory']}/")
    assert config.state_dir == f"/var/lib/{service['StateDirectory']}"


def test_unit_keeps_what_makes_a_restart_warm(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert service["RemoveIPC"] == "no", "systemd would delete the pools' shared memory"
    assert service["RuntimeDirectoryPreserve"] == "restart"


def test_systemd_accepts_the_unit(deploy_dir: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (deploy_dir / "systemd" / "kvhold.service").read_text()
    path = tmp_path / "kvhold.service"
    path.write_text(text.replace("/opt/kvhold/bin/kvhold", "/bin/true").replace("User=kvhold", "User=root"))
    run = subprocess.run([analyze, "verify", str(path)], capture_output=True, text=True, timeout=60)
    ours = [line for line in run.stderr.splitlines() if "kvhold.service" in line]
    assert not ours, ours
