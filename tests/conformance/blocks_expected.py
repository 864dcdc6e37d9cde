"""Operations of recorded block traces from which ours differs on purpose. docs/blocks.md explains each reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDifference:
    """Of one trace: why, and the operations, as inclusive ranges of their `i`."""

    reason: str
    operations: tuple[tuple[int, int], ...]

    def covers(self, operation: int) -> bool:
        return any(first <= operation <= last for first, last in self.operations)


EXPECTED_DIFFERENCES: dict[str, ExpectedDifference] = {
    "chunk_only": ExpectedDifference(
        reason="a chunked-local group alone must not hit prompts that nobody ever computed",
        operations=((1, 458),),  # the first lookup; everything after it is another history
    ),
}
