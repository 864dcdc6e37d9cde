"""Bad input through a real daemon: a typed error that names field and bound, and nothing changed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvhold.v1 import block_pb2
from kvhold_client.client import Client
from kvhold_client.errors import (
    Exhausted,
    InvalidRequest,
    KvholdError,
    PoolNotFound,
    SessionFenced,
    StepOutOfOrder,
    TooManyItems,
)
from kvhold_client.local_daemon import LocalDaemon, daemon_environment
from kvhold_client.pools import PoolRequest
from kvhold_client.session import Session
from tests.e2e.conftest import tiny_plan


@pytest.fixture
def session(client: Client, open_pool: Callable[..., str]) -> "Session":
    opened = client.get_pool(open_pool("refusals", 64)).open_session()
    opened.begin_step()
    return opened


def counts_of(client: Client) -> object:
    return client.get_pool("refusals").status().counts


def test_an_unknown_pool(client: Client) -> None:
    with pytest.raises(PoolNotFound) as caught:
        client.get_pool("nobody-opened-this")
    assert "nobody-opened-this" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: setattr(r.config, "max_model_len_tokens", 0), "max_model_len_tokens"),
        (lambda r: setattr(r.config, "max_num_batched_tokens", -5), "max_num_batched_tokens"),
        (lambda r: setattr(r.config, "num_blocks_override", 2**40), "num_blocks_override"),
        (lambda r: setattr(r.layer_specs[0], "block_size_tokens", -1), "block_size_tokens"),
        (lambda r: setattr(r.layer_specs[0].geometry, "num_kv_heads", 0), "num_kv_heads"),
        (lambda r: r.layer_specs[0].ClearField("full_attention"), "kind"),
    ],
)
def test_a_plan_with_a_field_out_of_range(client: Client, change: Callable[[object], None], said: str) -> None:
    request = tiny_plan(64)
    change(request)
    with pytest.raises(KvholdError) as caught:
        client.open_pool(PoolRequest(name="never", plan=request))
    assert said in str(caught.value) + str(caught.value.metadata)
    assert "never" not in [pool.name for pool in client.list_pools()]


def test_more_memory_than_there_is(client: Client) -> None:
    request = tiny_plan(2**31 - 1)
    request.ranks[0].available_memory_bytes = 2**50
    with pytest.raises(Exhausted) as caught:
        client.open_pool(PoolRequest(name="never", plan=request))
    assert caught.value.metadata, "it says how much is free"
    assert "never" not in [pool.name for pool in client.list_pools()]


def test_hashes_of_the_wrong_length(client: Client, session: Session) -> None:
    before = counts_of(client)
    request = block_pb2.StepRequest()
    request.admit.sequence_ids.append(1)
    request.admit.num_tokens.append(40)
    request.admit.num_hashes.append(2)
    request.admit.hashes = b"x" * 63
    with pytest.raises(InvalidRequest) as caught:
        session.step(request)
    assert caught.value.metadata["field"] == "admit.hashes"
    assert "32" in caught.value.metadata["constraint"]
    assert counts_of(client) == before


def test_more_items_than_the_bound(client: Client, session: Session) -> None:
    before = counts_of(client)
    bounds = {bound.name: bound.max_value for bound in client.capabilities().bounds}
    builder = session.builder()
    for sequence_id in range(bounds["StepRequest.items"] + 1):
        builder.free(sequence_id)
    with pytest.raises(TooManyItems) as caught:
        session.step(builder.encode())
    assert caught.value.metadata["max_items"] == str(bounds["StepRequest.items"])
    assert counts_of(client) == before


def test_steps_that_go_backwards(session: Session) -> None:
    session.step(session.builder().encode())
    session.begin_step()
    session.step(session.builder().encode())
    session._core.step, session._core.part = 1, 4
    with pytest.raises(StepOutOfOrder):
        session.step(session.builder().encode())


def test_a_stale_epoch_is_fenced_and_changes_nothing(client: Client, session: Session) -> None:
    """ENGINE R6: a scheduler that somebody replaced must notice at its next step."""
    before = counts_of(client)
    thief = client.get_pool("refusals").open_session()
    # Somebody resumes our session with our token, as a restarted engine would.
    thief._core.credentials = session._core.credentials
    thief._resume(session._core.current)
    builder = session.builder()
    builder.admit(5, num_tokens=8)
    with pytest.raises(SessionFenced):
        session.step(builder.encode())
    assert counts_of(client) == before
    thief.close()


def test_a_second_daemon_on_the_same_socket_says_who_has_it(daemon: LocalDaemon) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvhold_server", "serve", "--socket", str(daemon.socket_path)],
        capture_output=True,
        text=True,
        timeout=30,
        env=daemon_environment(),
    )
    assert done.returncode != 0
    assert str(daemon.socket_path) in done.stderr + done.stdout
    with Client(daemon.target) as client:
        assert client.capabilities().boot_id


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--state-dir", "/proc/no/such"], 1, "STATE_DIRECTORY_UNUSABLE: state_dir /proc/no/such"),
        (["--socket-gid", "99999999999"], 1, "there is no group 99999999999"),
        (["--metrics", "nowhere"], 2, "host:port"),
        (["--tcp", "0.0.0.0:0"], 2, "--insecure"),
    ],
)
def test_a_daemon_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, flags: list[str], code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvhold_server", "serve", "--socket", str(tmp_path / "k.sock"), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=daemon_environment(),
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
    assert said in done.stderr
    assert not list(tmp_path.glob("k.sock*"))
