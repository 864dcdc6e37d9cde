"""The answer of one Step: columns, as on the wire, each read when it is asked for.

Entry i belongs to item i, entry i * num_groups + g to item i, group g. Most steps need two or three of the columns; the
others cost nothing.
"""

from kvhold.v1 import block_pb2 as pb
from kvhold_client.results import BlockCopy, ItemProblem, PoolCounts, StateHandoff


class StepReply:
    """Read only. Lists are fresh with each access."""

    __slots__ = ("_message",)

    def __init__(self, message: pb.StepResponse) -> None:
        self._message = message

    @property
    def boot_id(self) -> str:
        """The daemon's tenure."""
        return self._message.boot_id

    @property
    def replayed(self) -> bool:
        """The stored answer to an earlier request with this number."""
        return self._message.replayed

    @property
    def num_freed_blocks(self) -> list[int]:
        """Per free item."""
        return list(self._message.num_freed_blocks)

    @property
    def extend_statuses(self) -> list[int]:
        """ItemStatus, per extend item."""
        return list(self._message.extend.statuses)

    @property
    def extend_num_new_blocks(self) -> list[int]:
        """Per extend item and group."""
        return list(self._message.extend.num_new_blocks)

    @property
    def extend_block_ids(self) -> list[int]:
        """Appended table entries, flat."""
        return list(self._message.extend.block_ids)

    @property
    def admit_statuses(self) -> list[int]:
        """ItemStatus, per admit item."""
        return list(self._message.admit.statuses)

    @property
    def admit_hit_tokens(self) -> list[int]:
        """Per admit item."""
        return list(self._message.admit.hit_tokens)

    @property
    def admit_granted_tokens(self) -> list[int]:
        """Per admit item."""
        return list(self._message.admit.granted_tokens)

    @property
    def admit_num_blocks(self) -> list[int]:
        """Table entries, per admit item and group."""
        return list(self._message.admit.num_blocks)

    @property
    def admit_num_hit_blocks(self) -> list[int]:
        """Of these, leading ones that were hit, per admit item and group."""
        return list(self._message.admit.num_hit_blocks)

    @property
    def admit_block_ids(self) -> list[int]:
        """Whole tables, flat."""
        return list(self._message.admit.block_ids)

    @property
    def admit_boundary_tokens(self) -> list[int]:
        """Shared-prefix boundaries, per admit item."""
        return list(self._message.admit.shared_prefix_boundary_tokens)

    @property
    def lookup_hit_tokens(self) -> list[int]:
        """Per lookup item."""
        return list(self._message.lookup.hit_tokens)

    @property
    def copies(self) -> list[BlockCopy]:
        """What the workers copy before the step's kernels run."""
        copies = self._message.copies
        rows = zip(copies.group_ids, copies.source_block_ids, copies.target_block_ids, strict=True)
        return [BlockCopy(group_id=g, source_block_id=s, target_block_id=t) for g, s, t in rows]

    @property
    def handoffs(self) -> list[StateHandoff]:
        """Which states the step's kernels leave where, for whoever hits them."""
        told = self._message.handoffs
        rows = zip(told.sequence_ids, told.group_ids, told.block_ids, told.boundary_tokens, strict=True)
        return [StateHandoff(sequence_id=s, group_id=g, block_id=b, boundary_tokens=t) for s, g, b, t in rows]

    @property
    def zero_block_ids(self) -> list[int]:
        """What the workers clear first."""
        return list(self._message.zero_block_ids)

    @property
    def evicted_hashes(self) -> bytes:
        """Concatenated, if they were asked for."""
        return self._message.evicted_hashes

    @property
    def has_problems(self) -> bool:
        """Some item failed for a reason of its own."""
        return len(self._message.problems) > 0

    @property
    def problems(self) -> list[ItemProblem]:
        """Items that failed for reasons of their own."""
        return [
            ItemProblem(part=problem.part, index=problem.index, reason=problem.reason, message=problem.message)
            for problem in self._message.problems
        ]

    @property
    def is_only_session(self) -> bool:
        """Nobody else changes the pool until this session's next request."""
        return self._message.is_only_session

    @property
    def allotted_block_ids(self) -> list[int]:
        """Blocks that the session may draw by itself, front first."""
        return list(self._message.allotted_block_ids)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that the session could be given now."""
        return self._message.counts.num_available_blocks

    @property
    def counts(self) -> PoolCounts:
        """The pool after the step."""
        return decode_counts(self._message.counts)


def decode_counts(message: pb.PoolCounts) -> PoolCounts:
    """Blocks by state."""
    return PoolCounts(
        num_free_blocks=message.num_free_blocks,
        num_cached_blocks=message.num_cached_blocks,
        num_held_blocks=message.num_held_blocks,
        num_quarantined_blocks=message.num_quarantined_blocks,
        num_provisional_blocks=message.num_provisional_blocks,
        num_blocks=message.num_blocks,
        num_available_blocks=message.num_available_blocks,
    )
