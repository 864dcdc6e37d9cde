"""The one interceptor: decoding with a bound, typed errors to status, counters and durations, for every arm of rpc.

    bytes ──▶ bound ──▶ decode ──▶ handler ──▶ reply
                │          │          ├─ KvholdError ──▶ status.to_wire ──▶ abort
                │          │          └─ anything else ─▶ logged once, INTERNAL / UNEXPECTED_FAULT
                └──────────┴─ MESSAGE_TOO_LARGE, MALFORMED_MESSAGE

Decoding happens here and not in the transport, so that junk and oversize requests get typed errors, too. Handlers are
wrapped once and kept: a call pays no closure. Services of others (health, reflection) pass through untouched.

A stream's handler that is a coroutine, and no generator, reads and writes by itself and is handed bytes: its requests
are calls of their own (`framed_calls.py`), and one that is refused must not end the stream.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from kvhold_server.domain.errors import InternalFault, InvalidRequest, KvholdError
from kvhold_server.node.telemetry import MethodStats, Telemetry
from kvhold_server.rpc.status import to_wire

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = Any  # grpc.RpcMethodHandler is typed for the blocking arms only
Decode = Callable[[bytes], Any]
OUR_PACKAGE = "/kvhold.v1."


@dataclass(eq=False)
class MessageTooLarge(InvalidRequest):
    """The request is larger than the daemon reads."""

    template = "message: {size_bytes} bytes are not allowed: at most {max_message_bytes}; split the request"
    size_bytes: int
    max_message_bytes: int


@dataclass(eq=False)
class MalformedMessage(InvalidRequest):
    """The bytes are not the method's request message."""

    template = "message: not a {message}: {problem}"
    message: str
    problem: str


@dataclass(eq=False)
class UnexpectedFault(InternalFault):
    """A bug of the daemon. The log has the traceback; the wire gets the exception's type only."""

    template = "{method} failed unexpectedly with {exception}; the daemon's log says more"
    method: str
    exception: str


class Guard(grpc.aio.ServerInterceptor):
    """See the module."""

    def __init__(self, telemetry: Telemetry, max_message_bytes: int) -> None:
        self._telemetry = telemetry
        self._max_message_bytes = max_message_bytes
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

    def _wrap(self, name: str, handler: Handler) -> Handler:
        call = _Call(name, self._telemetry, bounded(handler.request_deserializer, self._max_message_bytes))
        encode = handler.response_serializer
        if inspect.iscoroutinefunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(call.conversation(handler.stream_stream))
        if handler.request_streaming:
            behaviour = call.streams(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(behaviour, None, encode)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(call.stream(handler.unary_stream), None, encode)
        return grpc.unary_unary_rpc_method_handler(call.unary(handler.unary_unary), None, encode)


class _Call:
    """Wraps one method's handler."""

    def __init__(self, name: str, telemetry: Telemetry, decode: Decode) -> None:
        self._name = name
        self._telemetry = telemetry
        self._stats: MethodStats = telemetry.method(name)
        self._decode = decode

    def unary(self, handle: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[bytes, Context], Awaitable[Any]]:
        stats, decode = self._stats, self._decode

        async def behaviour(data: bytes, context: Context) -> Any:
            begun = perf_counter()
            stats.in_flight += 1
            try:
                reply = await handle(decode(data), context)
            except Exception as error:
                await self._fail(context, error, begun)
            finally:
                stats.in_flight -= 1
            stats.finished("OK", perf_counter() - begun)
            return reply

        return behaviour

    def stream(
        self, handle: Callable[[Any, Context], AsyncIterator[Any]]
    ) -> Callable[[bytes, Context], AsyncIterator[Any]]:
        async def behaviour(data: bytes, context: Context) -> AsyncIterator[Any]:
            async for reply in self._counted(lambda: handle(self._decode(data), context), context):
                yield reply

        return behaviour

    def streams(
        self, handle: Callable[[AsyncIterator[Any], Context], AsyncIterator[Any]]
    ) -> Callable[[AsyncIterator[bytes], Context], AsyncIterator[Any]]:
        async def decoded(data: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for item in data:
                yield self._decode(item)

        async def behaviour(data: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async for reply in self._counted(lambda: handle(decoded(data), context), context):
                yield reply

        return behaviour

    def conversation(
        self, handle: Callable[[Any, Context], Awaitable[None]]
    ) -> Callable[[Any, Context], Awaitable[None]]:
        async def behaviour(requests: Any, context: Context) -> None:
            async with self._life(context):
                await handle(requests, context)

        return behaviour

    async def _counted(self, start: Callable[[], AsyncIterator[Any]], context: Context) -> AsyncIterator[Any]:
        async with self._life(context):
            async for reply in start():
                yield reply

    @asynccontextmanager
    async def _life(self, context: Context) -> AsyncIterator[None]:
        """A stream's life: counted once, when it ends. A caller that hangs up cancels us, which counts as CANCELLED."""
        begun = perf_counter()
        self._stats.in_flight += 1
        code = "CANCELLED"
        try:
            yield
            code = "OK"
        except Exception as error:
            code = ""
            await self._fail(context, error, begun)
        finally:
            self._stats.in_flight -= 1
            if code:
                self._stats.finished(code, perf_counter() - begun)

    async def _fail(self, context: Context, error: Exception, begun: float) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        wire = to_wire(typed(error, self._name, self._telemetry))
        self._stats.finished(wire.code.name, perf_counter() - begun)
        await context.abort(wire.code, wire.details, wire.trailing_metadata)


def typed(error: Exception, method: str, telemetry: Telemetry) -> KvholdError:
    """The error itself, or, for a bug, one that says so on the wire; the log gets the traceback."""
    if isinstance(error, KvholdError):
        return error
    logger.error("%s failed unexpectedly", method, exc_info=error)
    telemetry.num_unexpected_errors += 1
    return UnexpectedFault(method, type(error).__name__)


def bounded(decode: Callable[[bytes], Any] | None, max_message_bytes: int) -> Decode:
    """A decoder that refuses oversize and malformed messages with typed errors."""
    assert decode is not None
    owner = getattr(decode, "__self__", None)
    message = getattr(getattr(owner, "DESCRIPTOR", None), "full_name", "request")

    def decoded(data: bytes) -> Any:
        if len(data) > max_message_bytes:
            raise MessageTooLarge(len(data), max_message_bytes)
        try:
            return decode(data)
        except DecodeError as error:
            raise MalformedMessage(message, str(error)) from None

    return decoded
