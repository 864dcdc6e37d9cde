"""Traces: which request of which engine a log line, a slow bucket, or a span belongs to. Off, it is not there at all.

    off    no interceptor
    log    the caller's trace id (W3C traceparent) goes into JSON log lines and exemplars
    otel   the same, and a span per call through the OpenTelemetry API; exporters come from the OTEL_* environment

Only unary calls get spans: a stream lives as long as its engine, and a span of hours helps nobody. The steps of a
StepStream belong to the trace that the stream was opened in, as far as log lines and exemplars go.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter, time
from typing import Any

import grpc

from kvhold_server.config import ConfigError
from kvhold_server.logs import CURRENT_TRACE_ID
from kvhold_server.node.telemetry import Telemetry
from kvhold_server.rpc.interceptors import OUR_PACKAGE, Context, Handler

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
NO_TRACE = "0" * 32

Span = Callable[[str, dict[str, str]], AbstractContextManager[str]]  # (method, metadata) → its trace id, or ""


@contextmanager
def caller_trace(method: str, metadata: dict[str, str]) -> Iterator[str]:
    """The trace that the caller says it is in."""
    yield trace_id_of(metadata)


def trace_id_of(metadata: dict[str, str]) -> str:
    """32 hexadecimal digits, or "" if there is none that is valid."""
    found = TRACEPARENT.fullmatch(metadata.get("traceparent", ""))
    return found[1] if found and found[1] != NO_TRACE else ""


def otel_span() -> Span:
    """Spans through OpenTelemetry. Raises ConfigError if it is not installed."""
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        rule = "needs opentelemetry-sdk: pip install 'kvhold[otel]'"
        raise ConfigError("--tracing", "tracing", "otel", rule) from None
    tracer = trace.get_tracer("kvhold")

    @contextmanager
    def span(method: str, metadata: dict[str, str]) -> Iterator[str]:
        service, _, name = method.partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": f"kvhold.v1.{service}", "rpc.method": name}
        parent = propagate.extract(metadata)
        kind = trace.SpanKind.SERVER
        with tracer.start_as_current_span(method, context=parent, kind=kind, attributes=attributes) as current:
            yield trace.format_trace_id(current.get_span_context().trace_id)

    return span


SPANS: dict[str, Callable[[], Span]] = {"log": lambda: caller_trace, "otel": otel_span}


class Tracing(grpc.aio.ServerInterceptor):
    """Goes before the guard, so that what the guard logs is inside the trace."""

    def __init__(self, telemetry: Telemetry, span: Span) -> None:
        self._telemetry = telemetry
        self._span = span
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        path = handler_call_details.method
        known = self._wrapped.get(path)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or not path.startswith(OUR_PACKAGE):
            return handler
        wrapped = self._wrap(path.removeprefix(OUR_PACKAGE), handler)
        self._wrapped[path] = wrapped
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        codec = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._traced(method, handler.unary_unary), *codec)
        if inspect.iscoroutinefunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(_in_trace(handler.stream_stream), *codec)
        return handler

    def _traced(
        self, method: str, handle: Callable[[Any, Context], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        stats = self._telemetry.method(method)

        async def behaviour(request: Any, context: Context) -> Any:
            metadata = _texts(context)
            begun = perf_counter()
            with self._span(method, metadata) as trace_id:
                token = CURRENT_TRACE_ID.set(trace_id)
                try:
                    return await handle(request, context)
                finally:
                    CURRENT_TRACE_ID.reset(token)
                    if trace_id:
                        stats.exemplify(perf_counter() - begun, trace_id, time())

        return behaviour


def _in_trace(handle: Callable[[Any, Context], Awaitable[None]]) -> Callable[[Any, Context], Awaitable[None]]:
    """A stream of calls, in the trace of the stream's own metadata."""

    async def behaviour(requests: Any, context: Context) -> None:
        CURRENT_TRACE_ID.set(trace_id_of(_texts(context)))  # of this stream's task, and ends with it
        await handle(requests, context)

    return behaviour


def _texts(context: Context) -> dict[str, str]:
    """The caller's metadata, but for binary values."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
