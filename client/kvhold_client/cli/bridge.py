"""`kvhold bridge zmq`: cache events for routers that read an engine's ZeroMQ stream."""

import argparse
import asyncio
import signal

from kvhold_client.bridge.ports import check_apart, endpoint_of_rank
from kvhold_client.cli.console import Console
from kvhold_client.cli.exits import OK, CommandFailed, UsageError
from kvhold_client.target import normal_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's own settings, under its names where it has some."""
    parser.add_argument("format", choices=("zmq",), help="zmq: multipart messages of topic, sequence, msgpack batch")
    parser.add_argument("--pool", required=True, metavar="NAME", help="pool to follow; waits until it is opened")
    parser.add_argument("--publish", default="tcp://*:5557", metavar="E", help="endpoint of events (tcp://*:5557)")
    parser.add_argument("--replay", default="", metavar="E", help="endpoint that repeats events; none if not given")
    parser.add_argument("--topic", default="", help="first frame of each message, such as kv@<address>@<model>")
    parser.add_argument("--hashes", choices=("int", "bytes"), default="int", help="64-bit integers, or whole digests")
    parser.add_argument("--medium", default="GPU", help="where readers shall think the blocks are (GPU)")
    parser.add_argument("--buffer-steps", type=int, default=10_000, metavar="N", help="batches kept to repeat (10000)")
    parser.add_argument("--dp-rank", type=int, default=0, metavar="R", help="rank in batches; added to both ports")
    parser.add_argument(
        "--dp-size", type=int, default=1, metavar="N", help="ranks on this host: their ports must differ"
    )
    parser.add_argument("--replay-without-topic", action="store_true", help="replay frames as older engines send them")


def run(args: argparse.Namespace, console: Console) -> int:
    """Until interrupted or terminated."""
    try:
        from kvhold_client.bridge.zmq_bridge import BridgeSettings, EndpointTaken, ZmqBridge
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error.name} is not installed: pip install 'kvhold[zmq]'") from None
    if args.buffer_steps < 1 or not 0 <= args.dp_rank < args.dp_size:
        raise UsageError("--buffer-steps must be at least 1, and --dp-rank below --dp-size")
    try:
        check_apart(args.publish, args.replay, args.dp_size)
        publish, replay = (e and endpoint_of_rank(e, args.dp_rank) for e in (args.publish, args.replay))
    except ValueError as error:
        raise UsageError(str(error)) from None
    settings = BridgeSettings(
        target=normal_target(args.target),
        pool=args.pool,
        publish=publish,
        replay=replay,
        topic=args.topic,
        data_parallel_rank=args.dp_rank,
        buffer_steps=args.buffer_steps,
        medium=args.medium,
        raw_hashes=args.hashes == "bytes",
        replay_with_topic=not args.replay_without_topic,
    )

    async def bridge() -> None:
        running = ZmqBridge(settings=settings, note=console.note)
        console.print(f"publish {running.publish_endpoint}")
        if running.replay_endpoint:
            console.print(f"replay {running.replay_endpoint}")
        task = asyncio.create_task(running.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await task

    try:
        asyncio.run(bridge())
    except EndpointTaken as error:
        raise CommandFailed(str(error)) from None
    except asyncio.CancelledError:  # told to end
        pass
    return OK
