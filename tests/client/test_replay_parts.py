"""Traces, counters, stamps, metrics pages: the parts of a replay that need no daemon."""

import dataclasses
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvhold_client.cli.console import Console
from kvhold_client.client import Client
from kvhold_client.errors import Unreachable
from kvhold_client.layout import Placement
from kvhold_client.mapping import RankLayout
from kvhold_client.replay import counters as shared
from kvhold_client.replay import worker
from kvhold_client.replay.metrics_page import MetricsPage
from kvhold_client.replay.runner import Replay, ReplayPlan, RestartReport
from kvhold_client.replay.scheduler import SchedulerLimits
from kvhold_client.replay.summary import Summary, print_summary
from kvhold_client.replay.trace import TraceError, TraceRow, UnitDigests, read_trace
from kvhold_client.replay.worker import EXIT_UNREACHABLE, Job, main, once_there

GOOD = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (json.dumps({**GOOD, "input_length": 0}), "input_length: 0 must be a whole number 1..2147483647"),
        (json.dumps({**GOOD, "input_length": "7"}), "input_length: '7'"),
        (json.dumps({**GOOD, "output_length": 2**31}), "output_length"),
        (json.dumps({**GOOD, "hash_ids": [1]}), "hash_ids: 1 ids, but 700 tokens have 2 units"),
        (json.dumps({**GOOD, "hash_ids": [1, -2]}), "hash_ids: must be a list of numbers"),
        (json.dumps({**GOOD, "timestamp": "now"}), "timestamp"),
        ('{"timestamp": 0}', "input_length: None"),
    ],
)
def test_a_broken_line_is_named_with_its_number(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path / "t.jsonl", json.dumps(GOOD), "", line)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert f"{path}:3: " in str(caught.value)
    assert said in str(caught.value)


