"""The last act of opening: plan, memory, blocks and recovery become one LivePool."""

from dataclasses import replace

from kvhold_server.memory.backend import Region
from kvhold_server.node.annotations import Annotations
from kvhold_server.node.event_log import EventLog
from kvhold_server.node.live_pool import LivePool
from kvhold_server.node.opening import Opening
from kvhold_server.node.warm_restart import MadePool


def put_together(
    opening: Opening, regions: tuple[Region, ...], made: MadePool, now_s: float, max_events: int
) -> LivePool:
    """Cannot fail: everything that could has happened before."""
    command = opening.command
    annotations = Annotations()
    events = EventLog(config=opening.config, max_events=max_events, annotations=annotations)
    if command.options.events_carry_tokens:
        events.follow(made.pool.published())  # tokens are known while they are told, not later
    return LivePool(
        name=command.name,
        plan=command.plan,
        identity=command.identity,
        config=opening.config,
        pool=made.pool,
        journal=made.journal,
        regions=regions,
        opened_at_s=now_s,
        recovery=replace(made.recovery, duration_s=now_s - opening.begun_at_s),
        events=events,
        annotations=annotations,
        quotas=made.quotas,
    )
