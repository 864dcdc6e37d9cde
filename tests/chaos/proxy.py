"""A unix-socket proxy between schedulers and daemon that can cut, delay and stall what passes. Runs in a thread."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path


class Proxy:
    """`path` is where clients connect. All verbs may be called from another thread."""

    def __init__(self, path: Path, daemon: Path) -> None:
        self.path = path
        self._daemon = daemon
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        self._ready.wait()

    def cut(self) -> int:
        """Breaks every connection now; returns how many there were."""
        num = len(self._writers) // 2
        self._call(self._cut)
        return num

    def set_delay(self, seconds: float) -> None:
        """Every piece of data waits this long from now on."""
        self._delay_s = seconds

    def stall(self) -> None:
        """Nothing passes any more, and nothing is closed: what a half-open connection looks like."""
        self._call(self._open.clear)

    def resume(self) -> None:
        """What was held back passes."""
        self._call(self._open.set)

    def close(self) -> None:
        """Ends the thread."""
        self._call(self._cut)
        self._call(self._loop.stop)
        self._thread.join()

    def _call(self, verb: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(verb)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_unix_server(self._serve, self.path))
        self._ready.set()
        self._loop.run_forever()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            daemon_reader, daemon_writer = await asyncio.open_unix_connection(self._daemon)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, daemon_writer}
        await asyncio.gather(self._pass(reader, daemon_writer), self._pass(daemon_reader, writer))
        self._writers -= {writer, daemon_writer}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
