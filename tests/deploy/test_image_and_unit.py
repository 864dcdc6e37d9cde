"""The container image's recipe and the systemd unit; `make image-test` builds and runs the image."""

import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvhold_client.client import Client
from kvhold_client.leash import leashed
from kvhold_client.local_daemon import LocalDaemon
from kvhold_client.pools import PoolRequest
from kvhold_server.config import load_config
from tests.e2e.conftest import tiny_plan


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


def test_systemd_accepts_the_units(deploy_dir: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    paths = []
    for unit_file in (deploy_dir / "systemd").glob("*.service"):
        paths.append(tmp_path / unit_file.name)
        text = re.sub("/opt/kvhold/bin/(kvhold|python)", "/bin/true", unit_file.read_text())
        paths[-1].write_text(text.replace("User=kvhold", "User=root"))
    assert len(paths) == 2
    run = subprocess.run([analyze, "verify", *map(str, paths)], capture_output=True, text=True, timeout=60)
    ours = [line for line in run.stderr.splitlines() if "kvhold" in line]
    assert not ours, ours


def test_holder_is_up_before_the_daemon_and_ends_with_nobody(unit: configparser.ConfigParser, deploy_dir: Path) -> None:
    """Memory without a name must have an owner in every moment of an upgrade: an order, and no tie."""
    holder = configparser.ConfigParser(strict=False, interpolation=None)
    holder.optionxform = str  # type: ignore[assignment,method-assign]
    holder.read(deploy_dir / "systemd" / "kvhold-holder.service")
    assert holder["Unit"]["Before"] == "kvhold.service" and "kvhold-holder.service" in unit["Unit"]["After"]
    assert unit["Unit"]["Wants"] == "kvhold-holder.service"
    ties = {"Requires", "BindsTo", "PartOf", "Requisite", "PropagatesStopTo", "StopPropagatedFrom", "Conflicts"}
    assert not ties & (holder["Unit"].keys() | unit["Unit"].keys())
    config = load_config(["--config", str(deploy_dir / "systemd" / "kvhold.toml")], {})
    _, dash_m, module, path = holder["Service"]["ExecStart"].split()
    assert (dash_m, path) == ("-m", config.holder) and importlib.util.find_spec(module) is not None
    assert config.holder.startswith(f"/run/{holder['Service']['RuntimeDirectory']}/")
    assert holder["Service"]["User"] == unit["Service"]["User"], "it talks to its own user only"


def test_pools_without_a_name_are_warm_after_an_upgrade_as_the_units_do_it(deploy_dir: Path) -> None:
    """Holder up, daemon up, daemon replaced by SIGTERM: the same bytes; with no holder, fresh ones."""
    text = (deploy_dir / "systemd" / "kvhold-holder.service").read_text()
    module = re.search("ExecStart=/opt/kvhold/bin/python -m ([a-z_.]+) /", text)
    assert module is not None
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        path = Path(name) / "holder.sock"
        holder = subprocess.Popen(leashed(module[1], str(path)), stdin=subprocess.PIPE)
        try:
            assert upgraded(Path(name), "--holder", str(path)) == ("recovered", "", 2)
        finally:
            holder.terminate()
            holder.communicate()
        assert holder.returncode == 0
        assert upgraded(Path(name) / "other")[::2] == ("fresh", 0)


def upgraded(directory: Path, *flags: str) -> tuple[str, str, int]:
    """What a memfd pool with two published blocks begins with in the next daemon: outcome, reason, blocks kept."""
    directory.mkdir(exist_ok=True)
    daemon = LocalDaemon("--backend", "memfd", *flags, directory=directory)
    for _ in range(2):
        with daemon, Client(daemon.target) as client:
            pool = client.open_pool(PoolRequest(name="p", plan=tiny_plan(64)))
            found = (pool.info.outcome, pool.info.recovery_reason, pool.info.num_recovered_blocks)
            with pool.open_session() as session:
                session.begin_step()
                session.table.admit(session.table.new_sequence(1, b"h" * 64), num_tokens=33)
                session.table.flush()
                session.idle()
    return found
