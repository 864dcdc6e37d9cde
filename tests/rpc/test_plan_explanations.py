"""What a plan says about itself, over a real socket: only where asked for, and the compact strategy's choice always."""

import asyncio
from pathlib import Path

from kvhold.v1 import plan_pb2 as pb
from kvhold.v1 import pool_pb2
from kvhold_client.host_memory import RegionExport
from kvhold_client.mapping import MappedRegion, RankLayout, map_region
from kvhold_client.rank_layout import rank_layout_from_message, region_export_from_message
from tests.rpc.harness import RunningDaemon, llama, running


def hybrid(strategy: pb.Strategy.ValueType, **config: object) -> pb.PlanRequest:
    """One full layer and 36 windows, equal pages."""
    request = llama(memory_bytes=64 << 20, num_layers=1)
    request.config.strategy = strategy
    request.config.layout = pb.LAYOUT_BLHNC
    window = request.layer_specs.add()
    window.CopyFrom(request.layer_specs[0])
    window.sliding_window.sliding_window_tokens = 64
    for number in range(36):
        request.ranks[0].layers.add(layer_name=f"windows.{number}", layer_spec_index=1)
    request.config.MergeFrom(pb.PlannerConfig(**config))  # type: ignore[arg-type]
    return request


async def test_explanations_are_given_where_asked_for(daemon: RunningDaemon) -> None:
    request = hybrid(pb.STRATEGY_MODERN)
    plain = await daemon.plans.Plan(request)
    assert not plain.HasField("explanation") and not plain.HasField("choice")
    request.explain = True
    answer = await daemon.plans.Plan(request)
    assert answer.plan == plain.plan
    (rank,) = answer.explanation.ranks
    assert list(rank.ranks) == [0]
    wasted = sum(waste.size_bytes for waste in rank.request_waste)
    assert sum(share.request_bytes for share in rank.kinds) + wasted == rank.request_bytes
    assert [(check.pool, check.ok) for check in answer.explanation.checks] == [("device", True)]
    assert answer.explanation.longest_request_tokens > 1024
    less, more = answer.explanation.memory_steps
    assert less.refusal and less.num_blocks == 0
    assert more.num_blocks > answer.plan.num_blocks


async def test_the_choice_of_compact_comes_with_every_such_plan(daemon: RunningDaemon) -> None:
    answer = await daemon.plans.Plan(hybrid(pb.STRATEGY_COMPACT))
    assert answer.plan.strategy == pb.STRATEGY_COMPACT
    assert answer.choice.chosen.num_groups == len(answer.plan.scheduler_groups) <= 12
    assert [option.verdict for option in answer.choice.runners_up if option.num_groups == 37]
    bounded = hybrid(pb.STRATEGY_COMPACT, compact=pb.CompactConfig(max_num_groups=4, keep_layout=True))
    assert (await daemon.plans.Plan(bounded)).choice.chosen.num_groups <= 4


async def test_a_compact_plan_opens_a_pool_that_workers_can_map_and_others_attach_to(short_dir: Path) -> None:
    async with running(short_dir, backend="posix_shm") as daemon:
        request = hybrid(pb.STRATEGY_COMPACT)
        first = await daemon.pools.OpenPool(pool_pb2.OpenPoolRequest(name="hybrid", plan=request))
        again = await daemon.pools.OpenPool(pool_pb2.OpenPoolRequest(name="hybrid", plan=request))
        assert again.outcome == pool_pb2.OPEN_POOL_OUTCOME_ATTACHED
        assert again.pool.plan.fingerprint == first.pool.plan.fingerprint
        export = await daemon.pools.ExportMemory(pool_pb2.ExportMemoryRequest(pool="hybrid", rank=0))
        layout = rank_layout_from_message(first.pool.plan, 0)
        exports = [region_export_from_message(region) for region in export.regions]
        assert await asyncio.to_thread(_map_and_write, exports, layout)


def _map_and_write(exports: list[RegionExport], layout: RankLayout) -> bool:
    with map_region(exports, layout, library="numpy") as region:
        return _blocks_stay_apart(region)  # no view may outlive the call


def _blocks_stay_apart(region: MappedRegion) -> bool:
    """Block n of layer n is filled with n, and then all are read again: none reaches another's bytes."""
    views = list(region.views.values())
    assert len(views) == 37
    for number, view in enumerate(views, start=1):
        view[number] = number
    return all(bool((view[number] == number).all()) for number, view in enumerate(views, start=1))
