"""What a plan says about itself, on the wire: the choice of the compact strategy, and explanations."""

from typing import Any

from kvhold.v1 import plan_pb2 as pb
from kvhold_server.domain.plan import GroupingChoice, GroupingOption
from kvhold_server.planner.explanation import BlockPool, Explanation, KindShare, RankExplanation, Waste, WasteCause
from kvhold_server.rpc.wire_values import wire

_CAUSES: dict[WasteCause, Any] = {cause: getattr(pb, f"WASTE_CAUSE_{cause.name}") for cause in WasteCause}


def encode_choice(choice: GroupingChoice) -> pb.GroupingChoice:
    """What the compact strategy decided between."""
    return pb.GroupingChoice(
        chosen=_encode_option(choice.chosen),
        runners_up=[_encode_option(option) for option in choice.runners_up],
        num_considered=choice.num_considered,
    )


def _encode_option(option: GroupingOption) -> pb.GroupingOption:
    return pb.GroupingOption(
        description=option.description,
        layout=wire(option.layout),
        num_groups=option.num_groups,
        grid_tokens=option.grid_tokens,
        request_bytes=option.request_bytes,
        max_model_len_tokens=option.max_model_len_tokens,
        capacity_tokens=option.capacity_tokens,
        max_concurrency=option.max_concurrency,
        verdict=option.verdict,
    )


def encode_explanation(explanation: Explanation) -> pb.PlanExplanation:
    """Everything that `explain` found."""
    return pb.PlanExplanation(
        ranks=[_encode_rank(rank) for rank in explanation.ranks],
        checks=[
            pb.FeasibilityCheck(
                description=check.description,
                pool=check.pool.value,
                needed_blocks=check.needed_blocks,
                usable_blocks=check.usable_blocks,
                ok=check.ok,
            )
            for check in explanation.checks
        ],
        longest_request_tokens=explanation.longest_request_tokens,
        memory_steps=[
            pb.MemoryStep(
                delta_bytes=step.delta_bytes,
                num_blocks=step.num_blocks,
                capacity_tokens=step.capacity_tokens,
                max_concurrency=step.max_concurrency,
                max_model_len_tokens=step.max_model_len_tokens,
                refusal=step.refusal,
            )
            for step in explanation.memory_steps
        ],
    )


def _encode_rank(rank: RankExplanation) -> pb.RankExplanation:
    return pb.RankExplanation(
        ranks=rank.ranks,
        kinds=[_encode_kind(kind) for kind in rank.kinds],
        request_bytes=rank.request_bytes,
        request_waste=[_encode_waste(waste) for waste in rank.request_waste],
        memory_waste=[_encode_waste(waste) for waste in rank.memory_waste],
        available_bytes=rank.available_bytes,
    )


def _encode_kind(share: KindShare) -> pb.KindShare:
    return pb.KindShare(
        kind=share.kind,
        num_layers=share.num_layers,
        block_bytes=share.block_bytes,
        request_bytes=share.request_bytes,
        host_resident=share.pool is BlockPool.HOST,
        in_draft_pool=share.pool is BlockPool.DRAFT,
    )


def _encode_waste(waste: Waste) -> pb.Waste:
    return pb.Waste(cause=_CAUSES[waste.cause], size_bytes=waste.size_bytes, percent=waste.percent, groups=waste.groups)