def test_lines_behind_the_limit_are_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", json.dumps(GOOD), "{")
    assert len(list(read_trace(path, limit=1))) == 1


def test_our_own_trace_is_whole(repo_dir: Path) -> None:
    rows = list(read_trace(repo_dir / "client/kvhold_client/replay/demo_trace.jsonl"))
    assert len(rows) > 150
    assert sum(row.hash_ids[0] == 0 for row in rows) == len(rows), "all share the system prompt"


def row(input_length: int, *hash_ids: int) -> TraceRow:
    return TraceRow(timestamp_ms=0, input_length=input_length, output_length=1, hash_ids=hash_ids)


def test_equal_units_give_equal_digests_and_only_whole_blocks_have_one() -> None:
    digests = UnitDigests(16, 32)
    a, b = digests.of_prompt(row(700, 0, 7)), digests.of_prompt(row(1024, 0, 8))
    assert len(a) == 700 // 16 * 32
    assert a[: 32 * 32] == b[: 32 * 32]
    assert a[32 * 32 : 33 * 32] != b[32 * 32 : 33 * 32]


def test_digests_survive_being_forgotten() -> None:
    small = UnitDigests(16, 32, max_units=1)
    first = small.of_prompt(row(1024, 1, 2))
    assert small.of_prompt(row(1024, 1, 2)) == first


def test_units_that_do_not_divide_the_traces_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        UnitDigests(24, 32)


def test_percentiles_come_out_of_the_histogram_within_its_resolution(tmp_path: Path) -> None:
    found = shared.SharedCounters(tmp_path / "c", num_slots=2, num_rows=3)
    for us in range(1, 1001):
        found.observe(us % 2, us * 1000)
    histogram = found.histogram()
    assert shared.percentile_s(histogram, 50) == pytest.approx(500e-6, rel=0.05)
    assert shared.percentile_s(histogram, 99) == pytest.approx(990e-6, rel=0.05)
    assert found.total("rpcs") == 1000
    assert max(found.get(slot, "max_rpc_ns") for slot in (0, 1)) == 1_000_000
    found.close()


def test_counters_of_two_openers_are_the_same_memory(tmp_path: Path) -> None:
    one = shared.SharedCounters(tmp_path / "c", num_slots=2, num_rows=5)
    two = shared.SharedCounters(tmp_path / "c", num_slots=2, num_rows=5)
    one.add(1, "steps", 7)
    one.rows[4] = shared.DONE
    assert two.get(1, "steps") == 7
    assert two.get(0, "steps") == 0
    assert two.rows[4] == shared.DONE
    one.close()
    two.close()


def test_a_metrics_page_is_summed_by_labels() -> None:
    page = MetricsPage.parse(
        "# HELP x y\n"
        'x_total{pool="a",source="self"} 3.0\n'
        'x_total{pool="a",source="shared"} 4.0\n'
        'x_total{pool="b",source="self"} 100.0\n'
        "up 1\n"
    )
    assert page.total("x_total", pool="a") == 7
    assert page.total("x_total", pool="a", source="self") == 3
    assert page.total("up") == 1
    assert page.total("missing") == 0


class Bytes:
    """A region of plain memory with the one method that a stamper needs of a mapped one."""

    def __init__(self, layout: RankLayout, size: int) -> None:
        numpy = pytest.importorskip("numpy")
        self.layout = layout
        self.memory = numpy.zeros(size, dtype=numpy.uint8)

    def make_view(self, placement: Placement, view: object) -> object:
        from numpy.lib.stride_tricks import as_strided

        base = self.memory[view.offset_bytes :]  # type: ignore[attr-defined]
        return as_strided(base, shape=view.shape, strides=view.strides_bytes)  # type: ignore[attr-defined]


def stamper_over(groups: "tuple[tuple[str, ...], ...]") -> "tuple[object, Bytes]":
    from kvhold_client.replay.stamps import Stamper

    placement = Placement(
        layer_names=("l0", "l1", "l2"),
        offset_bytes=64,
        layer_stride_bytes=8 * 256,
        block_stride_bytes=256,
        page_size_bytes=256,
        num_blocks=8,
        num_heads=2,
        head_stride_bytes=128,
        num_states=2,
        state_stride_bytes=64,
        content_size_bytes=64,
    )
    memory = Bytes(RankLayout(placements=(placement,), groups=groups), 64 + 3 * 8 * 256)
    return Stamper(memory), memory  # type: ignore[arg-type]


def test_a_stamped_block_checks_and_every_single_changed_byte_of_it_shows() -> None:
    stamper, memory = stamper_over((("l0", "l1", "l2"),))
    digests = [bytes([i]) * 32 for i in (1, 2)]
    stamper.write(0, [3, 5], digests)  # type: ignore[attr-defined]
    assert stamper.wrong_blocks(0, [3, 5], digests) == []  # type: ignore[attr-defined]
    page = 64 + 2 * 2048 + 5 * 256  # layer l2, block 5
    for at in (0, 31, 224, 255):
        memory.memory[page + at] ^= 1
        assert stamper.wrong_blocks(0, [3, 5], digests) == [5]  # type: ignore[attr-defined]
        memory.memory[page + at] ^= 1


def test_a_block_of_another_content_or_group_does_not_check() -> None:
    stamper, _ = stamper_over((("l0", "l2"), ("l0", "l2")))
    stamper.write(0, [3], [b"a" * 32])  # type: ignore[attr-defined]
    assert stamper.wrong_blocks(0, [3], [b"b" * 32]) == [3]  # type: ignore[attr-defined]
    assert stamper.wrong_blocks(1, [3], [b"a" * 32]) == [3]  # type: ignore[attr-defined]
    assert stamper.wrong_blocks(0, [4], [b"a" * 32]) == [4]  # type: ignore[attr-defined]


def report_of(**changes: object) -> list[str]:
    """What people read of a run in which nothing happened but this."""
    values: dict[str, object] = {}
    for field in dataclasses.fields(Summary):
        kind = str(field.type)
        values[field.name] = () if kind.startswith("tuple") else None if "None" in kind else 1
    out = io.StringIO()
    print_summary(Console(out=out, err=io.StringIO()), Summary(**values | {"kill_was_asked": False, **changes}))  # type: ignore[arg-type]
    return out.getvalue().splitlines()


def test_the_report_says_what_became_of_sessions_and_pool_when_the_daemon_was_replaced() -> None:
    restarts = RestartReport(
        num_restarts=2, outcome="fresh", reason="REGION_MISSING", num_recovered_blocks=0, num_lost_sequences=3
    )
    lines = [" ".join(line.split()) for line in report_of(num_reconnects=4, restarts=restarts)]
    assert "reconnects 4, each by a resume of its session" in lines
    wanted = "daemon restarted 2 times; its pool came back FRESH with 0 blocks (REGION_MISSING); 3 sequences lost"
    assert any(line.startswith(wanted) for line in lines)
    assert any(line.startswith("/metrics not compared") for line in lines)


def test_the_report_is_silent_about_what_did_not_happen() -> None:
    assert not [line for line in report_of(num_reconnects=0) if "restarted" in line or "reconnects" in line]


def job_in(directory: Path) -> Path:
    job = Job(
        target=f"unix:{directory / 'gone.sock'}",
        pool="p",
        client_name="scheduler-0",
        trace=str(directory / "t.jsonl"),
        num_rows=1,
        first_row=0,
        stride=1,
        counters=str(directory / "counters"),
        slot=0,
        num_slots=1,
        limits=SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=512, max_model_len_tokens=512),
        stamp=False,
    )
    path = directory / "job.json"
    path.write_text(job.dump())
    return path


def test_a_scheduler_whose_daemon_stays_away_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "START_WAIT_S", 0.3)
    assert main(str(job_in(tmp_path))) == EXIT_UNREACHABLE
    said = capsys.readouterr().err
    assert "cannot be reached" in said and len(said.splitlines()) == 1


def test_a_scheduler_waits_for_a_daemon_that_is_being_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "START_PAUSE_S", 0.01)
    answers = [Unreachable("away"), Unreachable("still away"), None]

    def ask() -> str:
        error = answers.pop(0)
        if error is not None:
            raise error
        return "pool"

    assert once_there(ask) == "pool" and not answers


def test_a_replay_whose_scheduler_met_no_daemon_ends_as_unreachable(tmp_path: Path) -> None:
    """`kvhold replay` then exits with 3, like each command that finds no daemon."""
    plan = ReplayPlan(
        target="unix:/nowhere",
        pool="p",
        trace=tmp_path / "t.jsonl",
        num_rows=1,
        num_schedulers=1,
        limits=SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=512, max_model_len_tokens=512),
        stamp=False,
        directory=tmp_path,
    )
    with Client(plan.target) as client:
        replay = Replay(plan, client, lambda counters, seconds: None)
        program = f"import sys; sys.stderr.write('nobody there'); sys.exit({EXIT_UNREACHABLE})"
        with (tmp_path / "log").open("wb") as log:
            replay._processes[0] = subprocess.Popen([sys.executable, "-c", program], stderr=log)
        replay._logs[0] = tmp_path / "log"
        with pytest.raises(Unreachable, match="nobody there"):
            replay._watch(time.monotonic())
