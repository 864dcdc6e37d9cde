"""The daemon of the chaos run: the real one, with failpoints, on a small file system, and with an inspector inside.

The inspector looks at everything twice a second between two turns of the event loop: all invariants, no block held by
two sessions that do not share its contents, and every recovery record true. What it finds is written to a file at once.
"""

import asyncio
import sys
import traceback
from pathlib import Path

from kvhold_server import app
from kvhold_server.app import Daemon
from kvhold_server.config import ServerConfig
from kvhold_server.failpoints import Failpoints
from kvhold_server.memory.backend import MemoryBackend
from kvhold_server.memory.fake import FakeBackend
from kvhold_server.memory.posix_shm import PosixShmBackend, PosixShmOptions
from kvhold_server.node.live_pool import LivePool

INSPECTION_S = 0.5


def check_holders(live: LivePool) -> None:
    """A block in tables of two sessions has a hash: only contents that both asked for are shared."""
    holders: dict[int, set[int]] = {}
    for owner in live.pool.tenures.sessions.values():
        for sequence in owner.sequences.values():
            for table in sequence.tables:
                for block in table:
                    if block:
                        holders.setdefault(block, set()).add(owner.serial)
    for block, sessions in holders.items():
        assert len(sessions) == 1 or live.pool.store.key_of[block] is not None, f"block {block} is held by {sessions}"


def check_records(live: LivePool) -> None:
    """What a successor would find is published by a completed step, under the recorded hash."""
    if live.journal is None:
        return
    store, found = live.pool.store, live.journal.table.scan()
    assert not found.num_torn, f"{found.num_torn} torn records without a crash"
    for block, key in zip(found.blocks, found.hashes, strict=True):
        origin = store.origin_of[block]
        assert store.key_of[block] == key and origin is not None and origin.is_public, f"record of block {block}"


async def inspect_forever(daemon: Daemon, findings: Path) -> None:
    """Never ends."""
    while True:
        await asyncio.sleep(INSPECTION_S)
        try:
            daemon.node.sessions.check_invariants()
            for live in daemon.node.pools.values():
                live.pool.check_invariants()
                check_holders(live)
                check_records(live)
        except AssertionError:
            with findings.open("a") as file:
                file.write(traceback.format_exc())


async def serve(config: ServerConfig, failpoints: Failpoints | None, findings: Path) -> None:
    daemon = Daemon(config, hit=failpoints)
    with daemon.stops_on_signals():
        await daemon.start()
        inspector = asyncio.create_task(inspect_forever(daemon, findings))
        await daemon.run_until_stopped()
        inspector.cancel()


def main(directory: str, memory: str, failpoints: str) -> None:
    """State and socket in `directory`, segments in `memory`."""

    def backends(config: ServerConfig) -> dict[str, MemoryBackend]:
        posix = PosixShmBackend(config.state_path, PosixShmOptions(directory=Path(memory)))
        return {"posix_shm": posix, "fake": FakeBackend()}

    app.make_backends = backends
    config = ServerConfig(
        socket=f"{directory}/kvhold.sock",
        lease_ttl_s=3.0,
        grace_period_s=4.0,
        drain_deadline_s=0.5,
        tick_interval_s=0.05,
    )
    armed = Failpoints.parse(failpoints) if failpoints else None
    asyncio.run(serve(config, armed, Path(directory) / "findings"))


if __name__ == "__main__":
    main(*sys.argv[1:4])
