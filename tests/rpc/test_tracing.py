"""Traces: off they are not there, on they reach log lines, spans and exemplars."""

import json
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvhold.v1 import block_pb2, block_pb2_grpc, plan_pb2, plan_pb2_grpc, pool_pb2, pool_pb2_grpc
from kvhold_server.app import Daemon
from kvhold_server.config import load_config
from kvhold_server.logs import CURRENT_TRACE_ID, JsonFormatter
from kvhold_server.rpc.tracing import trace_id_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
async def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Daemon]:
    flags = ["--socket", f"{tmp_path}/k.sock", "--state-dir", str(tmp_path), "--backend", "fake"]
    running = Daemon(load_config([*flags, "--tracing", getattr(request, "param", "log")], {}))
    await running.start()
    yield running
    await running.close()


async def ask(daemon: Daemon, traceparent: str = TRACEPARENT) -> None:
    async with grpc.aio.insecure_channel(f"unix:{daemon.config.socket}") as channel:
        stub = plan_pb2_grpc.PlanServiceStub(channel)
        await stub.GetCapabilities(
            plan_pb2.GetCapabilitiesRequest(), timeout=5, metadata=(("traceparent", traceparent),)
        )


async def test_the_steps_of_a_stream_are_in_the_trace_that_it_was_opened_in(daemon: Daemon) -> None:
    async with grpc.aio.insecure_channel(f"unix:{daemon.config.socket}") as channel:
        blocks = block_pb2_grpc.BlockServiceStub(channel)
        for metadata in ((("traceparent", TRACEPARENT),), ()):
            stream: Any = blocks.StepStream(metadata=metadata)
            await stream.write(block_pb2.StepRequest(session_id="nobody", epoch=1, step=1))
            assert (await stream.read()).HasField("refusal")
            stream.cancel()
    steps = daemon.node.telemetry.method("BlockService/Step")
    assert [exemplar.trace_id for exemplar in steps.exemplars.values()] == [TRACE], "and of the first stream alone"
    assert steps.codes["NOT_FOUND"] == 2


async def test_a_call_leaves_its_trace_in_the_duration_bucket(daemon: Daemon) -> None:
    await ask(daemon)
    exemplars = daemon.node.telemetry.method("PlanService/GetCapabilities").exemplars
    assert [exemplar.trace_id for exemplar in exemplars.values()] == [TRACE]


@pytest.mark.parametrize("daemon", ["off"], indirect=True)
async def test_off_means_no_interceptor_and_no_exemplar(daemon: Daemon) -> None:
    await ask(daemon)
    assert len(daemon._interceptors()) == 1
    assert not daemon.node.telemetry.method("PlanService/GetCapabilities").exemplars


async def test_a_log_line_in_a_call_names_its_trace(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        logging.getLogger("kvhold.test").warning("inside")
        raise RuntimeError("bug")

    monkeypatch.setattr(daemon.node, "pool", broken)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(JsonFormatter().format(record))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        async with grpc.aio.insecure_channel(f"unix:{daemon.config.socket}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                stub = pool_pb2_grpc.PoolServiceStub(channel)
                await stub.GetPool(
                    pool_pb2.GetPoolRequest(name="p"), timeout=5, metadata=(("traceparent", TRACEPARENT),)
                )
    finally:
        logging.getLogger().removeHandler(handler)
    assert refused.value.code() == grpc.StatusCode.INTERNAL
    traced = [json.loads(line) for line in lines if "trace_id" in line]
    assert {line["trace_id"] for line in traced} == {TRACE}
    assert any("failed unexpectedly" in line["message"] and "RuntimeError" in line["exception"] for line in traced)
    assert CURRENT_TRACE_ID.get() == "", "nothing leaks out of the call"


@pytest.mark.parametrize(
    "text", ["", "garbage", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", TRACEPARENT.upper(), TRACEPARENT + "-x"]
)
def test_what_is_no_trace_is_none(text: str) -> None:
    assert trace_id_of({"traceparent": text}) == ""


@pytest.mark.parametrize("daemon", ["otel"], indirect=True)
async def test_a_call_is_a_span_in_the_callers_trace(daemon: Daemon) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    await ask(daemon)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["PlanService/GetCapabilities"]
    assert f"{spans[0].context.trace_id:032x}" == TRACE
    assert spans[0].attributes["rpc.service"] == "kvhold.v1.PlanService"
    assert spans[0].parent.span_id == 0x00F067AA0BA902B7


async def test_otel_without_its_package_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    flags = ["--socket", f"{tmp_path}/k.sock", "--state-dir", str(tmp_path), "--backend", "fake", "--tracing", "otel"]
    with pytest.raises(Exception, match="pip install"):
        await Daemon(load_config(flags, {})).start()
