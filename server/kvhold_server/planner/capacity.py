"""Memory ↔ blocks ↔ tokens. The same functions answer planning, auto-fit, errors and reported capacities.

    memory of a rank      │ null block │ blocks that requests may hold ………………… │ rest < one block │
                          └─ reserve ──┴─ spare: what one request must fit into ─┘

Whether a length fits is a function of the length, so the longest is found by bisection and nothing is changed
meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhold_server.domain.layer_spec import Limits, cdiv
from kvhold_server.planner.arrangement import Arrangement
from kvhold_server.planner.errors import CannotAutoFit, InsufficientMemory, NoMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """One rank's arrangement with its memory; a block-count override replaces what the memory would give."""

    rank: int
    arrangement: Arrangement
    available_bytes: int
    num_blocks_override: int | None = None

    def memory_bytes(self, limits: Limits) -> int:
        """Bytes to plan with."""
        if self.num_blocks_override is None:
            return self.available_bytes
        return self.num_blocks_override * self.arrangement.reserve_bytes + self.arrangement.pool_bytes(limits)

    def spare_bytes(self, limits: Limits) -> int:
        """Bytes that requests (and the drafter's pool) may use: all but the null block."""
        return self.memory_bytes(limits) - self.arrangement.reserve_bytes

    def fits(self, limits: Limits) -> bool:
        """Does one request of that length fit?"""
        return self.arrangement.fits(limits, self.spare_bytes(limits))

    def num_blocks(self, limits: Limits) -> int:
        """Blocks of this rank alone, null block included."""
        if self.num_blocks_override is not None:
            return self.num_blocks_override
        return self.arrangement.num_blocks(self.available_bytes, limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLength:
    """The longest request that fits on all ranks, and the rank that decided."""

    max_model_len_tokens: int
    rank: int


def longest_fitting(fits: Callable[[int], bool], upper: int) -> int:
    """The largest length in 1..upper that fits, 0 if none does. `fits` is monotone."""
    if not fits(1):
        return 0
    low, high = 1, upper
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def longest_request(budget: RankBudget, limits: Limits) -> int:
    """The longest request, up to the length asked for, that fits on one rank."""
    return longest_fitting(lambda length: budget.fits(limits.with_len(length)), limits.max_model_len_tokens)


def fit_length(budgets: Sequence[RankBudget], limits: Limits) -> FittedLength:
    """The longest request that fits on every rank. Raises CannotAutoFit."""
    fitted = FittedLength(max_model_len_tokens=limits.max_model_len_tokens, rank=budgets[0].rank)
    for budget in distinct_budgets(budgets):
        length = longest_request(budget, limits.with_len(fitted.max_model_len_tokens))
        if length <= 0:
            shortest = limits.with_len(1)
            raise CannotAutoFit(
                rank=budget.rank,
                available_bytes=budget.spare_bytes(shortest),
                needed_bytes=budget.arrangement.need_bytes(shortest),
            )
        if length < fitted.max_model_len_tokens:
            fitted = FittedLength(max_model_len_tokens=length, rank=budget.rank)
    return fitted


def check_any_memory(budgets: Sequence[RankBudget], limits: Limits) -> None:
    """Raises NoMemory for the first rank that has no block besides the null block."""
    for budget in distinct_budgets(budgets):
        if budget.spare_bytes(limits) <= 0:
            raise NoMemory(
                rank=budget.rank,
                available_bytes=budget.memory_bytes(limits),
                block_bytes=budget.arrangement.reserve_bytes,
                needed_bytes=budget.arrangement.need_bytes(limits),
                min_blocks=_min_blocks(budget, limits),
                max_model_len_tokens=limits.max_model_len_tokens,
            )


def check_one_request(budgets: Sequence[RankBudget], limits: Limits) -> None:
    """Raises InsufficientMemory for the first rank that cannot hold one request of the length asked for."""
    for budget in distinct_budgets(budgets):
        spare, need = budget.spare_bytes(limits), budget.arrangement.need_bytes(limits)
        if need > spare:
            raise InsufficientMemory(
                rank=budget.rank,
                available_bytes=spare,
                block_bytes=budget.arrangement.reserve_bytes,
                needed_bytes=need,
                min_blocks=_min_blocks(budget, limits),
                max_model_len_tokens=limits.max_model_len_tokens,
                estimated_max_model_len_tokens=longest_request(budget, limits),
            )


def _min_blocks(budget: RankBudget, limits: Limits) -> int:
    """Blocks of one request and the null block."""
    need = budget.arrangement.need_bytes(limits) - budget.arrangement.pool_bytes(limits)
    return cdiv(need, budget.arrangement.reserve_bytes) + 1


def distinct_budgets(budgets: Sequence[RankBudget]) -> list[RankBudget]:
    """The first rank of each different arrangement and memory: the others have the same answers."""
    return list({(id(b.arrangement), b.available_bytes): b for b in reversed(budgets)}.values())[::-1]
