"""The quickstarts' commands, run as they stand there; those that need a cluster, root or Docker are only parsed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.live import REPO, environment

QUICKSTARTS = ("quickstart-bare-metal", "quickstart-kubernetes")
NEEDS = {"cluster": None, "root": None, "docker": None, "promtool": "promtool", "kubectl": "kubectl", "make": "make"}


def blocks(name: str) -> list[tuple[str, str]]:
    """(what it needs or "", script) of each bash block."""
    text = (REPO / "docs" / f"{name}.md").read_text()
    return [
        (need or "", body) for need, body in re.findall(r"^```bash(?: needs=(\w+))?\n(.*?)^```$", text, re.M | re.S)
    ]


def which(program: str) -> str | None:
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.exists() else shutil.which(program)


def run(script: str, programs: Path) -> "subprocess.CompletedProcess[str]":
    """In a shell where `kvhold` is this checkout's; `programs` is an empty directory."""
    (programs / "kvhold").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvhold_client "$@"\n')
    (programs / "kvhold").chmod(0o755)
    variables = environment()
    variables["PATH"] = os.pathsep.join((str(programs), str(Path(sys.executable).parent), variables["PATH"]))
    command = ["bash", "-c", f"set -em\n{script}"]
    return subprocess.run(command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_every_block_is_runnable_or_says_what_it_needs(name: str) -> None:
    found = blocks(name)
    assert len(found) == (REPO / "docs" / f"{name}.md").read_text().count("```bash")
    for need, script in found:
        assert not need or need in NEEDS
        checked = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, timeout=20)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
def test_bare_metal_quickstart_works_as_written(tmp_path: Path) -> None:
    script = "\n".join(body for need, body in blocks("quickstart-bare-metal") if not need)
    shutil.rmtree("/tmp/kvhold-try", ignore_errors=True)
    done = run(script, tmp_path)
    shutil.rmtree("/tmp/kvhold-try", ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ready" in done.stdout and "kvhold_build_info" in done.stdout and "<h1>kvhold</h1>" in done.stdout


@pytest.mark.parametrize(
    ("name", "need", "script"),
    [(name, need, body) for name in QUICKSTARTS for need, body in blocks(name) if NEEDS.get(need)],
    ids=lambda value: value if "\n" not in value else "",
)
def test_blocks_that_need_a_tool_work_where_it_is(name: str, need: str, script: str, tmp_path: Path) -> None:
    if which(NEEDS[need] or "") is None:
        pytest.skip(f"{need} is not installed")
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr


def mentioned_files(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w/])(deploy/[\w./-]*\w)", text)) | set(re.findall(r"\b(tests/[\w./-]+\.py)", text))


@pytest.mark.parametrize("path", sorted((REPO / "docs").rglob("*.md")), ids=lambda p: str(p.relative_to(REPO / "docs")))
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), target
    for name in mentioned_files(text):
        assert (REPO / name).exists() or "*" in name, name


def test_chart_flags_in_the_docs_exist() -> None:
    values = yaml.safe_load((REPO / "deploy" / "helm" / "kvhold" / "values.yaml").read_text())
    for name in QUICKSTARTS:
        for key in re.findall(r"--set (?:\S+,)?([\w.]+)=", (REPO / "docs" / f"{name}.md").read_text()):
            node = values
            for part in key.split("."):
                assert part in node, key
                node = node[part]
