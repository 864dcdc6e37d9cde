"""What a plan says about itself, as tables: bytes by kind, waste by cause, what fits, what more memory would give."""

from collections.abc import Iterator, Sequence

from kvhold_client.cli.console import Console
from kvhold_client.cli.plan_picture import pictures
from kvhold_client.cli.units import format_bytes, format_count, format_share
from kvhold_client.explanation import (
    GroupingChoice,
    GroupingOption,
    KindShare,
    MemoryStep,
    PlanExplanation,
    RankExplanation,
    Waste,
)
from kvhold_client.plan import Plan

CAUSES = {
    "page_padding": "pages are padded to one size or an alignment",
    "narrow_group": "groups with fewer bytes than a block: dummy layers",
    "block_alignment": "blocks are rounded up to the alignment asked for",
    "null_block": "the null block",
    "remainder": "less than a block is left",
    "other_limit": "another rank has less, or the number of blocks is given",
}


def print_explanation(console: Console, plan: Plan) -> None:
    """Pictures, then where bytes go, then what would change."""
    for picture in pictures(plan):
        console.print()
        console.heading(f"block 0 on {ranks_text(picture.ranks)}")
        for line in picture.lines:
            console.print(line)
    if plan.explanation is not None:
        for rank in plan.explanation.ranks:
            _print_rank(console, rank)
        _print_checks(console, plan.explanation)
        _print_steps(console, plan, plan.explanation)
    if plan.choice is not None:
        _print_choice(console, plan.choice)


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 0", "ranks 0–7", "ranks 0, 2, 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def _print_rank(console: Console, rank: RankExplanation) -> None:
    console.print()
    console.heading(f"bytes on {ranks_text(rank.ranks)}: one longest request takes {format_bytes(rank.request_bytes)}")
    rows = [_kind_row(share, rank.request_bytes) for share in rank.kinds]
    rows += [_waste_row(waste) for waste in rank.request_waste]
    console.table(("what", "layers", "in a block", "in a longest request", "share"), rows)
    if rank.memory_waste:
        console.print()
        console.print(f"of {format_bytes(rank.available_bytes)} offered, held by nothing:")
        console.table(("cause", "bytes", "share"), list(_memory_rows(rank.memory_waste)))


def _kind_row(share: KindShare, whole: int) -> tuple[str, ...]:
    where = " (host)" if share.host_resident else " (drafter's pool)" if share.in_draft_pool else ""
    return (
        share.kind + where,
        str(share.num_layers),
        format_bytes(share.block_bytes),
        format_bytes(share.request_bytes),
        "-" if where else format_share(share.request_bytes, whole),
    )


def _waste_row(waste: Waste) -> tuple[str, ...]:
    groups = ", ".join(map(str, waste.groups))
    return (
        f"waste: {CAUSES.get(waste.cause, waste.cause)} (group {groups})",
        "",
        "",
        format_bytes(waste.size_bytes),
        f"{waste.percent:.1f} %",
    )


def _memory_rows(wastes: Sequence[Waste]) -> Iterator[tuple[str, ...]]:
    for waste in wastes:
        yield CAUSES.get(waste.cause, waste.cause), format_bytes(waste.size_bytes), f"{waste.percent:.2f} %"


def _print_checks(console: Console, explanation: PlanExplanation) -> None:
    console.print()
    console.heading("can it ever be admitted?")
    rows = [
        (
            check.description,
            check.pool,
            format_count(check.needed_blocks),
            format_count(check.usable_blocks),
            "yes" if check.ok else "NO",
        )
        for check in explanation.checks
    ]
    console.table(("asked", "blocks of", "needed", "usable", "fits"), rows)


def _print_steps(console: Console, plan: Plan, explanation: PlanExplanation) -> None:
    longest = explanation.longest_request_tokens
    said = "no length is too long, or none fits" if longest is None else f"{format_count(longest)} tokens"
    console.print()
    console.print(f"longest request that fits: {said}")
    console.print()
    console.heading("with other memory on every rank")
    now = ("as it is", *_numbers(plan.num_blocks, plan.capacity_tokens, plan.max_concurrency))
    rows = [_step_row(step) for step in explanation.memory_steps]
    console.table(("memory", "blocks", "capacity", "concurrency"), [*rows[:1], now, *rows[1:]])


def _step_row(step: MemoryStep) -> tuple[str, ...]:
    sign = "+" if step.delta_bytes > 0 else "-"
    name = f"{sign} {format_bytes(abs(step.delta_bytes))}"
    if step.refusal:
        return name, "does not fit", "-", "-"
    return name, *_numbers(step.num_blocks, step.capacity_tokens, step.max_concurrency)


def _numbers(num_blocks: int, capacity_tokens: int, concurrency: float) -> tuple[str, str, str]:
    return format_count(num_blocks), f"{format_count(capacity_tokens)} tokens", f"{concurrency:.2f}"


def _print_choice(console: Console, choice: GroupingChoice) -> None:
    console.print()
    console.heading(f"chosen from {choice.num_considered} ways to group")
    rows = [_option_row(option) for option in (choice.chosen, *choice.runners_up)]
    console.table(("way", "layout", "groups", "grid", "capacity", "why"), rows)


def _option_row(option: GroupingOption) -> tuple[str, ...]:
    return (
        option.description,
        option.layout,
        str(option.num_groups),
        f"{option.grid_tokens} tokens",
        f"{format_count(option.capacity_tokens)} tokens",
        option.verdict,
    )
