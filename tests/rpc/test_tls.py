"""The TCP listener: mutual TLS or loopback, a certificate's name is the tenant, AdminService stays on its socket."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from kvhold.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    plan_pb2,
    plan_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from kvhold_client.channels import tls_credentials
from kvhold_client.client import Client
from kvhold_server.app import Daemon
from kvhold_server.config import ConfigError, load_config
from kvhold_server.rpc.tls import check_exposure, is_loopback, tenant_of
from tests.deploy.load import plan_request


def openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True, timeout=30)


def authority(directory: Path, name: str) -> None:
    """NAME.key and NAME.crt: a CA of its own."""
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}", cwd=directory)  # fmt: skip


def certificate(directory: Path, name: str, ca: str = "ca") -> None:
    """NAME.key and NAME.crt, signed by the CA, for 127.0.0.1."""
    (directory / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key",
            "-out", f"{name}.csr", "-subj", f"/CN={name}", cwd=directory)  # fmt: skip
    openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.crt", "-CAkey", f"{ca}.key", "-CAcreateserial",
            "-days", "2", "-out", f"{name}.crt", "-extfile", f"{name}.ext", cwd=directory)  # fmt: skip


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    authority(directory, "ca")
    authority(directory, "stranger-ca")
    for name in ("server", "team-a", "team-b"):
        certificate(directory, name)
    certificate(directory, "stranger", "stranger-ca")
    return directory


@pytest.fixture
async def daemon(pki: Path, tmp_path: Path) -> AsyncIterator[Daemon]:
    flags = ["--socket", f"{tmp_path}/k.sock", "--admin-socket", f"{tmp_path}/admin.sock", "--tcp", "127.0.0.1:0"]
    flags += ["--tls-cert", str(pki / "server.crt"), "--tls-key", str(pki / "server.key")]
    flags += ["--tls-client-ca", str(pki / "ca.crt"), "--state-dir", str(tmp_path), "--backend", "fake"]
    running = Daemon(load_config(flags, {}))
    await running.start()
    yield running
    await running.close()


def channel(pki: Path, daemon: Daemon, name: str | None) -> grpc.aio.Channel:
    """A connection with a client certificate, or without one."""
    key, chain = ((pki / f"{name}.{end}").read_bytes() for end in ("key", "crt")) if name else (None, None)
    credentials = grpc.ssl_channel_credentials((pki / "ca.crt").read_bytes(), key, chain)
    return grpc.aio.secure_channel(f"127.0.0.1:{daemon.tcp_port}", credentials)


async def capabilities(connection: grpc.aio.Channel) -> str:
    stub = plan_pb2_grpc.PlanServiceStub(connection)
    reply = await stub.GetCapabilities(plan_pb2.GetCapabilitiesRequest(), timeout=5)
    return str(reply.boot_id)


async def test_a_certificate_of_our_ca_is_let_in(pki: Path, daemon: Daemon) -> None:
    async with channel(pki, daemon, "team-a") as connection:
        assert await capabilities(connection) == daemon.node.boot_id


@pytest.mark.parametrize("name", [None, "stranger"], ids=["no certificate", "another CA's"])
async def test_everybody_else_is_not(pki: Path, daemon: Daemon, name: str | None) -> None:
    async with channel(pki, daemon, name) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await capabilities(connection)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_plaintext_gets_no_answer(daemon: Daemon) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{daemon.tcp_port}") as connection:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await capabilities(connection)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def open_session(connection: grpc.aio.Channel, tenant: str) -> None:
    pools = pool_pb2_grpc.PoolServiceStub(connection)
    options = pool_pb2.PoolOptions(backend=pool_pb2.MEMORY_BACKEND_FAKE, enable_prefix_caching=True)
    await pools.OpenPool(pool_pb2.OpenPoolRequest(name="p", plan=plan_request(600), options=options), timeout=10)
    sessions = session_pb2_grpc.SessionServiceStub(connection)
    await sessions.OpenSession(session_pb2.OpenSessionRequest(pool="p", tenant=tenant), timeout=5)


async def test_the_certificate_names_the_tenant(pki: Path, daemon: Daemon) -> None:
    async with channel(pki, daemon, "team-a") as connection:
        await open_session(connection, tenant="")
    assert [session.request.tenant for session in daemon.node.sessions.sessions()] == ["team-a"]


async def test_another_tenants_name_is_refused(pki: Path, daemon: Daemon) -> None:
    async with channel(pki, daemon, "team-a") as connection:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await open_session(connection, tenant="team-b")
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "certificate is for 'team-a'" in (refused.value.details() or "")
    assert not daemon.node.sessions.sessions()


async def test_admin_service_is_on_its_own_socket_only(pki: Path, daemon: Daemon, tmp_path: Path) -> None:
    request = admin_pb2.ResetPrefixCacheRequest(pool="nobody's")
    for target in ("tcp", f"unix:{tmp_path}/k.sock"):
        connection = channel(pki, daemon, "team-a") if target == "tcp" else grpc.aio.insecure_channel(target)
        async with connection:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin_pb2_grpc.AdminServiceStub(connection).ResetPrefixCache(request, timeout=5)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/admin.sock") as connection:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin_pb2_grpc.AdminServiceStub(connection).ResetPrefixCache(request, timeout=5)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_rotated_certificates_count_without_a_restart(pki: Path, tmp_path: Path) -> None:
    for name in ("server.crt", "server.key", "ca.crt"):
        (tmp_path / name).write_bytes((pki / name).read_bytes())
    flags = ["--tcp", "127.0.0.1:0", "--tls-cert", f"{tmp_path}/server.crt", "--tls-key", f"{tmp_path}/server.key"]
    flags += ["--tls-client-ca", f"{tmp_path}/ca.crt", "--backend", "fake", "--state-dir", str(tmp_path)]
    running = Daemon(load_config(flags, {}))
    await running.start()
    try:
        both = (pki / "ca.crt").read_bytes() + (pki / "stranger-ca.crt").read_bytes()
        async with channel(pki, running, "stranger") as connection:
            with pytest.raises(grpc.aio.AioRpcError):
                await capabilities(connection)
        (tmp_path / "ca.crt").write_bytes(both)
        await asyncio.sleep(0.1)
        async with channel(pki, running, "stranger") as connection:
            assert await capabilities(connection) == running.node.boot_id
    finally:
        await running.close()


TLS = ["--tls-cert", "/c", "--tls-key", "/k", "--tls-client-ca", "/a"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tcp", "0.0.0.0:7400"], "tls_cert"),
        (["--tcp", "10.1.2.3:7400", "--admin-socket", "/run/a.sock"], "--insecure"),
        (["--tcp", "[::]:7400", *TLS], "admin_socket"),
        (["--tcp", "node.example:7400"], "beyond loopback"),
        (["--tcp", "10.1.2.3:7400", "--tls-cert", "/c"], "go together"),
    ],
)
def test_a_network_is_refused_what_only_a_file_mode_would_protect(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_exposure(load_config(flags, {}))


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--tcp", "127.0.0.1:7400"],
        ["--tcp", "[::1]:7400"],
        ["--tcp", "localhost:7400"],
        ["--tcp", "0.0.0.0:7400", "--admin-socket", "/run/a.sock", *TLS],
        ["--tcp", "0.0.0.0:7400", "--admin-socket", "/run/a.sock", "--insecure"],
    ],
    ids=" ".join,
)
def test_what_is_safe_or_said_aloud_is_allowed(flags: list[str]) -> None:
    check_exposure(load_config(flags, {}))


def test_loopback_is_an_address_and_no_name_that_looks_like_one() -> None:
    assert is_loopback("127.9.9.9") and is_loopback("::1")
    assert not is_loopback("127.0.0.1.example.com") and not is_loopback("0.0.0.0")


def test_without_a_certificate_the_request_names_the_tenant() -> None:
    plain = SimpleNamespace(auth_context=dict)
    assert tenant_of(plain, "team-x", "default") == "team-x"
    assert tenant_of(plain, "", "default") == "default"


@pytest.fixture
def our_certificate(pki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOLD_CA", str(pki / "ca.crt"))
    monkeypatch.setenv("KVHOLD_CLIENT_CERT", str(pki / "team-b.crt"))
    monkeypatch.setenv("KVHOLD_CLIENT_KEY", str(pki / "team-b.key"))


@pytest.mark.usefixtures("our_certificate")
async def test_the_client_library_shows_its_certificate(daemon: Daemon) -> None:
    def work() -> str:
        with Client(f"127.0.0.1:{daemon.tcp_port}", timeout_s=5) as client:
            return client.capabilities().boot_id

    assert await asyncio.to_thread(work) == daemon.node.boot_id


def test_half_a_client_configuration_is_named() -> None:
    with pytest.raises(ValueError, match="KVHOLD_CLIENT_KEY is not set"):
        tls_credentials("10.0.0.1:7400", {"KVHOLD_CA": "/a", "KVHOLD_CLIENT_CERT": "/c"})
    assert tls_credentials("unix:/x", {"KVHOLD_CA": "/a"}) is None
