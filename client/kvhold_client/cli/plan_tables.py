"""A plan as tables: groups, tensors, memory, capacity, warnings."""

from collections.abc import Sequence

from kvhold_client.cli.console import Console
from kvhold_client.cli.plan_explained import print_explanation
from kvhold_client.cli.units import format_bytes, format_count, format_share
from kvhold_client.layout import Placement
from kvhold_client.plan import Plan, PlannedGroup, PlannedRank

MAX_TENSORS_SHOWN = 8


def print_plan(console: Console, title: str, plan: Plan, *, all_tensors: bool = False) -> None:
    """Everything that a person asks of a plan."""
    layout = f", layout {plan.layout}" if plan.layout != "UNSPECIFIED" else ""
    console.heading(f"{title}: {plan.strategy} plan{layout}, fingerprint {plan.fingerprint[:12]}")
    rank = plan.ranks[0]
    console.print()
    console.table(
        ("group", "kind", "layers", "block", "page", "block bytes", "blocks/request", "prefix"),
        [_group_row(i, group, rank) for i, group in enumerate(rank.groups)],
    )
    console.print()
    _print_tensors(console, rank, all_tensors=all_tensors)
    console.print()
    _print_memory(console, plan)
    print_explanation(console, plan)
    for warning in plan.warnings:
        console.print(f"{console.styled('warning', 'yellow')}  {warning.message}")


def _group_row(i: int, group: PlannedGroup, rank: PlannedRank) -> tuple[str, ...]:
    kind = " + ".join(group.member_kinds) or group.kind
    if group.sliding_window_tokens:
        kind += f" {group.sliding_window_tokens}"
    elif group.attention_chunk_size_tokens:
        kind += f" {group.attention_chunk_size_tokens}"
    return (
        str(i),
        kind,
        str(len(group.layer_names)),
        f"{group.block_size_tokens} tokens",
        format_bytes(group.page_size_bytes),
        format_bytes(rank.used_bytes(group)),
        format_count(group.max_request_blocks),
        "yes" if group.prefix_cacheable else "no",
    )


def _print_tensors(console: Console, rank: PlannedRank, *, all_tensors: bool) -> None:
    shown = rank.placements if all_tensors else rank.placements[:MAX_TENSORS_SHOWN]
    headers = (
        "tensor",
        "layers",
        "shape [layer, block, head, state, content]",
        "offset",
        "layer stride",
        "block stride",
    )
    console.table(headers, [_tensor_row(i, placement) for i, placement in enumerate(shown)])
    if len(shown) < len(rank.placements):
        console.print(f"… and {len(rank.placements) - len(shown)} more (--tensors lists all)")


def _tensor_row(i: int, p: Placement) -> tuple[str, ...]:
    shape: Sequence[int] = (len(p.layer_names), p.num_blocks, p.num_heads, p.num_states, p.content_bytes)
    first, last = p.layer_names[0], p.layer_names[-1]
    return (
        str(i),
        first if first == last else f"{first} … {last}",
        str(list(shape)),
        format_count(p.offset_bytes),
        format_count(p.layer_stride_bytes),
        format_count(p.block_stride_bytes),
    )


def _print_memory(console: Console, plan: Plan) -> None:
    rank = plan.ranks[0]
    usable = plan.num_blocks - 1
    waste = rank.wasted_bytes_per_block
    rows = [
        ("blocks", f"{format_count(usable)} usable + 1 null, {format_bytes(rank.bytes_per_block)} each"),
        ("region", f"{format_bytes(rank.region_size_bytes)} on each of {len(plan.ranks)} rank(s)"),
        ("waste", f"{format_bytes(waste)} a block at most, {format_share(waste, rank.bytes_per_block)}"),
        ("longest request", f"{format_count(plan.max_model_len_tokens)} tokens, {format_bytes(rank.needed_bytes)}"),
        ("capacity", f"{format_count(plan.capacity_tokens)} tokens in requests of that length"),
        ("concurrency", f"{plan.max_concurrency:.2f} requests of that length"),
        ("smallest request", f"{format_count(plan.min_request_blocks)} block(s)"),
    ]
    if rank.host_region_size_bytes:
        rows.insert(2, ("host region", format_bytes(rank.host_region_size_bytes)))
    for name, text in rows:
        console.print(f"{name:<17} {text}")
