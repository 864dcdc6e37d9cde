"""Flags over environment over file over defaults; what nobody knows is an error everywhere."""

from pathlib import Path

import pytest

from kvhold_server.config import ConfigError, ServerConfig, check_listeners, load_config, split_host_port


def test_each_source_overrides_the_one_below(tmp_path: Path) -> None:
    file = tmp_path / "kvhold.toml"
    file.write_text('lease_ttl_s = 1\ngrace_period_s = 1\nbackend = "fake"\n[limits]\nmax_pools = 3\n')
    environment = {"KVHOLD_GRACE_PERIOD_S": "2", "KVHOLD_BACKEND": "memfd", "KVHOLD_CONFIG": str(file), "HOME": "/"}
    config = load_config(["--backend", "posix_shm", "--insecure"], environment)
    assert (config.lease_ttl_s, config.grace_period_s, config.backend) == (1.0, 2.0, "posix_shm")
    assert config.limits.max_pools == 3 and config.insecure
    assert config.drain_deadline_s == ServerConfig().drain_deadline_s


@pytest.mark.parametrize(
    ("argv", "environment", "file", "words"),
    [
        ([], {"KVHOLD_LEASE_TTL": "1"}, "", ["KVHOLD_LEASE_TTL", "did you mean lease_ttl_s"]),
        ([], {}, "lease = 1", ["kvhold.toml", "no such setting"]),
        ([], {}, "lease_ttl_s = ", ["kvhold.toml", "not TOML"]),
        ([], {}, "limits = 1", ["must be a table"]),
        ([], {}, "socket = 7", ["socket", "must be a string"]),
        ([], {}, "fake_device_bytes = 1.5", ["must be a whole number"]),
        (["--limits-max-pools", "0"], {}, "", ["--limits-max-pools", "at least 1"]),
        (["--backend", "disk"], {}, "", ["must be one of"]),
        (["--lease-ttl-s", "nan"], {}, "", ["must be a number"]),
        ([], {"KVHOLD_INSECURE": "maybe"}, "", ["true or false"]),
        (["--config", "/nowhere/at/all"], {}, "", ["No such file"]),
        (["--socket", "/" + "x" * 101], {}, "", ["--socket", "at most 101 bytes"]),  # PATH.local is bound too
        ([], {"KVHOLD_ADMIN_SOCKET": "/" + "x" * 107}, "", ["KVHOLD_ADMIN_SOCKET", "at most 107 bytes"]),
    ],
)
def test_bad_settings_name_origin_key_and_rule(
    tmp_path: Path, argv: list[str], environment: dict[str, str], file: str, words: list[str]
) -> None:
    (tmp_path / "kvhold.toml").write_text(file)
    source = {"KVHOLD_CONFIG": str(tmp_path / "kvhold.toml")} if file else {}
    with pytest.raises(ConfigError) as caught:
        load_config(argv, environment | source)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_daemon_that_nobody_could_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match="--socket"):
        check_listeners(load_config([], {}))
    with pytest.raises(ConfigError, match="must differ from socket"):
        check_listeners(load_config(["--socket", "/run/k.sock", "--admin-socket", "/run/k.sock"], {}))
    check_listeners(load_config(["--tcp", "127.0.0.1:0"], {}))
    check_listeners(load_config(["--socket", "/" + "x" * 100], {}))


@pytest.mark.parametrize("argv", [["--no-such-flag"], ["--lease-ttl", "1"]])
def test_unknown_and_abbreviated_flags_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(argv, {})


@pytest.mark.parametrize(
    ("text", "expected"), [("127.0.0.1:9400", ("127.0.0.1", 9400)), ("[::1]:0", ("::1", 0)), (":80", ("127.0.0.1", 80))]
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert split_host_port("--tcp", "tcp", text) == expected


@pytest.mark.parametrize("text", ["", "host", "host:port", "host:70000"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        split_host_port("--tcp", "tcp", text)
