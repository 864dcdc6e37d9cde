"""BlockService's stub over the local transport, with gRPC's face: the same tests run on both."""

import asyncio
import struct
from typing import Any

import grpc

from kvhold.v1 import block_pb2 as pb
from kvhold_server.app import Daemon

HEADER = struct.Struct("<IB")
NUMBERS = {"Step": 1, "Lookup": 2, "Allocate": 3, "Publish": 4, "Free": 5}
CODES = {code.value[0]: code for code in grpc.StatusCode}


def frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload) + 1, kind) + payload


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, path: str) -> "Wire":
        return cls(*await asyncio.open_unix_connection(path))

    def send(self, kind: int, payload: bytes) -> None:
        self.writer.write(frame(kind, payload))

    async def receive(self) -> tuple[int, bytes]:
        length, code = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        return code, await self.reader.readexactly(length - 1)

    async def ended(self) -> bool:
        """The daemon hung up."""
        return await asyncio.wait_for(self.reader.read(1), 5.0) == b""

    def close(self) -> None:
        self.writer.close()


class LocalBlocks:
    """Calls by name, as the generated stub has them. Observers, who have no session, stay on gRPC."""

    def __init__(self, daemon: Daemon, grpc_stub: Any) -> None:
        self._daemon = daemon
        self._grpc_stub = grpc_stub
        self._wires: dict[str, Wire] = {}

    def __getattr__(self, name: str) -> Any:
        async def call(request: Any) -> Any:
            if not request.session_id:
                return await getattr(self._grpc_stub, name)(request)
            wire = await self._wire(request.session_id)
            wire.send(NUMBERS[name], request.SerializeToString())
            code, payload = await wire.receive()
            if code:
                trailing = grpc.aio.Metadata(("grpc-status-details-bin", payload))
                raise grpc.aio.AioRpcError(CODES[code], grpc.aio.Metadata(), trailing)
            return getattr(pb, f"{name}Response").FromString(payload)

        return call

    async def _wire(self, session_id: str) -> Wire:
        if session_id not in self._wires:
            transport = self._daemon.local_transport
            assert transport is not None
            wire = await Wire.open(str(transport.path))
            wire.send(0, transport.tokens.issue(session_id))
            assert await wire.receive() == (0, b"")
            self._wires[session_id] = wire
        return self._wires[session_id]
