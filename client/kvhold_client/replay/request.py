"""One row of the trace on its way through a scheduler."""

from kvhold_client.replay.trace import TraceRow
from kvhold_client.sequence import Sequence


class Request:
    """Counts of tokens are absolute: known, computed, to be generated in all."""

    __slots__ = (
        "is_inherited",
        "num_computed",
        "num_final",
        "num_tokens",
        "row_index",
        "sequence",
        "was_preempted",
    )

    def __init__(
        self, row_index: int, row: TraceRow, sequence: Sequence, *, num_output: int, is_inherited: bool
    ) -> None:
        self.row_index = row_index
        self.sequence = sequence
        self.num_tokens = row.input_length  # known: prompt and generated ones
        self.num_final = row.input_length + num_output  # known when it is over
        self.num_computed = 0
        self.was_preempted = False
        self.is_inherited = is_inherited  # a killed predecessor had begun it
