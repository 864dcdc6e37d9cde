"""The program in README.md is run as it stands, against a real daemon."""

import re
import subprocess
import sys
from pathlib import Path

from kvhold_client import LocalDaemon


def program(readme: str) -> str:
    """The Python block of the README."""
    [code] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    return str(code)


def run(code: str, target: str) -> str:
    code = code.replace("unix:/run/kvhold/kvhold.sock", target)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_readme_program_works_and_hits_the_cache_the_second_time(repo_dir: Path) -> None:
    code = program((repo_dir / "README.md").read_text())
    with LocalDaemon() as daemon:
        assert run(code, daemon.target) == "0 tokens cached, 63 blocks\n"
        assert run(code, daemon.target) == "992 tokens cached, 63 blocks\n"
