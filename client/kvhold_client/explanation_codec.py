"""Generated messages → what a plan says about itself."""

from kvhold.v1 import plan_pb2
from kvhold_client.enum_words import enum_word
from kvhold_client.explanation import (
    FeasibilityCheck,
    GroupingChoice,
    GroupingOption,
    KindShare,
    MemoryStep,
    PlanExplanation,
    RankExplanation,
    Waste,
)


def decode_choice(m: plan_pb2.GroupingChoice) -> GroupingChoice:
    """What the compact strategy decided between."""
    return GroupingChoice(
        chosen=_option(m.chosen),
        runners_up=tuple(_option(option) for option in m.runners_up),
        num_considered=m.num_considered,
    )


def _option(m: plan_pb2.GroupingOption) -> GroupingOption:
    return GroupingOption(
        description=m.description,
        layout=enum_word(plan_pb2.Layout, m.layout, "LAYOUT_").upper(),
        num_groups=m.num_groups,
        grid_tokens=m.grid_tokens,
        request_bytes=m.request_bytes,
        max_model_len_tokens=m.max_model_len_tokens,
        capacity_tokens=m.capacity_tokens,
        max_concurrency=m.max_concurrency,
        verdict=m.verdict,
    )


def decode_explanation(m: plan_pb2.PlanExplanation) -> PlanExplanation:
    """Everything that `explain` asked for."""
    return PlanExplanation(
        ranks=tuple(_rank(rank) for rank in m.ranks),
        checks=tuple(
            FeasibilityCheck(
                description=check.description,
                pool=check.pool,
                needed_blocks=check.needed_blocks,
                usable_blocks=check.usable_blocks,
                ok=check.ok,
            )
            for check in m.checks
        ),
        longest_request_tokens=m.longest_request_tokens if m.HasField("longest_request_tokens") else None,
        memory_steps=tuple(
            MemoryStep(
                delta_bytes=step.delta_bytes,
                num_blocks=step.num_blocks,
                capacity_tokens=step.capacity_tokens,
                max_concurrency=step.max_concurrency,
                max_model_len_tokens=step.max_model_len_tokens,
                refusal=step.refusal,
            )
            for step in m.memory_steps
        ),
    )


def _rank(m: plan_pb2.RankExplanation) -> RankExplanation:
    return RankExplanation(
        ranks=tuple(m.ranks),
        kinds=tuple(
            KindShare(
                kind=share.kind,
                num_layers=share.num_layers,
                block_bytes=share.block_bytes,
                request_bytes=share.request_bytes,
                host_resident=share.host_resident,
                in_draft_pool=share.in_draft_pool,
            )
            for share in m.kinds
        ),
        request_bytes=m.request_bytes,
        request_waste=tuple(_waste(waste) for waste in m.request_waste),
        memory_waste=tuple(_waste(waste) for waste in m.memory_waste),
        available_bytes=m.available_bytes,
    )


def _waste(m: plan_pb2.Waste) -> Waste:
    return Waste(
        cause=enum_word(plan_pb2.WasteCause, m.cause, "WASTE_CAUSE_"),
        size_bytes=m.size_bytes,
        percent=m.percent,
        groups=tuple(m.groups),
    )
