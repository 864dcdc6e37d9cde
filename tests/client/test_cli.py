"""The command line without a daemon: help, exit codes, messages, tables, speed."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvhold_client.cli import main
from kvhold_client.cli.console import Console, table_lines
from kvhold_client.cli.main import COMMANDS
from kvhold_client.cli.units import format_bytes, format_seconds, parse_bytes


def run(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    cleaned = {key: value for key, value in os.environ.items() if not key.startswith("KVHOLD_")}
    return subprocess.run(
        [sys.executable, "-m", "kvhold_client", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**cleaned, "PYTHONPATH": os.pathsep.join(sys.path), **env},
    )


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"], {}) == 0
    shown = capsys.readouterr()
    assert all(f"  {name} " in shown.out for name in COMMANDS)
    assert not shown.err


@pytest.mark.parametrize("args", [("nonsense",), ("pools", "--nonsense"), ("plan",), ("pools", "-o", "xml")])
def test_wrong_usage_ends_with_2_and_says_why_on_stderr(args: "tuple[str, ...]") -> None:
    done = run(*args)
    assert done.returncode == 2
    assert done.stderr
    assert not done.stdout


@pytest.mark.parametrize("command", ["status", "pools", "sessions", "top"])
def test_an_unreachable_daemon_ends_with_3(command: str, tmp_path: Path) -> None:
    done = run(command, "--target", str(tmp_path / "no.sock"), "--timeout", "2")
    assert done.returncode == 3
    assert "cannot be reached" in done.stderr and "kvhold doctor" in done.stderr
    assert not done.stdout


def test_the_environment_names_the_target_and_a_flag_overrides_it(tmp_path: Path) -> None:
    done = run("pools", "--timeout", "2", KVHOLD_TARGET=str(tmp_path / "env.sock"))
    assert "env.sock" in done.stderr
    done = run("pools", "--timeout", "2", "--target", str(tmp_path / "flag.sock"), KVHOLD_TARGET=str(tmp_path / "env"))
    assert "flag.sock" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("pools --timeout 0", "above 0"),
        ("top --interval -1", "above 0"),
        ("plan --model llama-3.1-8b --tp 0", "8 heads"),
        ("plan --model llama-3.1-8b --tp 3", "8 heads"),
        ("plan --model llama-3.1-8b --dtype fp8", "--dtype goes with --hf-config"),
        ("plan --model llama-3.1-8b --pp 2", "--pp goes with --hf-config"),
        ("plan --model llama-3.1-8b --state-cache all", "--state-cache goes with --hf-config"),
        ("plan x.json --memory 1GiB", "--memory goes with --model or --hf-config"),
        ("plan x.json --tp 2", "--tp goes with --model or --hf-config"),
        ("plan x.json --block-size 32", "--block-size goes with --model or --hf-config"),
        ("plan x.json --auto-fit", "--auto-fit goes with --model or --hf-config"),
        ("plan x.json --dtype fp8", "--dtype goes with --model or --hf-config"),
        ("replay t.jsonl --layout foo", "invalid choice"),
        ("replay t.jsonl --backend foo", "invalid choice"),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused_before_anything_starts(
    args: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args.split(), {}) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "nobody"}'])
def test_a_models_file_that_cannot_be_used_is_named_once(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    for path in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", "--hf-config", str(path)], {}) == 2
        assert capsys.readouterr().err.count(str(tmp_path)) == 1


def test_a_models_directory_without_a_config_is_told_which_file_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--hf-config", str(tmp_path)], {}) == 2
    assert f"{tmp_path / 'config.json'}: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["config", "--help"], ["config", "show", "--help"]])
def test_config_explains_itself(args: "list[str]", capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args, {}) == 0
    assert "usage: kvhold config show" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"), [("KVHOLD_OUTPUT", "xml"), ("KVHOLD_TIMEOUT_S", "soon"), ("KVHOLD_TIMEOUT_S", "-1")]
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    done = run("pools", **{name: value})
    assert done.returncode == 2
    assert name in done.stderr


def test_the_daemons_own_variable_names_the_target_too(tmp_path: Path) -> None:
    done = run("pools", "--timeout", "2", KVHOLD_SOCKET=str(tmp_path / "daemon.sock"))
    assert "daemon.sock" in done.stderr


def test_version_needs_no_daemon(tmp_path: Path) -> None:
    done = run("version", "-o", "json", XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 0
    assert json.loads(done.stdout)["daemon"]["version"] is None


def test_help_and_version_start_without_grpc() -> None:
    """The budget is 150 ms; what costs that is what gets imported, and that can be counted."""
    code = (
        "import sys; from kvhold_client.cli import main; main([{!r}], {{}}); "
        "sys.exit(any(m in sys.modules for m in ('grpc', 'numpy', 'google.protobuf', 'rich')))"
    )
    for command in ("--help", "--version"):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code.format(command)], env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("content", "said"), [("{", "not a PlanRequest"), ('{"colour": 1}', "colour"), ('{"ranks": 3}', "ranks")]
)
def test_a_plan_file_that_is_none_is_a_usage_error(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "request.json"
    path.write_text(content)
    done = run("plan", str(path))
    assert done.returncode == 2
    assert str(path) in done.stderr
    assert said in done.stderr


def test_a_missing_plan_file_is_a_usage_error(tmp_path: Path) -> None:
    done = run("plan", str(tmp_path / "no.json"))
    assert done.returncode == 2
    assert "No such file" in done.stderr


def test_a_broken_trace_is_found_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}\nbroken\n')
    done = run("replay", str(path))
    assert done.returncode == 2
    assert f"{path}:2: not JSON" in done.stderr
    assert "daemon started" not in done.stderr


def test_tables_align_numbers_to_the_right() -> None:
    assert table_lines(("pool", "blocks"), [("a", "1,024"), ("bcd", 7)]) == [
        "POOL  BLOCKS",
        "a      1,024",
        "bcd        7",
    ]


def test_colour_needs_a_terminal_and_respects_no_color() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert Console.for_streams(Terminal(), io.StringIO(), {}).color
    assert not Console.for_streams(Terminal(), io.StringIO(), {"NO_COLOR": "1"}).color
    assert not Console.for_streams(io.StringIO(), io.StringIO(), {}).color


@pytest.mark.parametrize(
    ("text", "size"), [("40GiB", 40 << 30), ("40G", 40 << 30), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), ("77", 77)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_sizes_and_times_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 40 << 30)] == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "40 GiB"]
    assert [format_seconds(s) for s in (2e-5, 0.0123, 4.2, 200, 7500)] == [
        "20 µs",
        "12.3 ms",
        "4.2 s",
        "3 min 20 s",
        "2 h 5 min",
    ]
